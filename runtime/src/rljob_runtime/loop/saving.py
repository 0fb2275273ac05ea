"""Writes checkpoints of finished steps, one at a time; of most of the writing the loop sees nothing.

::

    begin    the previous one is completed first; space is checked; every rank copies its state to host memory
    poll     after each step: the one under way counts once all ranks' files are durable and its step is in the metrics
    until    the same again and again while the loop waits for the next batch, which can take longer than a step
    finish   waits for it, where nothing follows: the end of the run, an interruption
    rescue   the same where the run has failed, if its workers still answer

With ``asynchronous`` off ranks write from where their state is, and ``begin`` waits for the files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.cluster.protocol import gather_all
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.journal.writing import Journal
from rljob_runtime.loop.checkpointing import Checkpoints, DriverState
from rljob_runtime.loop.workers import Component, JobWorkers
from rljob_runtime.report import Level, Reporter

IO_TIMEOUT_S = 1800.0
"""Deadline of writing or reading a checkpoint or a model on the trainer's side."""
RESCUE_TIMEOUT_S = 60.0
"""How long a run that has failed waits for its last checkpoint."""
POLL_S = 2.0
"""Between two questions whether a checkpoint is on disk."""
CALL_S = 30.0
"""For the answer of a worker to a question, on top of what it waits for itself."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint that does not count yet."""

    folder: Path
    state: DriverState
    files: dict[str, Sequence[FileSum]]
    """By folder of a component: what its ranks wrote, where all of it is durable."""
    completing: asyncio.Task[None] | None = None
    """What makes it count, once that has begun: whoever waits for it may be cancelled, and somebody else waits for the same then."""


class Saver:
    """The only one that writes a run's checkpoints."""

    def __init__(
        self, workers: JobWorkers, store: Checkpoints, journal: Journal, reporter: Reporter, *, asynchronous: bool, saved_step: int | None
    ) -> None:
        """``saved_step``: of the checkpoint that the run went on from."""
        self._saved = {
            component.checkpoint_folder: component for component in workers.components if component.checkpoint_folder is not None
        }
        self._store = store
        self._journal = journal
        self._reporter = reporter
        self._asynchronous = asynchronous
        self._newest_step = saved_step
        self._pending: _Pending | None = None

    async def begin(self, step: int, state: Callable[[], DriverState]) -> None:
        """Take the state after ``step`` steps; nothing where none are kept, or it was taken before.

        Raises:
            CheckpointError: this or the previous one cannot be written.
            DeadlineError: a rank did not answer in time.
        """
        if not self._store.kept or step == self._newest_step:
            return
        await self.finish()
        sizes = [await self._ask(component, "checkpoint_bytes", timeout_s=IO_TIMEOUT_S) for component in self._saved.values()]
        folder = await asyncio.to_thread(self._store.begin, step, sum(map(sum, sizes)))
        files: dict[str, Sequence[FileSum]] = {}
        for name, component in self._saved.items():
            async with component.leased(step):
                method = "begin_checkpoint" if self._asynchronous else "save_checkpoint"
                answers = await self._ask(component, method, str(folder / name), timeout_s=IO_TIMEOUT_S)
            if not self._asynchronous:
                files[name] = _together(name, answers)
        self._pending = _Pending(folder=folder, state=state(), files=files)
        self._newest_step = step

    async def poll(self) -> None:
        """Complete the one under way if all of it is on disk. The report has to have its step.

        Raises:
            CheckpointError: it could not be written.
        """
        if (pending := self._pending) is None:
            return
        for name, component in self._saved.items():
            if name in pending.files:
                continue
            answers = await self._ask(component, "written_checkpoint", timeout_s=IO_TIMEOUT_S)
            if any(answer is None for answer in answers):
                return
            pending.files[name] = _together(name, answers)
        await self._complete(pending)

    async def until(self, done: Collection[asyncio.Future[Any]], at_most_s: float | None) -> None:
        """Wait until one of ``done`` is, or ``at_most_s`` have passed, and complete the checkpoint under way meanwhile.

        Raises:
            CheckpointError: it could not be written.
        """
        ends_s = float("inf") if at_most_s is None else time.monotonic() + at_most_s
        while not any(entry.done() for entry in done) and (left_s := ends_s - time.monotonic()) > 0:
            pause_s = min(left_s, POLL_S if self._pending is not None else float("inf"))
            await asyncio.wait(done, timeout=None if pause_s == float("inf") else pause_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(entry.done() for entry in done):
                await self.poll()

    async def finish(self, timeout_s: float = IO_TIMEOUT_S) -> None:
        """Wait for the one under way and complete it. The report has to have its step.

        Raises:
            CheckpointError: it could not be written, or is not within ``timeout_s``.
            DeadlineError: a rank did not answer in time.
        """
        if (pending := self._pending) is None:
            return
        for name, component in self._saved.items():
            if name not in pending.files:
                answers = await self._ask(component, "finish_checkpoint", timeout_s, timeout_s=timeout_s + CALL_S)
                pending.files[name] = _together(name, answers)
        await self._complete(pending)

    async def rescue(self, reported_step: int) -> None:
        """Complete the one under way although the run has failed, if its step was reported and its workers still answer."""
        if self._pending is None or self._pending.state.step > reported_step:
            return
        step = self._pending.state.step
        try:
            await self.finish(RESCUE_TIMEOUT_S)
        except RuntimeFault as error:
            self._pending = None
            self._reporter.event(f"the checkpoint of step {step}, which was being written, is lost: {error}", Level.WARNING)

    async def _complete(self, pending: _Pending) -> None:
        """Make it count, once."""
        if pending.completing is None:
            pending.completing = asyncio.ensure_future(self._mark(pending))
        await asyncio.shield(pending.completing)

    async def _mark(self, pending: _Pending) -> None:
        """The report up to its step is on disk before its mark, so that no resumed run lacks a step."""
        self._reporter.flush()
        files = [file for found in pending.files.values() for file in found]
        await asyncio.to_thread(self._store.complete, pending.folder, pending.state, files)
        self._journal.complete(pending.state.step)
        self._pending = None

    async def _ask(self, component: Component, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Every rank's answer."""
        return await gather_all([worker.start(method, *args) for worker in component.workers], timeout_s)


def _together(folder: str, answers: Sequence[Sequence[FileSum]]) -> list[FileSum]:
    """All ranks' files, named from the checkpoint's folder."""
    return [replace(file, name=f"{folder}/{file.name}") for files in answers for file in files]
