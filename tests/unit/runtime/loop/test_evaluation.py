"""A validation-only run over scripted engines: what it asks, what it records, and who ends it."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.loop.evaluation import Evaluation
from rljob_runtime.overlap.fleet import EngineFleet, FleetConfig
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.records import Sampling
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from tests.support.fake_workers import CountingPrompts, ScriptedEngine, ScriptedRewards, no_texts
from tests.support.job_workers import make_job_workers

CONFIG = ValidationConfig(
    every_steps=0,
    at_start=True,
    pauses=False,
    samples_per_prompt=2,
    sampling=Sampling(max_tokens=4, temperature=0.5, top_p=0.9),
    seed=5,
    timeout_s=10.0,
)


class WatchedEngine(ScriptedEngine):
    """Its end is seen by whoever watches it."""

    async def watch(self) -> None:
        while not self.dead:
            await asyncio.sleep(0)
        raise WorkerLostError(self.name, "signal 9", self.log_file)


def evaluate(folder: Path, *engines: WatchedEngine) -> tuple[str, list[str]]:
    """Run one to its end; what was displayed, and the leases."""
    out, log = io.StringIO(), list[str]()
    info = RunInfo(job_name="job", model="m", algorithm="validation only", devices="-", total_steps=0, seed=0, spec_yaml="a: 1\n")
    display = PlainDisplay(out, clock=lambda: 0.0, every_s=1.0)

    async def run() -> None:
        made: list[Any] = list(engines)
        fleet = EngineFleet(made, config=FleetConfig(capacities=(Capacity(slots=2),) * len(made), stall_timeout_s=10.0))
        validator = Validator(fleet=fleet, prompts=CountingPrompts().next(3), decode=no_texts, score=ScriptedRewards().score, config=CONFIG)
        with Reporter(RunFolder.open(folder, FolderMode.NEW), info, display, packages={}, ticker=False) as reporter:
            workers = make_job_workers(rollout=made, log=log)
            await Evaluation(workers=workers, fleet=fleet, validator=validator, reporter=reporter).run()

    asyncio.run(run())
    return out.getvalue(), log


def test_every_prompt_is_answered_once_and_the_scores_are_everywhere(tmp_path: Path) -> None:
    engine = WatchedEngine()
    shown, leases = evaluate(tmp_path / "run", engine)
    assert sorted(request.request_id for request in engine.seen) == [f"v0/{group}/{index}" for group in range(3) for index in range(2)]
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.max_tokens) for r in engine.seen} == {(0.5, 0.9, 4)}
    assert leases == ["rollout: generation for step 0 begins", "rollout: generation for step 0 ends"]
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["version"], row["validation/prompts"]) == (0, 0, 3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["total_steps"]) == ("succeeded", 0, 0)
    assert summary["validation_mean"] == row["validation/mean"]
    assert summary["validation_pass_rate"] == row["validation/pass_rate"]
    assert f"{row['validation/mean']:.3f}, " in shown
    assert "validation alone in" in shown
    assert "step 0/0" not in shown
    assert "score of the last validation" in (tmp_path / "run" / "report.html").read_text()


def test_another_engine_takes_over_and_without_one_the_run_fails(tmp_path: Path) -> None:
    dead, alive = WatchedEngine("engine-0"), WatchedEngine("engine-1")
    dead.dead = True
    evaluate(tmp_path / "one", dead, alive)
    assert len({request.request_id.split("+")[0] for request in alive.seen}) == 6
    with pytest.raises(WorkerLostError, match="engine-0"):
        evaluate(tmp_path / "none", dead)
    assert json.loads((tmp_path / "none" / "summary.json").read_text())["status"] == "failed"
