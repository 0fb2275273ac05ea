"""The loop over scripted workers: order of phases, probes, stopping, resuming, failing."""

import asyncio
from pathlib import Path

import pytest

from rljob_runtime.errors import Evicted, Interrupted, SupersededError, WeightSyncError, WorkerLostError
from rljob_runtime.journal.writing import JournalWriter
from rljob_runtime.loop.checkpointing import CheckpointStore
from rljob_runtime.weightsync.publisher import WeightPublisher
from tests.unit.runtime.loop.driver_runs import STEPS, Run


def test_engines_begin_before_the_trainer_scores_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    started: list[str] = []
    for worker in (run.engine, run.trainer):
        begin = worker.start
        monkeypatch.setattr(worker, "start", lambda method, *args, begin=begin: started.append(method) or begin(method, *args))
    run.drive()
    order = [method for method in started if method in ("finish_update", "submit", "compute_logprobs")]
    assert order == ["finish_update", "submit", "compute_logprobs"] * STEPS + ["finish_update", "compute_logprobs"]


def test_every_step_is_trained_published_and_reported_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.drive()
    assert run.trainer.updates == STEPS
    assert run.engine.phases == [p for v in range(STEPS + 1) for p in (f"begin v{v}", "bucket 0", "bucket 1", "finish")]
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert [m["version"] for m in run.metrics()] == [1, 2, 3, 4]
    assert all(m["staleness/max"] == 0 for m in run.metrics())
    assert all(m["sync/probe_max_abs_diff"] == 0 for m in run.metrics())
    newest = run.store.choose({"seed": "f"}).folder
    assert newest is not None
    assert newest.name.startswith("step-000004")


def test_stopping_finishes_the_step_saves_and_a_resumed_run_goes_on_with_the_next_prompts(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.trainer.on_step = lambda step: first.stop.set() if step == 2 else None
    with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
        first.drive()
    newest = first.store.choose({"seed": "f"}).folder
    assert newest is not None
    assert newest.name.startswith("step-000002")
    state = first.store.choose({"seed": "f"}).state
    assert state is not None
    second = Run(tmp_path, start=state)
    second.prompts.handed_out = int(str(state.source_state["next"]))
    second.drive()
    whole = Run(tmp_path / "whole")
    whole.drive()
    assert [r.seed for r in first.engine.seen + second.engine.seen] == [r.seed for r in whole.engine.seen], "nothing is generated twice"
    assert [m["step"] for m in second.metrics()] == [1, 2, 3, 4]


def test_a_trainer_whose_pod_is_drained_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.on_step = lambda step: run.trainer.draining.set() if step == 2 else None
    with pytest.raises(Evicted, match="stopped after step 2 of 4, because the pod of trainer-0 was asked to end"):
        run.drive()
    newest = run.store.choose({"seed": "f"}).folder
    assert newest is not None
    assert newest.name.startswith("step-000002")


def test_a_driver_whose_run_another_one_has_taken_over_ends_before_it_records_or_saves_anything(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.trainer.on_step = lambda step: CheckpointStore(run.store.root, keep=2).take("the second") if step == 3 else None
    with pytest.raises(SupersededError, match=r"belongs to another driver now: the second; this one, the first, writes nothing more"):
        run.drive()
    newest = run.store.choose({"seed": "f"}).folder
    assert newest is not None
    assert newest.name.startswith("step-000002")
    assert [m["step"] for m in run.metrics()] == [1, 2]


def test_a_dead_trainer_fails_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)

    def die(step: int) -> None:
        if step == 3:
            raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match=r"worker trainer-0 is gone \(signal 9\); its log: trainer.log"):
        run.drive()
    newest = run.store.choose({"seed": "f"}).folder
    assert newest is not None
    assert newest.name.startswith("step-000002")


def test_the_probe_catches_an_engine_whose_weights_differ(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.engine.wrong_from = 3
    with pytest.raises(WeightSyncError, match=r"after publishing v3 engine-0 and the trainer disagree by 0\.00.*, more than 2 times what"):
        run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3]


def test_the_probe_beside_an_update_ends_with_the_update_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    ended = []

    async def probe(self: WeightPublisher, version: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("probe")

    def die(step: int) -> None:
        raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    monkeypatch.setattr(WeightPublisher, "probe", probe)
    close = JournalWriter.close
    monkeypatch.setattr(JournalWriter, "close", lambda self: ended.append("run") or close(self))
    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match="trainer-0"):
        run.drive()
    assert ended == ["probe", "run"]


def test_a_probe_that_failed_before_the_update_did_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    async def probe(self: WeightPublisher, version: int) -> None:
        raise WeightSyncError("engine-0 and the trainer disagree")

    def die(step: int) -> None:
        raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    monkeypatch.setattr(WeightPublisher, "probe", probe)
    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match="trainer-0"):
        run.drive()
    assert (
        "the probe of weights v0 failed as well: engine-0 and the trainer disagree"
        in (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    )
