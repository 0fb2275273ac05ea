"""Opens a run's journal: reads what is there, says what of it goes on, begins a file of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_runtime.journal.frames import DamagedError
from rljob_runtime.journal.reading import read_history
from rljob_runtime.journal.replay import Bounds, StartingPoint, adopted, recover
from rljob_runtime.journal.writing import Executor, JournalFiles, JournalWriter
from rljob_runtime.overlap.group_log import Recovered


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedJournal:
    """A journal to go on with."""

    journal: JournalWriter
    recovered: Recovered
    problems: tuple[str, ...]
    """What of the files that are there could not be used, for users."""


def open_journal(folder: Path, run: str, start: StartingPoint, bounds: Bounds, executor: Executor | None = None) -> OpenedJournal:
    """Read the journal in ``folder``, which may be missing, and begin to write; never raises for what it finds.

    Args:
        folder: of the journal's files.
        run: identity of the run: a journal of another spec or other data is not used.
        start: where the driver starts.
        bounds: what a batch may be.
        executor: runs all that writes files; a thread when None.
    """
    recovered, problems = Recovered(), []
    try:
        history = read_history(folder, run, start.open)
        problems = [f"journal: {problem}" for problem in history.problems]
        recovered = recover(history, start, bounds)
    except (DamagedError, OSError) as error:
        problems.append(f"journal: {folder} cannot be used, what was finished since the checkpoint is generated again: {error}")
    journal = JournalWriter(JournalFiles(folder, run), step=start.version, adopts=adopted(recovered, start), executor=executor)
    return OpenedJournal(journal=journal, recovered=recovered, problems=tuple(problems))
