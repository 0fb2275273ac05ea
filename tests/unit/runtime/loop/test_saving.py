"""Checkpoints that count, whoever waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState
from rljob_runtime.loop.saving import Saver
from tests.support.fake_workers import CountingTrainer
from tests.support.job_workers import make_job_workers
from tests.support.pace import HANG_S

STATE = DriverState(step=1, source_state={}, first_prompt=0, done=(), rule_state={}, spec_fingerprint={"seed": "f"})


class Held(CheckpointStore):
    """A store whose disk takes its time."""

    begun, goes_on = threading.Event(), threading.Event()
    calls = 0

    def complete(self, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        self.calls += 1
        self.begun.set()
        assert self.goes_on.wait(HANG_S)
        super().complete(folder, state, files)


class Notes:
    """Of a reporter and of a journal what a saver needs."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.steps: list[int] = []

    def flush(self) -> None:
        """Nothing is kept back."""

    def event(self, text: str, level: Any) -> None:
        self.events.append(text)

    def complete(self, step: int) -> None:
        self.steps.append(step)


async def test_a_checkpoint_that_is_being_completed_when_the_run_fails_is_completed_once(tmp_path: Path) -> None:
    """The loop, which waits for it, is cancelled; whoever rescues it waits for the same."""
    store, notes = Held(tmp_path, keep=2), Notes()
    store.take("the first")
    saver = Saver(make_job_workers(trainer=[CountingTrainer()]), store, notes, notes, asynchronous=True, saved_step=None)  # type: ignore[arg-type]
    await saver.begin(1, lambda: STATE)
    waiting = asyncio.ensure_future(saver.poll())
    assert await asyncio.to_thread(store.begun.wait, HANG_S)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    rescuing = asyncio.ensure_future(saver.rescue(1))
    await asyncio.sleep(0)
    store.goes_on.set()
    await rescuing
    assert (store.calls, notes.steps, notes.events) == (1, [1], [])
    assert store.choose({"seed": "f"}).state == STATE
