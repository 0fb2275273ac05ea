"""What callbacks are reported, and what becomes of a run that one of them stops or breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.entry.attempt import Interruption
from rljob_runtime.entry.stopping import Stopper
from rljob_runtime.errors import CallbackError
from rljob_runtime.library.callbacks import Callback, CallbackDisplay, ReportedCheckpoints, RunControl
from rljob_runtime.loop.checkpointing import NoCheckpoints
from rljob_runtime.records import StepRecord


class Notes(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_step(self, step: StepRecord, control: RunControl) -> None:
        self.seen.append(("step", step.step))
        if step.step == 2:
            control.stop("enough")
            control.stop("more than enough")

    def on_validation(self, step: StepRecord, control: RunControl) -> None:
        self.seen.append(("validation", step.step))

    def on_checkpoint(self, checkpoint: Any, control: RunControl) -> None:
        self.seen.append((f"checkpoint {checkpoint.folder}", checkpoint.step))


def record(step: int, **metrics: float) -> StepRecord:
    return StepRecord(step=step, version=step, metrics={name.replace("__", "/"): value for name, value in metrics.items()})


def test_callbacks_are_called_in_order_and_the_first_reason_counts() -> None:
    notes, control = Notes(), RunControl(Stopper())
    display = CallbackDisplay([notes], control)
    display.step(record(1, reward__mean=0.1))
    assert control.stop_reason is None
    display.step(record(2, reward__mean=0.1, validation__mean=0.2))
    assert notes.seen == [("step", 1), ("step", 2), ("validation", 2)]
    assert control.stop_reason == "enough"


def test_a_checkpoint_is_reported_once_it_counts() -> None:
    notes = Notes()
    order: list[str] = []

    class Store(NoCheckpoints):
        kept = True

        def complete(self, folder: Path, state: Any, files: Sequence[FileSum]) -> None:
            order.append(f"complete, {len(notes.seen)} reported")

    reported = ReportedCheckpoints(Store(), [notes], RunControl(Stopper()))
    reported.complete(Path("c"), SimpleNamespace(step=3), ())  # type: ignore[arg-type]
    assert (order, notes.seen, reported.kept) == (["complete, 0 reported"], [("checkpoint c", 3)], True)


def test_a_callback_that_raises_fails_the_run_by_its_name() -> None:
    class Broken(Callback):
        def on_step(self, step: StepRecord, control: RunControl) -> None:
            raise ValueError("no")

    with pytest.raises(CallbackError, match=r"Broken.on_step raised at step 4: ValueError: no") as caught:
        CallbackDisplay([Broken()], RunControl(Stopper())).step(record(4))
    assert isinstance(caught.value.__cause__, ValueError)


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, text: str, level: Any = None) -> None:
        self.lines.append(text)


def test_a_stop_before_during_and_after_the_run_reaches_it_at_most_once() -> None:
    async def run() -> None:
        lines, stopper = Lines(), Stopper()
        stopper.stop("asked early")
        interruption = Interruption(None, lines, checkpoint=True)
        stopper.bind(interruption)
        await asyncio.sleep(0)
        assert interruption.stop.is_set()
        assert interruption.only_asked
        assert lines.lines == ["stopping after this step: asked early"]
        stopper.bind(None)
        stopper.stop("too late")
        assert stopper.reason == "asked early"

    asyncio.run(run())


def test_ctrl_c_after_a_question_to_stop_is_an_interruption() -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def main() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set()

        task = asyncio.ensure_future(main())
        await asyncio.sleep(0)
        stopper, lines = Stopper(), Lines()
        interruption = Interruption(task, lines, checkpoint=True)
        interruption.orderly = True
        stopper.bind(interruption)
        stopper.stop("enough")
        await asyncio.sleep(0)
        stopper.interrupt()
        await asyncio.sleep(0)
        await asyncio.wait_for(ended.wait(), 60)
        assert not interruption.only_asked

    asyncio.run(run())
