"""The prompt stream: its order, its state, its mixture, its length filter."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.data import JsonlSource, PromptFormat, PromptSource, ReasoningGymSource, source
from rljob_runtime.errors import DataError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.data_builders import ADDITION, make_tokenizer, numbers_file

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def sources(folder):
    return (
        JsonlSource(name="short", path=numbers_file(folder / "short.jsonl", 5), weight=1.0),
        JsonlSource(name="long", path=numbers_file(folder / "long.jsonl", 150, long_every=3), weight=2.5),
        ReasoningGymSource(name="sums", task="basic_arithmetic", params=ADDITION, size=70, weight=0.5),
    )


def make_source(sources, *, seed=7, max_prompt_tokens=14, **options):
    return PromptSource(sources, TOKENIZER, seed=seed, max_prompt_tokens=max_prompt_tokens, **options)


@pytest.fixture(scope="module")
def reference(sources):
    """The first 500 prompts, taken in one call: several epochs of the short sources."""
    return make_source(sources).next(500)


@given(cuts=st.lists(st.integers(0, 120), max_size=8), restart_after=st.sets(st.integers(0, 8)))
def test_order_is_the_same_however_next_is_cut_and_wherever_it_is_restored(sources, reference, cuts, restart_after):
    stream = make_source(sources)
    taken = []
    for number, count in enumerate(cuts):
        taken += stream.next(count)
        if number in restart_after:
            saved = json.loads(json.dumps(stream.state()))
            dropped = stream.dropped_too_long
            stream = make_source(sources)
            stream.restore(saved)
            assert stream.state() == saved
            assert stream.dropped_too_long == dropped
    wanted = min(len(taken), len(reference))
    assert taken[:wanted] == reference[:wanted]


def test_each_epoch_visits_every_row_once_in_another_order(folder):
    source = JsonlSource(name="a", path=numbers_file(folder / "epochs.jsonl", 100))
    stream = make_source([source])
    epochs = [[p.text for p in stream.next(100)] for _ in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 100 for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


def test_once_hands_out_each_entry_once_whatever_the_sizes_of_the_sources_and_with_equal_texts(tmp_path):
    rows = [{"question": "the same", "answer": str(number)} for number in range(20)]
    (tmp_path / "same.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = [
        JsonlSource(name="large", path=numbers_file(tmp_path / "large.jsonl", 200, long_every=10)),
        JsonlSource(name="small", path=numbers_file(tmp_path / "small.jsonl", 7)),
        JsonlSource(name="same", path=tmp_path / "same.jsonl"),
    ]
    found = make_source(made).once(1_000_000)
    assert {name: len({(p.text, p.answer) for p in found if p.source == name}) for name in ("small", "same")} == {"small": 7, "same": 20}
    assert len(found) == 180 + 7 + 20
    assert make_source(made).once(5) == found[:5]
    assert [p.index for p in found] == list(range(len(found)))


def test_another_seed_gives_another_order_and_other_generated_entries(sources):
    first, second = (make_source([sources[2]], seed=seed).next(70) for seed in (1, 2))
    assert {p.text for p in first} != {p.text for p in second}
    assert [p.text for p in first] == [p.text for p in make_source([sources[2]], seed=1).next(70)]


def test_a_source_seed_fixes_the_entries_whatever_the_run_seed(sources):
    fixed = dataclasses.replace(sources[2], seed=5)
    first, second = (make_source([fixed], seed=seed).next(70) for seed in (1, 2))
    assert sorted(p.text for p in first) == sorted(p.text for p in second)
    assert [p.text for p in first] != [p.text for p in second]


@given(weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), count=st.integers(1, 200))
def test_every_source_stays_near_its_share(folder, weights, count):
    path = numbers_file(folder / "share.jsonl", 10)
    stream = make_source([JsonlSource(name=str(i), path=path, weight=w) for i, w in enumerate(weights)])
    taken = [p.source for p in stream.next(count)]
    for number, weight in enumerate(weights):
        assert abs(taken.count(str(number)) - count * weight / sum(weights)) < len(weights)


def test_prompts_are_numbered_and_carry_text_tokens_and_answer(reference):
    assert [p.index for p in reference] == list(range(500))
    assert all(TOKENIZER.decode(p.token_ids) == p.text for p in reference)
    sums = next(p for p in reference if p.source == "sums")
    assert sums.text == sums.metadata["reasoning_gym_entry"]["question"]
    left, right = sums.text.removeprefix("Calculate ").removesuffix(".").split(" + ")
    assert int(left) + int(right) == int(sums.answer)


def test_too_long_prompts_are_left_out_and_counted(folder):
    path = numbers_file(folder / "drop.jsonl", 30, long_every=3)
    stream = make_source([JsonlSource(name="a", path=path)])
    taken = stream.next(20)
    assert max(len(p.token_ids) for p in taken) <= 14
    # 20 of 30 rows fit; those behind the last one that fits are counted when the next epoch is entered.
    stream.next(1)
    assert stream.dropped_too_long >= 10
    assert len({p.text for p in taken}) == 20


@pytest.mark.parametrize("rows", [3, 2500])
def test_only_too_long_prompts_is_an_error_not_a_hang(folder, rows):
    path = numbers_file(folder / f"all-long-{rows}.jsonl", rows, long_every=1)
    stream = make_source([JsonlSource(name="essays", path=path)])
    with pytest.raises(
        DataError, match=rf"'essays': all of its first {min(rows, 2000)} prompts are longer than rollout\.maxPromptTokens \(14 tokens\)"
    ):
        stream.next(1)


def test_state_of_other_data_is_refused(sources):
    saved = make_source(sources, seed=1).state()
    with pytest.raises(DataError, match="belongs to other data"):
        make_source(sources, seed=2).restore(saved)
    with pytest.raises(DataError, match="has version 99"):
        make_source(sources, seed=1).restore({**saved, "version": 99})
    with pytest.raises(DataError, match="damaged"):
        make_source(sources, seed=1).restore({**saved, "streams": {name: {"epoch": -1} for name in saved["streams"]}})


def test_state_survives_moving_the_file_but_not_changing_it(tmp_path):
    first, second = (numbers_file(tmp_path / name / "a.jsonl", 10) for name in ("one", "two"))
    stream = make_source([JsonlSource(name="a", path=first)])
    stream.next(4)
    moved = make_source([JsonlSource(name="a", path=second)])
    moved.restore(stream.state())
    assert moved.next(6) == stream.next(6)
    changed = make_source([JsonlSource(name="a", path=numbers_file(tmp_path / "three" / "a.jsonl", 11))])
    with pytest.raises(DataError, match="belongs to other data"):
        changed.restore(stream.state())


def test_templates_shape_the_prompt(folder):
    source = JsonlSource(name="a", path=numbers_file(folder / "template.jsonl", 1))
    plain = make_source([source], prompt_format=PromptFormat(prompt_template="Q: {question} {{!}}"), max_prompt_tokens=99).next(1)[0]
    assert plain.text == "Q: Calculate 0 + 1. {!}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = PromptFormat(chat_template=True, system_prompt="Be brief.")
    prompt = PromptSource([source], tokenizer, seed=0, max_prompt_tokens=99, prompt_format=chat).next(1)[0]
    assert prompt.text == "[system]Be brief.[user]Calculate 0 + 1.[assistant]"
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_prompts_that_are_left_out_are_announced_once_and_counted_at_the_end_of_the_first_epoch(folder):
    source = JsonlSource(name="mixed", path=numbers_file(folder / "announced.jsonl", 9, long_every=3))
    said: list[str] = []
    stream = make_source([source], announce=said.append)
    stream.next(20)
    assert said == [
        f"data source 'mixed': a prompt of {said[0].split()[6]} tokens is left out: it is longer than rollout.maxPromptTokens (14 tokens)",
        "data source 'mixed': 3 of 9 prompts are left out: they are longer than rollout.maxPromptTokens (14 tokens)",
    ]


def chat_source(path, kind, **options):
    jsonl = JsonlSource(name="a", path=path, no_messages=None)
    prompt_format = PromptFormat(chat_template=True, **options)
    return PromptSource([jsonl], chat_tokenizer(kind), seed=0, max_prompt_tokens=99, prompt_format=prompt_format)


def test_a_conversation_keeps_its_own_system_message_and_templates_get_their_parameters(tmp_path):
    path = tmp_path / "talk.jsonl"
    talk = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    path.write_text(json.dumps({"question": talk, "answer": ""}) + "\n" + json.dumps({"question": "Hi", "answer": ""}))
    user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    thinks = {p.text for p in chat_source(path, "reasoning", system_prompt="Common.").next(2)}
    assert thinks == {f"<|im_start|>system\n{system}<|im_end|>\n{user}" for system in ("Own.", "Common.")}
    quiet = chat_source(path, "reasoning", system_prompt="Common.", template_parameters={"enable_thinking": False})
    assert {p.text for p in quiet.next(2)} == {f"{text}<think>\n\n</think>\n\n" for text in thinks}


def test_a_template_without_system_messages_is_refused_before_the_first_prompt(tmp_path):
    path = numbers_file(tmp_path / "numbers.jsonl", 2)
    assert chat_source(path, "no-system").next(1)[0].text.startswith("<start>user\nCalculate")
    with pytest.raises(DataError, match=r"of a prompt \(system, user\): System role not supported; .*prompt.system"):
        chat_source(path, "no-system", system_prompt="Be brief.")
    path.write_text(json.dumps({"question": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": ""}))
    with pytest.raises(DataError, match="System role not supported; if it takes no system message, write its text into the user's first"):
        chat_source(path, "no-system").next(1)


def test_the_order_of_earlier_versions_is_resumed(folder):
    """Fingerprints are in checkpoints: new options change none that does not use them."""
    source = JsonlSource(name="a", path=numbers_file(folder / "resumed.jsonl", 3))
    assert make_source([source]).fingerprint == "cc1eb60d962b3e97"
    assert make_source([dataclasses.replace(source, no_messages=None)]).fingerprint == "cc1eb60d962b3e97"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template_parameters": {"enable_thinking": False}}, "template_parameters are set but chat_template is false"),
        ({"prompt_template": "{question} {answer}"}, r"unknown placeholder \{answer\}"),
        ({"prompt_template": "{question!r}"}, r"unknown placeholder \{question!r:\}"),
        ({"prompt_template": "{question:>5}"}, r"unknown placeholder \{question!:>5\}"),
        ({"prompt_template": "{}"}, r"unknown placeholder \{\}"),
        ({"prompt_template": "{question"}, "cannot be read"),
        ({"prompt_template": "Solve it."}, r"lacks \{question\}"),
        ({"system_prompt": "Hi"}, "chat_template is false"),
    ],
)
def test_unusable_prompt_formats_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        PromptFormat(**options)


def test_a_chat_template_needs_a_tokenizer_that_has_one(sources):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        PromptSource(sources, tokenizer, seed=0, max_prompt_tokens=9, prompt_format=PromptFormat(chat_template=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "basic_arithmetics"}, r"no task 'basic_arithmetics'; did you mean basic_arithmetic"),
        ({"params": {"min_term": 2}}, r"no parameter 'min_term'; it takes: allow_negation, .*min_terms"),
        ({"params": {"seed": 2}}, r"no parameter 'seed' \(seed and size are fields of the source itself\)"),
        ({"params": {"min_terms": -1}}, r"refused its parameters \{'min_terms': -1\}"),
        ({"weight": 0.0}, "weight is 0.0"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"size": 0}, "size is 0"),
    ],
)
def test_unusable_sources_are_refused_when_opened(sources, changes, message):
    with pytest.raises(DataError, match=message):
        make_source([dataclasses.replace(sources[2], **changes)])


def test_no_source_and_twin_names_are_refused(sources):
    with pytest.raises(DataError, match="no source is given"):
        make_source([])
    with pytest.raises(DataError, match="two sources are named 'short'"):
        make_source([sources[0], sources[0]])


def test_generating_ahead_does_not_move_the_state(folder):
    stream = make_source([JsonlSource(name="a", path=numbers_file(folder / "ahead.jsonl", 100))])
    stream.next(3)
    assert stream.state()["streams"] == {"a": {"epoch": 0, "cursor": 3, "emitted": 3, "dropped": 0}}


def test_numbers_file_helper_writes_what_the_tests_assume(tmp_path):
    rows = [json.loads(line) for line in Path(numbers_file(tmp_path / "x.jsonl", 6, long_every=3)).read_text().splitlines()]
    lengths = [len(TOKENIZER(r["question"])["input_ids"]) for r in rows]
    assert [n > 14 for n in lengths] == list(itertools.islice(itertools.cycle([True, False, False]), 6))


def test_what_is_kept_of_a_source_is_bounded_and_changes_no_prompt(sources, reference, monkeypatch: pytest.MonkeyPatch):
    """Without a bound a data set larger than memory's share for it would be kept whole after an epoch."""
    wanted = [prompt.text for prompt in reference]
    for bound in (0, 20_000, 10**9):
        monkeypatch.setattr(source, "MAX_CACHED_BYTES", bound)
        stream = make_source(sources)
        assert [prompt.text for prompt in stream.next(500)] == wanted
        assert stream.cached_bytes <= bound * len(sources)
        assert (stream.cached_bytes > 0) == (bound > 0)
