"""JSON Lines files of a run: buffered appending, strict reading, truncation on resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.report.disk import replace_text, writing

Row = dict[str, object]
Clock = Callable[[], float]
"""Returns monotonic seconds; ``time.monotonic`` outside tests."""


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity: both become null."""
    return value if math.isfinite(value) else None


def dump_row(row: Mapping[str, object]) -> str:
    """One line of JSON without the newline.

    What is no text, such as half a pair of UTF-16, becomes question marks: models and their tools write it.

    Raises:
        ValueError: a float is not finite; callers map those to null with ``finite_or_none``.
    """
    return encodable(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def encodable(text: str) -> str:
    """The text with question marks for what UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


class JsonLinesWriter:
    """Appends rows; they reach the file when a second has passed since the last flush, on ``flush`` and on ``close``."""

    def __init__(self, path: Path, *, clock: Clock, flush_every_s: float = 1.0) -> None:
        """Open ``path`` for appending.

        Raises:
            RuntimeFault: the file cannot be opened.
        """
        self._path = path
        self._clock = clock
        self._flush_every_s = flush_every_s
        self._lines: list[str] = []
        self._flushed_at_s = clock()
        with writing(path, "the file"):
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, object]) -> None:
        """Buffer one row, and flush when it is time.

        Raises:
            ValueError: a float in the row is not finite.
            RuntimeFault: the file cannot be written.
        """
        self._lines.append(dump_row(row))
        if self._clock() - self._flushed_at_s >= self._flush_every_s:
            self.flush()

    def flush(self) -> None:
        """Hand all buffered rows to the operating system.

        Raises:
            RuntimeFault: the file cannot be written, for example for want of space.
        """
        self._flushed_at_s = self._clock()
        if not self._lines:
            return
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()  # from here on the file object owns them; a retry must not write them twice
        with writing(self._path, "buffered lines", needed_bytes=len(text.encode("utf-8"))):
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        """Flush and close; a second call does nothing.

        Raises:
            RuntimeFault: the last rows cannot be written.
        """
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            with writing(self._path, "buffered lines"):
                self._file.close()


class RowsWriter:
    """What writers of one kind of rows have in common: the file, which callers cut back first when they resume."""

    def __init__(self, path: Path, *, clock: Clock, flush_every_s: float = 1.0) -> None:
        """Open the file for appending.

        Raises:
            RuntimeFault: it cannot be opened.
        """
        self._lines = JsonLinesWriter(path, clock=clock, flush_every_s=flush_every_s)

    def flush(self) -> None:
        """Hand all buffered rows to the operating system.

        Raises:
            RuntimeFault: the file cannot be written.
        """
        self._lines.flush()

    def close(self) -> None:
        """Flush and close.

        Raises:
            RuntimeFault: the last rows cannot be written.
        """
        self._lines.close()


def iter_rows(path: Path) -> Iterator[Row]:
    """Rows of a file written by ``JsonLinesWriter``, one after the other; a missing file has none.

    A torn last line, as a killed process leaves it, is left out.

    Raises:
        RuntimeFault: any other line is not a JSON object; names the line and the remedy.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line == "\n":
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as exc:
                if not line.endswith("\n"):  # the last line, and the write was cut
                    return
                raise RuntimeFault(f"{path}:{number}: not JSON ({exc.msg}); remove that line or start in a new folder") from exc
            if not isinstance(row, dict):
                raise RuntimeFault(f"{path}:{number}: a {type(row).__name__}, not a JSON object; remove that line or start in a new folder")
            yield row


def read_rows(path: Path) -> list[Row]:
    """All rows of :func:`iter_rows`.

    Raises:
        RuntimeFault: a line is not a JSON object.
    """
    return list(iter_rows(path))


def number_of(row: Mapping[str, object], key: str) -> float:
    """The number under ``key``; NaN where it is absent or null."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def truncate_after(path: Path, step: int) -> list[Row]:
    """Drop the rows of steps above ``step`` (they will be run again) and return the rows that stay.

    The file is replaced as a whole, so that a crash leaves the old or the new one.

    Raises:
        RuntimeFault: the file is malformed or cannot be written.
    """
    rows = read_rows(path)
    kept = [row for row in rows if number_of(row, "step") <= step]
    if path.exists():
        replace_text(path, "".join(dump_row(row) + "\n" for row in kept), "the rows kept on resume")
    return kept
