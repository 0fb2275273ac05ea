"""Writes a journal's files: what happens is noted on the event loop, encoded and written by a thread.

| wait  | for                      | bounded by | then                                    |
|-------|--------------------------|------------|-----------------------------------------|
| close | everything noted so far  | 30 s       | what is left is asked again by a restart|

Nothing here may stop training. What cannot be written, or not soon enough, ends the journal until the next checkpoint, which begins again
with nothing: groups that are finished in between are asked again by a restart.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.journal.codec import encode_group, size_bytes
from rljob_runtime.journal.frames import encode
from rljob_runtime.journal.reading import FORMAT, SUFFIX, Adopted, files_of, place_of
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.group_log import Ending, GroupLog, NoGroupLog
from rljob_runtime.report.disk import require_space, writing

KEPT_FREE_BYTES = 256 * 1024 * 1024
"""Left free for the run's other files: the journal is the first to do without."""
MAX_BEHIND_BYTES = 1 << 30
"""Of finished groups that wait to be written; the trainer has let go of some of them meanwhile."""
CLOSE_TIMEOUT_S = 30.0
MAX_DRIVERS_AT_ONCE = 100
"""Others that may take the next number at the same time; a fence allows none."""


class Executor(Protocol):
    """Runs what it is given, in order; may do so later and elsewhere."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run it some time."""

    def close(self) -> None:
        """Wait until all has run, with a deadline."""


class Journal(GroupLog, Protocol):
    """What the loop needs of a journal."""

    def reported(self, step: int) -> None:
        """The row of metrics of ``step`` counts everything so far."""

    def cut(self, step: int, unfinished: Collection[int]) -> None:
        """A checkpoint after ``step`` is written: what happens from now on comes after it.

        Args:
            step: steps trained.
            unfinished: ids of the groups that were admitted and are neither trained nor released.
        """

    def complete(self, step: int) -> None:
        """The checkpoint after ``step`` counts: what only older ones need is removed."""

    def take_problem(self) -> str | None:
        """Why nothing is written any more; reported once in a run."""

    def close(self) -> None:
        """The run is over: write what was noted; may wait."""


class NoJournal(NoGroupLog):
    """Keeps nothing."""

    def reported(self, step: int) -> None:
        """Nothing."""

    def cut(self, step: int, unfinished: Collection[int]) -> None:
        """Nothing."""

    def complete(self, step: int) -> None:
        """Nothing."""

    def take_problem(self) -> str | None:
        """Nothing is wrong."""
        return None

    def close(self) -> None:
        """Nothing."""


