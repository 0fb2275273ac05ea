"""Read a JSONL file into rows, reporting all its bad lines at once."""

from __future__ import annotations

import json

from rljob_runtime.data.config import JsonlSource
from rljob_runtime.data.rows import Row, checked, example, row_of
from rljob_runtime.data.surrogates import half_pair
from rljob_runtime.errors import DataError

_OTHER_FORMATS = (
    (b"PAR1", "is a Parquet file; write type: Parquet, and parquet in place of jsonl"),
    (b"\x1f\x8b", "is compressed with gzip; decompress it"),
    (b"PK\x03\x04", "is a zip archive; unpack it"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data; fetch the data with git lfs pull"),
)
"""First bytes of files that are often given in place of JSON lines, and what to say of them."""


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
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_line(line, source)
        if isinstance(row, Row):
            rows.append(row)
        else:
            problems.append((number, row))
    checked(where, "line", problems, len(lines))
    if not rows:
        raise DataError(f"{where}: holds no rows; write one JSON object per line, for example {example(source)}")
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
        return f"a JSON {_kind(value)}, not an object; expected for example {example(source)}"
    return half_pair(line, value) or row_of(value, source)


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}.get(type(value), "null")
