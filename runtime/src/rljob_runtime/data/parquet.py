"""Read Parquet files into rows, reporting all bad rows at once."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from pathlib import Path

from rljob_runtime.data.config import ParquetSource
from rljob_runtime.data.rows import Row, checked, example, row_of
from rljob_runtime.errors import DataError

BATCH_ROWS = 1024


def read_rows(source: ParquetSource) -> list[Row]:
    """Return the rows of ``source.path`` in order, of a folder file after file, by their names.

    Columns other than the question and the answer become the row's metadata, and so does a conversation. Raises DataError for missing,
    unreadable or empty files, for those of another format, and for bad rows (the first ten are named with their number, from 1 on in each
    file, and the reason).
    """
    rows: list[Row] = []
    for path in files_of(source):
        where = f"data source {source.name!r}: {path}"
        problems: list[tuple[int, str]] = []
        number = 0
        for number, value in enumerate(_values(path, where), start=1):
            row = _read(value, source)
            if isinstance(row, Row):
                rows.append(row)
            else:
                problems.append((number, row))
        checked(where, "row", problems, number)
    if not rows:
        raise DataError(f"data source {source.name!r}: {source.path}: holds no rows; write some with columns such as in {example(source)}")
    return rows


def files_of(source: ParquetSource) -> list[Path]:
    """The file, or those of the folder by their names.

    Raises:
        DataError: there is none.
    """
    path, where = source.path, f"data source {source.name!r}: {source.path}"
    if not path.exists():
        raise DataError(f"{where}: file does not exist; fix the source's path (relative paths start at the working directory)")
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.parquet"))
    if not found:
        raise DataError(f"{where}: is a folder without *.parquet files; fix the source's path")
    return found


def _values(path: Path, where: str) -> Iterator[dict[str, object]]:
    """Rows as columns by name, a batch of them in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:  # the second of times in nanoseconds, where pandas is not installed
        raise DataError(f"{where}: is no Parquet file, is damaged, or has values that cannot be read: {error}") from error
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error}; the path must name a readable file") from error


def _read(value: dict[str, object], source: ParquetSource) -> Row | str:
    """The row, or what is wrong with it."""
    plain = {}
    for name, found in value.items():
        try:
            plain[name] = _plain(found)
        except TypeError as error:
            return f"column {name!r} has {error}, which no prompt or reward can take; leave the column out"
    return row_of(plain, source)


def _plain(value: object) -> object:
    """A value as JSON has it: times and decimal numbers become text.

    Raises:
        TypeError: there is no such value; says what it is.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    raise TypeError("bytes" if isinstance(value, bytes) else f"values of type {type(value).__name__}")
