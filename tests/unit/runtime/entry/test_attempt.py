"""Signals during an attempt, and where it goes on."""

import asyncio
import errno
import io
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.validation import check
from rljob_runtime.entry.attempt import Interruption, prepare, undamaged
from rljob_runtime.entry.limits import while_cluster_lives, within_active_deadline
from rljob_runtime.errors import ActiveDeadlineError, CheckpointError, ClusterLostError, Evicted
from rljob_runtime.job.worker_settings import spec_fingerprint
from rljob_runtime.loop.checkpointing import CheckpointStore, Chosen, DriverState, NoCheckpoints
from rljob_runtime.report import FolderMode, Level, PlainDisplay, Reporter, RunFolder, RunInfo
from tests.integration.jobs import job
from tests.support.fake_workers import CountingTrainer
from tests.support.job_workers import make_job_workers
from tests.support.pace import HANG_S


class Events:
    """What users are reported."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, text: str, level: Level = Level.INFO) -> None:
        self.texts.append(text)


def signaled(numbers: list[signal.Signals], *, orderly: bool, checkpoint: bool = True) -> tuple[list[str], bool, bool]:
    """Send signals to this process; returns what was said, whether the run is to stop, and whether it was ended at once."""

    async def run() -> tuple[list[str], bool, bool]:
        events = Events()
        main = asyncio.ensure_future(asyncio.sleep(60))
        interrupt = Interruption(main, events, checkpoint=checkpoint)
        interrupt.orderly = orderly
        with interrupt.handling_signals():
            for number in numbers:
                os.kill(os.getpid(), number)
                for _ in range(20):
                    await asyncio.sleep(0)
        at_once = main.cancelled() or bool(main.cancelling())
        main.cancel()
        return events.texts, interrupt.stop.is_set(), at_once

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return asyncio.run(run())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("numbers", "orderly", "at_once"),
    [
        ([signal.SIGTERM], True, False),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], True, False),  # Ray's job stop, the stop hook and the kubelet
        ([signal.SIGINT], True, False),
        ([signal.SIGINT, signal.SIGINT], True, True),
        ([signal.SIGTERM, signal.SIGINT], True, True),
        ([signal.SIGTERM], False, True),
    ],
)
def test_the_first_signal_stops_in_order_and_only_a_second_ctrl_c_at_once(
    numbers: list[signal.Signals], orderly: bool, at_once: bool
) -> None:
    said, stopping, ended = signaled(numbers, orderly=orderly)
    assert (stopping, ended) == (True, at_once)
    assert len(said) == 1 + (at_once and orderly)


def test_what_is_promised_on_a_stop_is_kept() -> None:
    assert "with a checkpoint" in signaled([signal.SIGTERM], orderly=True)[0][0]
    assert "without a checkpoint" in signaled([signal.SIGTERM], orderly=True, checkpoint=False)[0][0]


def test_a_checkpoint_with_other_contents_of_the_same_size_is_skipped_with_a_warning(tmp_path: Path) -> None:
    checked = check(job(Path("m"), steps=9))
    folder = RunFolder.open(tmp_path / "run", FolderMode.RESUME_OR_NEW)
    store, trainer = CheckpointStore(folder.checkpoints, keep=2), CountingTrainer()
    for step in (3, 6):
        state = DriverState(
            step=step, source_state={}, first_prompt=12, done=(), rule_state={}, spec_fingerprint=spec_fingerprint(checked.job.spec)
        )
        begun = store.begin(step, 0)
        files = [replace(file, name=f"policy/{file.name}") for file in trainer.save_checkpoint(str(begun / "policy"))]
        store.complete(begun, state, files)
    (begun / "policy" / "updates").write_text("7")
    attempt = prepare(checked, folder, store, resume=True, job_folder=None, model_folder=None)
    assert attempt.first_step == 6
    workers = make_job_workers(trainer=[trainer, CountingTrainer()])
    info = RunInfo(job_name="job", model="m", algorithm="GRPO PPO", devices="-", total_steps=9, seed=0, spec_yaml="a: 1\n")
    with Reporter(
        folder, info, PlainDisplay(io.StringIO(), clock=lambda: 0.0, every_s=1.0), resumed_step=6, packages={}, ticker=False
    ) as reporter:
        attempt = asyncio.run(undamaged(attempt, workers, reporter))
    assert attempt.first_step == 3
    events = (folder.path / "logs" / "events.jsonl").read_text()
    assert f"checkpoint {begun.name} is damaged and skipped: policy/updates has the checksum" in events


def test_an_attempt_goes_on_from_the_newest_complete_checkpoint_of_its_own_spec(tmp_path: Path) -> None:
    checked = check(job(Path("m"), steps=9))
    folder = RunFolder.open(tmp_path / "run", FolderMode.RESUME_OR_NEW)
    store = CheckpointStore(folder.checkpoints, keep=2)
    fresh = prepare(checked, folder, store, resume=True, job_folder=None, model_folder=None)
    assert fresh.chosen == Chosen()
    state = DriverState(
        step=3, source_state={}, first_prompt=12, done=(), rule_state={}, spec_fingerprint=spec_fingerprint(checked.job.spec)
    )
    store.complete(store.begin(3, 0), state, ())
    store.begin(6, 0)
    resumed = prepare(checked, folder, store, resume=True, job_folder=None, model_folder=None)
    assert resumed.chosen.state == state
    assert [note for note in resumed.notes if "was not finished and is skipped" in note]
    assert prepare(checked, folder, NoCheckpoints(), resume=True, job_folder=None, model_folder=None).chosen.state is None
    other = check(job(Path("other"), steps=9, seed=5))
    with pytest.raises(CheckpointError, match=r"was written under another spec: spec.model, spec.seed changed, and must stay"):
        prepare(other, folder, store, resume=True, job_folder=None, model_folder=None)


def test_limits_steps_and_validation_may_change_before_a_resume() -> None:
    def fingerprint(steps: int, **reward: Any) -> dict[str, str]:
        document = job(Path("m"), steps=steps)
        for entry in document["spec"]["rewards"]:
            entry |= reward
        if reward:
            document["spec"]["data"]["validation"] = document["spec"]["data"]["train"]
            document["spec"]["validation"] = {"everySteps": 5}
        return spec_fingerprint(check(document).job.spec)

    assert fingerprint(9) == fingerprint(20, timeoutSeconds=30, memoryBytes=1 << 30)
    assert fingerprint(9) != fingerprint(9, weight=0.5)


@pytest.mark.parametrize(("stops_before", "stops_after", "evicted"), [(True, True, True), (False, True, False), (False, False, False)])
def test_the_first_signal_decides_whether_the_run_was_evicted(*, stops_before: bool, stops_after: bool, evicted: bool) -> None:
    async def run() -> BaseException:
        pod = {"stops": stops_before}
        interrupt = Interruption(None, Events(), checkpoint=True, pod_stops=lambda: pod["stops"])
        interrupt.orderly = True
        with interrupt.handling_signals():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(20):
                    await asyncio.sleep(0)
                pod["stops"] = stops_after  # KubeRay ends the pods of a job that somebody stopped
        return interrupt.error("stopped")

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert isinstance(asyncio.run(run()), Evicted) is evicted
    finally:
        signal.signal(signal.SIGTERM, before)


class Ended:
    """A cluster whose control service has ended."""

    async def ended(self) -> str:
        return "the control service has ended"


class Living:
    """One whose control service lives."""

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_run_whose_cluster_loses_its_control_service_ends_with_that() -> None:
    async def run() -> None:
        async with asyncio.timeout(HANG_S), while_cluster_lives(Ended()):
            await asyncio.Event().wait()

    with pytest.raises(ClusterLostError, match="the control service has ended"):
        asyncio.run(run())


def test_a_run_that_is_cancelled_for_another_reason_is_cancelled() -> None:
    async def run() -> None:
        async with asyncio.timeout(0.0):
            async with while_cluster_lives(Living()):
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_a_run_that_ends_is_not_disturbed_by_the_watch() -> None:
    async def run() -> int:
        async with while_cluster_lives(Living()):
            await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) <= 2  # the watch is cancelled, and ends with the loop


@pytest.mark.parametrize("keep", range(1, 7))
def test_the_newest_checkpoints_are_kept_as_many_as_asked_for(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 2 * keep + 2):
        state = DriverState(step=step, source_state={}, first_prompt=0, done=(), rule_state={}, spec_fingerprint={"seed": "f"})
        store.complete(store.begin(step, 0), state, ())
        steps = sorted(int(found.parent.name.split("-")[1]) for found in tmp_path.glob("step-*/COMPLETE"))
        assert steps == list(range(max(step - keep, 0) + 1, step + 1))


def test_only_the_deadline_of_the_run_is_reported_as_that() -> None:
    async def run(deadline_s: float | None, error: Exception | None) -> None:
        async with within_active_deadline(deadline_s):
            if error is not None:
                raise error
            await asyncio.Event().wait()

    for deadline_s in (None, 3600):
        with pytest.raises(TimeoutError, match="a volume") as found:
            asyncio.run(run(deadline_s, OSError(errno.ETIMEDOUT, "a volume does not answer")))
        assert not isinstance(found.value, ActiveDeadlineError)
    with pytest.raises(ActiveDeadlineError, match="activeDeadlineSeconds"):
        asyncio.run(run(0.01, None))
