"""Read a JSONL file into rows, reporting all its bad lines at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_runtime.data.config import JsonlSource
from rljob_runtime.data.messages import Message, looks_like_messages, question_of, read_messages
from rljob_runtime.data.surrogates import half_pair
from rljob_runtime.errors import DataError

MAX_REPORTED_LINES = 10
_OTHER_FORMATS = (
    (b"PAR1", "is a Parquet file; write it as JSON lines, for example with the datasets package: Dataset.from_parquet(path).to_json(...)"),
    (b"\x1f\x8b", "is compressed with gzip; decompress it"),
    (b"PK\x03\x04", "is a zip archive; unpack it"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data; fetch the data with git lfs pull"),
)
"""First bytes of files that are often given in place of JSON lines, and what to say of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question of any source, before it is formatted and tokenized."""

    question: str
    """What the user says; of a conversation what is said last."""
    answer: str
    tag: str | None = None
    messages: tuple[Message, ...] = ()
    """The conversation up to the response, if the prompt is one."""
    metadata: dict[str, object] = field(default_factory=dict)


def read_rows(source: JsonlSource) -> list[Row]:
    """Return the rows of ``source.path`` in file order; blank lines are skipped.

    Fields other than the question and the answer become the row's metadata, and so does a conversation. Raises DataError for a missing,
    unreadable or empty file, for one of another format, and for bad lines (the first ten are named with line number and reason).
    """
    where = f"data source {source.name!r}: {source.path}"
    try:
        content = source.path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{where}: file does not exist; fix the source's path (relative paths start at the working directory)") from error
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}; the path must name a readable file") from error
    if (other := _other_format(content)) is not None:
        raise DataError(f"{where}: {other}")
    lines = content.splitlines()
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


def _other_format(content: bytes) -> str | None:
    """What a file is that has no lines of JSON; None: nothing that is known."""
    for start, said in _OTHER_FORMATS:
        if content.startswith(start):
            return said
    inside = content.strip()
    if not (inside.startswith(b"[") and inside.endswith(b"]")):
        return None
    try:
        entries = json.loads(inside)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return None
    return f"is a single JSON array of {len(entries)} objects; write one object per line, without brackets and commas around them"


def _parse_line(line: bytes, source: JsonlSource) -> Row | str:
    """Return the row, or what is wrong with the line."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or thousands of brackets
        return f"cannot be read: {error}"
    if not isinstance(value, dict):
        return f"a JSON {_kind(value)}, not an object; expected for example {_example(source)}"
    return half_pair(line, value) or _row(value, source)


def _row(value: dict[str, object], source: JsonlSource) -> Row | str:
    """Return the row of an object, or what is wrong with it."""
    if source.prompt_field not in value:
        return _missing("promptField", source.prompt_field, value)
    messages: tuple[Message, ...] = ()
    if looks_like_messages(value[source.prompt_field]):
        read = _conversation(value[source.prompt_field], source)
        if isinstance(read, str):
            return f"field {source.prompt_field!r}: {read}"
        messages, question = read, question_of(read)
    else:
        asked = value.pop(source.prompt_field)
        if not isinstance(asked, str) or not asked.strip():
            return f"field {source.prompt_field!r} is {_shown(asked)}; it must be non-empty text"
        question = asked
    answer: object = ""
    if source.answer_field is not None:
        found = _pop(value, source.answer_field)
        if found is None:
            return _missing("answerField", source.answer_field, value)
        answer = found[0]
        if not _is_answer(answer):
            return f"field {source.answer_field!r} is {_shown(answer)}; it must be text or a number"
    tag: str | None = None
    if source.tag_field is not None:
        if source.tag_field not in value:
            return _missing("tagField", source.tag_field, value)
        given = value[source.tag_field]
        if not isinstance(given, str) or not given:
            return f"field {source.tag_field!r} is {_shown(given)}; it must be non-empty text"
        tag = given
    return Row(question=question, answer=str(answer), tag=tag, messages=messages, metadata=value)


def _is_answer(value: object) -> bool:
    """Text or a number; NaN, as pandas writes missing answers, is none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def _conversation(value: object, source: JsonlSource) -> tuple[Message, ...] | str:
    """The messages of a prompt that is a conversation, or what is wrong with it."""
    if source.no_messages is not None:
        return f"a list of messages {source.no_messages}, or write text"
    assert isinstance(value, Sequence)
    return read_messages(value)


def _pop(value: dict[str, object], name: str) -> tuple[object] | None:
    """Take a field out of an object; of one within others, whose names are joined by dots, a copy. None: there is none."""
    if name in value:
        return (value.pop(name),)
    found: object = value
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return (found,)


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
