"""What a run reports to its caller while it goes on, and how the caller stops it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.entry.stopping import Stopper
from rljob_runtime.errors import CallbackError
from rljob_runtime.loop.checkpointing import Checkpoints, DriverState
from rljob_runtime.records import StepRecord
from rljob_runtime.report.display import Level, PhaseView, RunInfo
from rljob_runtime.report.summary import RunSummary

VALIDATION = "validation/"


class RunControl:
    """Lets a callback stop the run."""

    def __init__(self, stopper: Stopper) -> None:
        """Of one run."""
        self._stopper = stopper

    def stop(self, reason: str) -> None:
        """End the run after the step under way, with a checkpoint and the model written. The first reason counts."""
        self._stopper.stop(reason)

    @property
    def stop_reason(self) -> str | None:
        """Why the run was asked to stop; None: it goes on."""
        return self._stopper.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    """Steps that were done."""
    folder: Path


class Callback:
    """Override what you need. Training waits for each call, and an exception in one fails the run as ``CallbackError``."""

    def on_step(self, step: StepRecord, control: RunControl) -> None:
        """A step is done; ``step.metrics`` are those of metrics.jsonl."""

    def on_validation(self, step: StepRecord, control: RunControl) -> None:
        """A validation ended; its metrics are ``validation/*`` of this step, and ``on_step`` has been called with it."""

    def on_checkpoint(self, checkpoint: Checkpoint, control: RunControl) -> None:
        """A checkpoint is complete. Called in another thread than the others."""


class CallbackDisplay:
    """Calls ``on_step`` and ``on_validation``; a :class:`~rljob_runtime.report.Display`."""

    def __init__(self, callbacks: Sequence[Callback], control: RunControl) -> None:
        """Callbacks are called in order."""
        self._callbacks = callbacks
        self._control = control

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """Do nothing."""

    def history(self, records: Sequence[StepRecord]) -> None:
        """Steps of earlier attempts were reported then."""

    def phase_started(self, name: str) -> None:
        """Do nothing."""

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """Do nothing."""

    def step(self, record: StepRecord) -> None:
        """Report the step, and its validation.

        Raises:
            CallbackError: a callback raised.
        """
        validated = any(name.startswith(VALIDATION) for name in record.metrics)
        for callback in self._callbacks:
            _report(callback, "on_step", f"step {record.step}", partial(callback.on_step, record, self._control))
            if validated:
                _report(callback, "on_validation", f"step {record.step}", partial(callback.on_validation, record, self._control))

    def event(self, text: str, level: Level) -> None:
        """Do nothing."""

    def tick(self, running: Sequence[PhaseView]) -> None:
        """Do nothing."""

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """Do nothing; the caller gets the result."""

    def close(self) -> None:
        """There is nothing to close."""


class ReportedCheckpoints:
    """Checkpoints that call ``on_checkpoint`` when one is complete; all else is the store's."""

    def __init__(self, store: Checkpoints, callbacks: Sequence[Callback], control: RunControl) -> None:
        """Callbacks are called in order."""
        self._store = store
        self._callbacks = callbacks
        self._control = control
        self.kept = store.kept
        self.check_owner = store.check_owner
        self.take = store.take
        self.begin = store.begin
        self.choose = store.choose

    def complete(self, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        """Mark it as complete, then tell.

        Raises:
            CheckpointError: as of the store.
            CallbackError: a callback raised.
        """
        self._store.complete(folder, state, files)
        checkpoint = Checkpoint(step=state.step, folder=folder)
        for callback in self._callbacks:
            _report(callback, "on_checkpoint", f"step {state.step}", partial(callback.on_checkpoint, checkpoint, self._control))


def _report(callback: Callback, method: str, when: str, call: Callable[[], None]) -> None:
    """Call one method of a callback.

    Raises:
        CallbackError: it raised.
    """
    try:
        call()
    except Exception as error:  # whatever a user's code raises
        raise CallbackError(f"{type(callback).__name__}.{method} raised at {when}: {type(error).__name__}: {error}") from error
