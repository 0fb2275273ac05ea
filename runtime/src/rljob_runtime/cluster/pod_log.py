"""Copies of output to the pod's own standard output, which is what ``kubectl logs`` shows.

Ray gives its processes files instead of the container's output. Process 1 of the container belongs to the same user, so that its output
can be opened; it is opened without blocking and lines are dropped rather than waited for: showing a log never costs a training step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

POD_OUTPUT = Path("/proc/1/fd/1")
FOLLOW_EVERY_S = 0.5
READ_BYTES = 1 << 16
FINAL_WAIT_S = 2.0


class ByteSink(Protocol):
    """Takes bytes, for example an unbuffered file."""

    def write(self, data: bytes, /) -> object:
        """Take them; OSError when that is not possible."""


class PodOutput:
    """Writes whole lines, each with a prefix, to a pipe or file that may be slow or gone; never raises, never blocks."""

    def __init__(self, path: Path, prefix: str) -> None:
        """Open ``path``; where that is not allowed everything written is dropped."""
        self._prefix = prefix.encode()
        self._pending = b""
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # not this user's pod, or no pod at all
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def is_open(self) -> bool:
        """Whether anything written arrives."""
        return self._fd is not None

    def write(self, data: bytes) -> None:
        """Pass on the lines that are complete now; the rest waits for its end."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if self._fd is None or not lines:
            return
        block = b"".join(self._prefix + line + b"\n" for line in lines)
        try:
            os.write(self._fd, block)
        except BlockingIOError:
            return  # the reader is too slow: these lines are in the log file
        except OSError:
            self.close()

    def close(self) -> None:
        """Write what has no line end yet and close; safe to call twice."""
        if self._pending:
            self.write(b"\n")
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class Follower:
    """A thread that copies what is appended to a log file; the log's writers do not know of it."""

    def __init__(self, log_file: Path, output: PodOutput, *, every_s: float = FOLLOW_EVERY_S) -> None:
        """Start after the log's present end."""
        self._output = output
        self._every_s = every_s
        self._file: BinaryIO = log_file.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rljob-podlog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy the rest and end, within about two seconds."""
        self._stop.set()
        self._thread.join(FINAL_WAIT_S)

    def _follow(self) -> None:
        stopping = False
        try:
            while not stopping:
                stopping = self._stop.wait(self._every_s)
                while data := self._file.read(READ_BYTES):
                    self._output.write(data)
        except OSError as error:  # the volume went away: the worker notices for itself
            self._output.write(f"following the log ended: {error}\n".encode())
        finally:
            self._output.close()
            self._file.close()


class Tee:
    """A text stream that writes to one stream and copies to others; a copy that fails is given up, with one line to the first."""

    encoding = "utf-8"

    def __init__(self, main: TextIO, copies: Sequence[ByteSink]) -> None:
        """``main`` decides: only its errors are raised."""
        self._main = main
        self._copies = list(copies)
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write to all."""
        with self._lock:
            self._main.write(text)
            if "\n" in text:
                self._main.flush()  # other writers share the file: keep the order
            data = text.encode("utf-8", "backslashreplace")
            for copy in tuple(self._copies):
                try:
                    copy.write(data)
                except OSError as error:
                    self._copies.remove(copy)
                    self._main.write(f"a copy of this log ends here: {error}\n")
            return len(text)

    def flush(self) -> None:
        """Flush the first; copies are not buffered."""
        self._main.flush()

    def isatty(self) -> bool:
        """Never a terminal: plain lines are wanted."""
        return False

    def fileno(self) -> int:
        """File descriptor of the first, for faulthandler and child processes."""
        return self._main.fileno()
