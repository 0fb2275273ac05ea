"""Reading JSONL: what is accepted, and the exact text of every refusal."""

import json
from pathlib import Path

import pytest

from rljob_runtime.data import JsonlSource
from rljob_runtime.data.jsonl import read_rows
from rljob_runtime.data.source import tags_of
from rljob_runtime.errors import DataError
from tests.support.golden import Golden

GOLDEN = Path(__file__).parents[3] / "golden" / "data"

GOOD = json.dumps({"question": "What is 2 + 3?", "answer": "5"})

BROKEN = {
    "empty-file": b"",
    "blank-lines-only": b"\n  \n",
    "not-json": GOOD.encode() + b"\n{'question': 1}\n",
    "not-an-object": b"[1, 2]\n" + GOOD.encode() + b'\n"text"\nnull\n7\ntrue\n',
    "missing-fields": b'{"prompt": "What?", "answer": "5"}\n{"question": "What?"}\n{"question": null, "answer": 1}\n',
    "wrong-types": b'{"question": 3, "answer": "5"}\n{"question": " ", "answer": "5"}\n{"question": "a", "answer": {"x": "'
    + b"y" * 60
    + b'"}}\n{"question": "a", "answer": true}\n',
    "not-utf8": GOOD.encode() + b'\n{"question": "caf\xe9", "answer": "1"}\n',
    "half-surrogate-pairs": rb'{"question": "\ud83d\ude00 is whole", "answer": "\\ud800 is six letters"}'
    + b"\n"
    + rb'{"question": "a \ud800 b", "answer": "1"}'
    + b"\n"
    + rb'{"question": "a", "answer": "\uDFFF"}'
    + b"\n"
    + rb'{"question": "a", "answer": "1", "tests": [1, {"in": "\ude00\ud83d"}]}'
    + b"\n"
    + rb'{"question": "a", "answer": "1", "\uDbff": 1}'
    + b"\n"
    + b'{"question": "a \xed\xa0\x80", "answer": "1"}\n',
    "array": b'[\n  {"question": "a", "answer": "1"},\n  {"question": "b", "answer": "2"}\n]\n',
    "parquet": b"PAR1\x15\x04\x15\x10\nabc\xff\x00\nPAR1",
    "gzip": b"\x1f\x8b\x08\x00abc\n\xff",
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n",
    "no-answers": b'{"question": "a", "answer": null}\n{"question": "b", "answer": NaN}\n{"question": "c", "answer": -Infinity}\n',
    "unreadable-values": b'{"question": "a", "answer": '
    + b"9" * 5000
    + b'}\n{"question": "a", "m": '
    + b"[" * 99999
    + b"]" * 99999
    + b"}\n",
    "messages-as-text": b'{"question": [{"role": "user", "content": "a"}], "answer": 1}\n{"question": ["a"], "answer": 1}\n',
    "many-bad-lines": b"oops\n" * 14 + GOOD.encode(),
}


def source(path, **options):
    return JsonlSource(name="mine", path=path, **options)


@pytest.mark.parametrize("case", BROKEN)
def test_refusals_read_as_recorded(case, tmp_path, golden: Golden):
    path = tmp_path / "train.jsonl"
    path.write_bytes(BROKEN[case])
    with pytest.raises(DataError) as caught:
        read_rows(source(path))
    text = str(caught.value).replace(str(tmp_path), "FOLDER") + "\n"
    assert golden.differences(GOLDEN / f"{case}.txt", text) == ""


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(DataError, match="file does not exist; fix the source's path"):
        read_rows(source(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_rows(source(tmp_path))


def test_rows_keep_order_further_fields_and_number_answers(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"q": "é one", "a": 1, "level": 3}\r\n\n{"q": "two", "a": 2.5}')
    rows = read_rows(source(path, prompt_field="q", answer_field="a"))
    assert [(r.question, r.answer, r.metadata) for r in rows] == [("é one", "1", {"level": 3}), ("two", "2.5", {})]


def test_answers_of_any_size_and_within_other_fields_are_found(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"q": "a", "r": {{"ground_truth": 1}}}}\n{{"q": "b", "r.ground_truth": {10**400}}}\n')
    rows = read_rows(source(path, prompt_field="q", answer_field="r.ground_truth"))
    assert [(r.answer, r.metadata) for r in rows] == [("1", {"r": {"ground_truth": 1}}), (str(10**400), {})]
    with pytest.raises(DataError, match=r"line 1: no field 'r.other' \(other fields: r\)"):
        read_rows(source(path, prompt_field="q", answer_field="r.other"))


def conversation(*messages):
    return [{"role": role, "content": content} for role, content in messages]


def test_prompts_may_be_conversations(tmp_path):
    path = tmp_path / "train.jsonl"
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image": None}]
    talk = conversation(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."))
    talk.append({"role": "user", "content": parts, "name": None})
    path.write_text(json.dumps({"prompt": talk, "answer": "3"}) + "\n" + json.dumps({"prompt": "as text", "answer": "4"}))
    row, plain = read_rows(source(path, prompt_field="prompt", no_messages=None))
    assert row.messages == tuple(conversation(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "one two")))
    assert (row.question, row.answer, row.metadata) == ("one two", "3", {"prompt": talk})
    assert (plain.question, plain.messages) == ("as text", ())


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            conversation(("user", "a"), ("assistant", "b")),
            "message 1, the last, is the assistant's; a prompt ends where the response begins",
        ),
        (conversation(("system", "a")), "no message of the user has text"),
        (conversation(("user", None)), r"message 0 \(user\) has content that is not text"),
        (
            conversation(("user", [{"type": "image"}, {"type": "text", "text": "?"}])),
            "has parts of type image; models are",
        ),
        ([{"role": "user", "content": "a", "tool_calls": []}], "has 'tool_calls'; only role and content reach the prompt"),
        ([{"role": 1, "content": "a"}], "message 0 has role 1; it must be non-empty text"),
    ],
)
def test_conversations_that_are_no_prompt_are_refused(messages, said, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": messages, "answer": "1"}))
    with pytest.raises(DataError, match=f"line 1: field 'question': .*{said}"):
        read_rows(source(path, no_messages=None))


def test_answers_may_be_switched_off(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "one", "answer": "kept"}\n')
    (row,) = read_rows(source(path, answer_field=None))
    assert (row.answer, row.metadata) == ("", {"answer": "kept"})


def test_entries_carry_their_tags(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1 + 1", "answer": 2, "kind": "math"}\n{"question": "b", "answer": "", "kind": "text"}\n')
    tagged = source(path, tag_field="kind")
    rows = read_rows(tagged)
    assert [row.tag for row in rows] == ["math", "text"]
    assert rows[0].metadata == {"kind": "math"}
    assert tags_of(tagged, rows) == {"math", "text"}
    assert tags_of(source(path), read_rows(source(path))) == {source(path).name}


@pytest.mark.parametrize(
    ("tag", "message"),
    [("", "field 'kind' is \"\"; it must be non-empty text"), (3, "field 'kind' is 3; it must be"), (None, "no field 'kind'")],
)
def test_an_entry_without_a_tag_is_named(tmp_path, tag, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"} | ({} if tag is None else {"kind": tag})) + "\n")
    with pytest.raises(DataError, match=message):
        read_rows(source(path, tag_field="kind"))
