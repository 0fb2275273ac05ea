"""Rows of Parquet files: as those of JSON lines, and what no prompt or reward can take is refused."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.data import jsonl, parquet
from rljob_runtime.data.config import JsonlSource, ParquetSource
from rljob_runtime.data.source import PromptSource
from rljob_runtime.errors import DataError
from tests.support.data_builders import make_tokenizer

GOOD = {"question": "What is 2 + 3?", "answer": "5"}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return path


def source(path: Path, **options: Any) -> ParquetSource:
    return ParquetSource(name="mine", path=path, **options)


VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=5)


@settings(max_examples=30)
@given(rows=st.lists(st.fixed_dictionaries({"level": VALUES, "more": st.lists(st.integers(0, 9), max_size=3)}), min_size=1, max_size=5))
def test_rows_are_those_of_json_lines(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    kind = type(next((row["level"] for row in rows if row["level"] is not None), None))
    rows = [{**GOOD, **row, "level": row["level"] if type(row["level"]) is kind else None} for row in rows]  # a column has one type
    folder = tmp_path_factory.mktemp("data")
    lines = folder / "train.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    expected = jsonl.read_rows(JsonlSource(name="mine", path=lines))
    assert parquet.read_rows(source(written(folder / "train.parquet", rows))) == expected


def test_conversations_with_answers_in_other_columns_as_verl_writes_them(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    row = {"prompt": talk, "reward_model": {"style": "rule", "ground_truth": "5"}, "data_source": "sums"}
    path = written(tmp_path / "train.parquet", [row])
    (found,) = parquet.read_rows(
        source(path, prompt_field="prompt", answer_field="reward_model.ground_truth", tag_field="data_source", no_messages=None)
    )
    assert (found.messages, found.question, found.answer, found.tag) == (tuple(talk), "2 + 3?", "5", "sums")


def test_times_and_decimal_numbers_are_text(tmp_path: Path) -> None:
    row = {**GOOD, "day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "inside": {"at": datetime.time(3, 4)}}
    (found,) = parquet.read_rows(source(written(tmp_path / "a.parquet", [row])))
    assert found.metadata == {"day": "2026-01-02", "price": "1.50", "inside": {"at": "03:04:00"}}


def test_pairs_of_a_map_are_lists(tmp_path: Path) -> None:
    pairs = pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    pyarrow.parquet.write_table(pyarrow.table({**{name: [value] for name, value in GOOD.items()}, "pairs": pairs}), tmp_path / "a.parquet")
    (found,) = parquet.read_rows(source(tmp_path / "a.parquet"))
    assert found.metadata == {"pairs": [["a", 1]]}


def test_files_of_a_folder_follow_each_other_by_name(tmp_path: Path) -> None:
    for name, question in (("train-1.parquet", "second"), ("train-0.parquet", "first"), ("other.txt", "none")):
        written(tmp_path / name, [{**GOOD, "question": question}])
    assert [row.question for row in parquet.read_rows(source(tmp_path))] == ["first", "second"]

    def fingerprint() -> str:
        return PromptSource([source(tmp_path)], make_tokenizer(), seed=0, max_prompt_tokens=100).fingerprint

    before = fingerprint()
    written(tmp_path / "train-1.parquet", [{**GOOD, "question": "another"}])
    assert fingerprint() != before


def test_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "answer": None}, *({**GOOD, "question": " "} for _ in range(12))]
    with pytest.raises(DataError) as caught:
        parquet.read_rows(source(written(tmp_path / "a.parquet", rows)))
    said = str(caught.value).replace(str(tmp_path), "FOLDER").splitlines()
    assert said[:3] == [
        "data source 'mine': FOLDER/a.parquet: 13 rows are unusable of 14; fix or remove:",
        "  row 2: field 'answer' is null; it must be text or a number",
        "  row 3: field 'question' is \" \"; it must be non-empty text",
    ]
    assert said[-1] == "  and 3 more"


def test_columns_of_bytes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", [{**GOOD, "images": [{"bytes": b"\x89PNG"}]}])
    with pytest.raises(DataError, match=r"row 1: column 'images' has bytes, which no prompt or reward can take; leave the column out"):
        parquet.read_rows(source(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "file does not exist; fix the source's path"),
        (b'{"question": "a", "answer": 1}\n', "is no Parquet file, is damaged, or has values that cannot be read: "),
        (b"PAR1", "is no Parquet file, is damaged, or has values that cannot be read: "),
    ],
)
def test_what_is_no_parquet_file_is_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        parquet.read_rows(source(path))


def test_what_has_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder without \*\.parquet files"):
        parquet.read_rows(source(tmp_path))
    table = pyarrow.table({"question": pyarrow.array([], pyarrow.string()), "answer": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="holds no rows; write some with columns such as in"):
        parquet.read_rows(source(tmp_path))
