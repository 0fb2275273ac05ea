"""Read a JSONL file into rows, reporting all its bad lines at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from rljob_runtime.data.config import JsonlSource
from rljob_runtime.data.surrogates import half_pair
from rljob_runtime.errors import DataError

MAX_REPORTED_LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question of any source, before it is formatted and tokenized."""

    question: str
    answer: str
    tag: str | None = None
    metadata: dict[str, object] = field(default_factory=dict)


def read_rows(source: JsonlSource) -> list[Row]:
    """Return the rows of ``source.path`` in file order; blank lines are skipped.

    Fields other than the question and the answer become the row's metadata. Raises DataError for a missing, unreadable
    or empty file and for bad lines (the first ten are named with line number and reason).
    """
    where = f"data source {source.name!r}: {source.path}"
    try:
        lines = source.path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{where}: file does not exist; fix the source's path (relative paths start at the working directory)") from error
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}; the path must name a readable file") from error
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_line(line, source)
        if isinstance(row, Row):
            rows.append(row)
        else:
            problems.append(f"  line {number}: {row}")
    if problems:
        shown = problems[:MAX_REPORTED_LINES]
        if len(problems) > len(shown):
            shown.append(f"  and {len(problems) - len(shown)} more")
        noun = "line is" if len(problems) == 1 else "lines are"
        raise DataError("\n".join([f"{where}: {len(problems)} {noun} unusable of {len(lines)}; fix or remove:", *shown]))
    if not rows:
        raise DataError(f"{where}: holds no rows; write one JSON object per line, for example {_example(source)}")
    return rows


def _parse_line(line: bytes, source: JsonlSource) -> Row | str:
    """Return the row, or what is wrong with the line."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    if not isinstance(value, dict):
        return f"a JSON {_kind(value)}, not an object; expected for example {_example(source)}"
    return half_pair(line, value) or _row(value, source)


def _row(value: dict[str, object], source: JsonlSource) -> Row | str:
    """Return the row of an object, or what is wrong with it."""
    if source.prompt_field not in value:
        return _missing("promptField", source.prompt_field, value)
    question = value.pop(source.prompt_field)
    if not isinstance(question, str) or not question.strip():
        return f"field {source.prompt_field!r} is {_shown(question)}; it must be non-empty text"
    answer: object = ""
    if source.answer_field is not None:
        if source.answer_field not in value:
            return _missing("answerField", source.answer_field, value)
        answer = value.pop(source.answer_field)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return f"field {source.answer_field!r} is {_shown(answer)}; it must be text or a number"
    tag: str | None = None
    if source.tag_field is not None:
        if source.tag_field not in value:
            return _missing("tagField", source.tag_field, value)
        given = value[source.tag_field]
        if not isinstance(given, str) or not given:
            return f"field {source.tag_field!r} is {_shown(given)}; it must be non-empty text"
        tag = given
    return Row(question=question, answer=str(answer), tag=tag, metadata=value)


def _missing(option: str, name: str, value: dict[str, object]) -> str:
    present = ", ".join(sorted(value)) or "none"
    return f"no field {name!r} (other fields: {present}); add it, or set {option}"


def _example(source: JsonlSource) -> str:
    fields = {source.prompt_field: "What is 2 + 3?"}
    if source.answer_field is not None:
        fields[source.answer_field] = "5"
    if source.tag_field is not None:
        fields[source.tag_field] = "math"
    return json.dumps(fields)


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}.get(type(value), "null")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