class JournalFiles:
    """The files that one driver writes, numbered after those that are there; for one thread. Fails by a note, never by an exception."""

    def __init__(self, folder: Path, run: str, *, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        """Touches no disk; ``run`` is the identity that every file begins with."""
        self.problem: str | None = None
        """The first one."""
        self.kept_free_bytes = kept_free_bytes
        self._folder = folder
        self._run = run
        self._start = 0
        self._file: BinaryIO | None = None
        self._failed = False
        self._empty = True
        """Whether the file has only its first record."""

    def begin(self, sequence: int, adopts: Adopted | None) -> None:
        """Begin the next file; after a failure with nothing of what was before it, which is removed.

        Args:
            sequence: of the file; later ones have larger numbers.
            adopts: what of earlier files goes on; None: all.
        """
        failed, self._failed = self._failed, False
        adopts = Adopted() if failed else adopts
        with self._noting():
            self._close_file()
            self._folder.mkdir(exist_ok=True)
            self._file = self._create(sequence)
            self._write(encode({"kind": "begin", "format": FORMAT, "run": self._run, "adopts": adopts.to_json() if adopts else None}))
            self._empty = True
        if failed and not self._failed:
            self.remove_before(sequence)

    def append(self, make: Callable[[], list[bytes]], *, sync: bool = False) -> None:
        """Add a record at the file's end; does nothing after a failure.

        Args:
            make: its pieces.
            sync: whether it has to be on disk, not only with the operating system, before more is written.
        """
        if self._failed or self._file is None:
            return
        with self._noting():
            self._write(make())
            self._empty = False
            if sync:
                os.fdatasync(self._file.fileno())

    def remove_before(self, sequence: int) -> None:
        """Remove all files before that one, oldest first: those that are left are always the last ones."""
        with self._noting():
            for path in files_of(self._folder):
                if place_of(path) < (self._start, sequence):
                    path.unlink(missing_ok=True)

    def give_up(self, why: str) -> None:
        """Write nothing more into this file."""
        self._failed = True
        self.problem = self.problem or why

    def close(self) -> None:
        """Close the file; one that holds nothing is removed."""
        with self._noting():
            path = Path(self._file.name) if self._file is not None else None
            self._close_file()
            if path is not None and self._empty:
                path.unlink(missing_ok=True)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """What goes wrong inside the block ends the file and is noted."""
        try:
            with writing(self._folder, "the journal"):
                yield
        except (RuntimeFault, TypeError, ValueError) as error:  # the latter: something of a group is no JSON
            self.give_up(str(error))

    def _create(self, sequence: int) -> BinaryIO:
        """A new file, never one that another driver has begun."""
        for _ in range(MAX_DRIVERS_AT_ONCE):
            start = self._start or max((place_of(path)[0] for path in files_of(self._folder)), default=0) + 1
            try:
                file = (self._folder / f"{start:06d}-{sequence:06d}{SUFFIX}").open("xb", buffering=0)
            except FileExistsError:
                continue
            self._start = start
            return file
        raise RuntimeFault(f"{self._folder}: {MAX_DRIVERS_AT_ONCE} other drivers begin files of their own; end them")

    def _write(self, pieces: Sequence[bytes]) -> None:
        """Raises RuntimeFault or OSError."""
        assert self._file is not None
        size = sum(len(piece) for piece in pieces)
        require_space(self._folder, size + self.kept_free_bytes, "the journal and what else the run writes")
        for piece in pieces:
            rest = memoryview(piece)
            while rest.nbytes:
                rest = rest[self._file.write(rest) :]

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                os.fsync(file.fileno())


class Background:
    """A thread of its own, begun with the first work; it does not keep the process alive."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Run it after what was submitted before; nothing is kept for a thread that failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rljob-journal", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            self._work.put(work)

    def close(self) -> None:
        """Wait until all has run, 30 s at most."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@dataclass(slots=True)
class _Written:
    """A file, and whose groups are in it."""

    sequence: int
    groups: set[int]


class JournalWriter:
    """A run's journal, as the event loop sees it: no call waits for a disk."""

    def __init__(self, files: JournalFiles, *, step: int, adopts: Adopted, executor: Executor | None = None) -> None:
        """Begin the first file.

        Args:
            files: to write.
            step: of the last row of metrics that is kept.
            adopts: what of the files that are there goes on.
            executor: runs all that touches files; a thread when None.
        """
        self._files = files
        self._executor: Executor = executor or Background()
        self._row = step
        self._written = deque([_Written(0, set(adopts.groups)), _Written(1, set())])
        """Oldest first; the first one stands for the files of earlier drivers."""
        self._needed: dict[int, int] = {}
        """By step of a checkpoint that does not count yet: the first file that is needed after it."""
        self._behind_bytes = 0
        self._lock = threading.Lock()
        self._reported = False
        self._executor.submit(partial(files.begin, 1, adopts))

    def finished(self, group: Group) -> None:
        """A scored group waits for the trainer from now on."""
        size = size_bytes(group)
        with self._lock:
            behind = self._behind_bytes > MAX_BEHIND_BYTES
            self._behind_bytes += 0 if behind else size
        if behind:
            self._executor.submit(partial(self._files.give_up, f"the disk takes less than is generated: {MAX_BEHIND_BYTES} bytes wait"))
            return
        self._written[-1].groups.add(group.group_id)
        self._executor.submit(partial(self._write_group, group, size))

    def taken(self, version: int, groups: Sequence[Group]) -> None:
        """The trainer has taken its batch for ``version``; on disk before anything later, so that a lost node loses one step's groups."""
        self._append({"kind": "step", "version": version, "groups": [group.group_id for group in groups]}, sync=True)

    def released(self, group_id: int, ending: Ending) -> None:
        """A group will not be trained."""
        self._append({"kind": "release", "group": group_id, "ending": ending.value, "row": self._row})

    def reported(self, step: int) -> None:
        """The row of metrics of ``step`` counts everything so far."""
        self._row = step

    def cut(self, step: int, unfinished: Collection[int]) -> None:
        """A checkpoint after ``step`` is written: what happens from now on goes to a new file."""
        admitted = frozenset(unfinished)
        sequence = self._written[-1].sequence + 1
        self._needed[step] = next((w.sequence for w in self._written if w.groups & admitted), sequence)
        self._written.append(_Written(sequence, set()))
        self._executor.submit(partial(self._files.begin, sequence, None))

    def complete(self, step: int) -> None:
        """The checkpoint after ``step`` counts: files that only older ones need are removed."""
        needed = self._needed[step]
        self._needed = {s: sequence for s, sequence in self._needed.items() if s > step}
        while self._written[0].sequence < needed:
            self._written.popleft()
        if needed:
            self._executor.submit(partial(self._files.remove_before, needed))

    def take_problem(self) -> str | None:
        """Why nothing is written any more; reported once in a run."""
        problem = self._files.problem
        if problem is None or self._reported:
            return None
        self._reported = True
        return (
            f"{problem}; the run goes on, but after a restart groups that finish before the next checkpoint are generated again "
            "(the journal tries again then; spec.checkpoint.journal switches it off)"
        )

    def close(self) -> None:
        """Write what was noted, 30 s at most."""
        self._executor.submit(self._files.close)
        self._executor.close()

    def _append(self, content: Mapping[str, object], *, sync: bool = False) -> None:
        self._executor.submit(partial(self._files.append, partial(encode, content), sync=sync))

    def _write_group(self, group: Group, size: int) -> None:
        self._files.append(partial(encode_group, group))
        with self._lock:
            self._behind_bytes -= size
