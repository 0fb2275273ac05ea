"""The loop over scripted workers: engines that are lost and replaced."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rljob_runtime.errors import EngineLostError, WeightSyncError, WorkerLostError
from rljob_runtime.records import GenerationRequest
from tests.support.fake_workers import ServingEngine
from tests.unit.runtime.loop.driver_runs import STEPS, Run


def test_an_engine_that_dies_while_the_trainer_works_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.on_step = lambda step: run.engine.lost.set()
    with pytest.raises(WorkerLostError, match="engine-0"):
        run.drive()


def test_an_engine_that_serves_another_version_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.on_step = lambda step: setattr(run.engine, "forgets_version", step == 2)
    with pytest.raises(WeightSyncError, match="after publishing v2: engine-0 serves v1"):
        run.drive()


def test_an_engine_that_dies_costs_no_response_while_another_is_left(tmp_path: Path) -> None:
    other = ServingEngine("engine-1", seed=3)
    run = Run(tmp_path, others=[other], lag=1)
    run.trainer.on_step = lambda step: run.engine.lost.set() if step == 2 else None
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert sum(m["rollout/engines_lost"] for m in run.metrics()) == 1
    assert sum(m["rollout/groups_dropped"] for m in run.metrics()) == 0
    assert other.phases.count("finish") == STEPS + 1
    assert run.engine.phases.count("finish") < STEPS + 1


def fails_once(run: Run, how: str, *, after: int) -> None:
    """The engine fails with the ``after``-th request it is given; ``how`` is a flag of it, or ``process``."""
    submit = run.engine.submit

    def fail(requests: Sequence[GenerationRequest]) -> None:
        submit(requests)
        if len(run.engine.seen) >= after and not run.restarted:
            if how == "process":
                run.engine.dead = True
                run.engine.lost.set()
            else:
                setattr(run.engine, how, True)

    run.engine.submit = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("leased", [(), (0,)])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("how", ["process", "failed", "stalled"])
def test_the_only_engine_is_replaced_and_every_step_is_trained_once(tmp_path: Path, how: str, lag: float, leased: tuple[int, ...]) -> None:
    run = Run(tmp_path, lag=lag, leased_engines=leased, restarts=1, stall_timeout_s=0.05)
    fails_once(run, how, after=6)
    run.drive()
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert run.trainer.updates == STEPS
    assert run.restarted == [0]
    assert sum(m["rollout/engines_lost"] for m in metrics) == sum(m.get("engine/replaced", 0.0) for m in metrics) == 1
    assert sum(m["rollout/groups_dropped"] for m in metrics) == 0
    assert max(m["staleness/max"] for m in metrics) <= lag
    assert all(m["sync/probe_max_abs_diff"] == 0 for m in metrics)
    restart = run.engine.phases.index("restart")
    before = [p for p in run.engine.phases[:restart] if p.startswith("begin")][-1]
    assert run.engine.phases[restart + 1] in (before, f"begin v{int(before[7:]) + 1}"), "it serves what was served, or what is next"
    if leased:
        first = run.leases.index("engine-0 has its devices")
        assert run.leases[first : first + 3] == ["engine-0 has its devices", "engine-0 starts", "engine-0 leases them again"]
        open_leases = [what for what in run.leases[:first] if what.endswith("begins") and what[:-6] + "ends" not in run.leases[:first]]
        assert open_leases == []


@pytest.mark.parametrize("leased", [(), (0,)])
@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_that_stops_while_nobody_needs_it_is_replaced_long_before_the_deadline_of_the_sync_that_meets_it(
    tmp_path: Path, alone: bool, leased: tuple[int, ...]
) -> None:
    run = Run(tmp_path, restarts=1, leased_engines=leased, others=[] if alone else [ServingEngine("engine-1", seed=3)])
    run.trainer.on_step = lambda step: setattr(run.engine, "stopped", step == 2)
    run.drive()  # at its deadline the sync would end it
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert run.trainer.updates == STEPS
    assert run.restarted == [0]
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "worker engine-0 is stuck: its process lives, but has not answered for 1 s" in events


def test_an_engine_that_is_lost_once_too_often_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    run = Run(tmp_path, restarts=1)
    run.engine.restart = lambda: None  # type: ignore[method-assign]  # the new process is as dead as the old one
    run.trainer.on_step = lambda step: setattr(run.engine, "failed", True)
    with pytest.raises(EngineLostError, match=r"engine-0 is lost \(its thread ended\)"):
        run.drive()
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "1 of 1 restarts are used (spec.rollout.maxEngineRestarts)" in events
