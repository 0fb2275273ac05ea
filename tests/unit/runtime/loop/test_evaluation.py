"""A validation-only run over scripted engines: what it asks, what it records, and who ends it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_runtime.errors import RewardsFailedError, WorkerLostError
from rljob_runtime.loop.evaluation import Evaluation
from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, Environments
from rljob_runtime.overlap.fleet import EngineFleet, FleetConfig
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.scoring_gate import ScoringGate
from rljob_runtime.overlap.tasks import VALIDATION, TaskOrder
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.records import Sampling
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from tests.support.episode_fakes import Script, ScriptedEnvironments
from tests.support.fake_workers import CountingPrompts, ScriptedEngine, ScriptedRewards, no_texts
from tests.support.job_workers import make_job_workers
from tests.support.report_fakes import first_ids

CONFIG = ValidationConfig(
    every_steps=0,
    at_start=True,
    pauses=False,
    samples_per_prompt=2,
    sampling=Sampling(max_tokens=4, temperature=0.5, top_p=0.9),
    seed=5,
    timeout_s=10.0,
)

TASKS = TaskOrder({"lake": 1.0}, seed=1, purpose=VALIDATION).next(3)


class WatchedEngine(ScriptedEngine):
    """Its end is seen by whoever watches it."""

    async def watch(self) -> None:
        while not self.dead:
            await asyncio.sleep(0)
        raise WorkerLostError(self.name, "signal 9", self.log_file)

    async def drained(self) -> None:
        await asyncio.Event().wait()


def evaluate(
    folder: Path,
    *engines: WatchedEngine,
    restarts: int = 0,
    games: ScriptedEnvironments | None = None,
    judge_devices: str = "",
    fails: Callable[[str], bool] = lambda sample_id: False,
) -> tuple[str, list[str]]:
    """Run one to its end, with episodes where there are ``games``; what was displayed, and the leases.

    ``judge_devices`` share devices with ``engines``, or with others.
    """
    out, log = io.StringIO(), list[str]()
    info = RunInfo(job_name="job", model="m", algorithm="validation only", devices="-", total_steps=0, seed=0, spec_yaml="a: 1\n")
    display = PlainDisplay(out, clock=lambda: 0.0, every_s=1.0)

    async def start(index: int, timeout_s: float) -> None:
        engines[index].restart()

    async def end(index: int) -> None:
        log.append(f"engine-{index} ends")

    async def run() -> None:
        made: list[Any] = list(engines)
        limits = ReplacementLimits(max_restarts=restarts, start_timeout_s=10.0, weights_timeout_s=10.0)
        supervisor = EngineSupervisor(made, start=start, end=end, limits=limits, notify=log.append)
        config = FleetConfig(capacities=(Capacity(slots=2),) * len(made), stall_timeout_s=10.0)
        fleet = EngineFleet(made, config=config, on_lost=supervisor.lost)
        supervisor.connect(fleet, None)
        gate = ScoringGate(ScriptedRewards().score)
        score = gate.score if judge_devices else ScriptedRewards(fails).score
        validator = Validator(fleet=fleet, prompts=CountingPrompts().next(3), score=score, config=CONFIG)
        router = None
        if games is not None:
            router = EnvironmentRouter([games], timeouts_s={"lake": 10.0})  # type: ignore[list-item]
            played = Environments(router=router, rules={"lake": EnvironmentRules()})
            validator = Validator(fleet=fleet, prompts=TASKS, environments=played, config=CONFIG)
        with Reporter(RunFolder.open(folder, FolderMode.NEW), info, display, packages={}, ticker=False) as reporter:
            asked = [WatchedEngine("judge-0")] if judge_devices else []
            workers = make_job_workers(rollout=made, judge=asked, judges_displace_engines=judge_devices == "engines", log=log)
            evaluation = Evaluation(
                workers=workers,
                fleet=fleet,
                supervisor=supervisor,
                validator=validator,
                reporter=reporter,
                decode=first_ids if router is None else no_texts,
                judging=Judging(workers=workers, gate=gate, fleet=fleet) if judge_devices else None,
                router=router,
            )
            await evaluation.run()

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
    report = (tmp_path / "run" / "report.html").read_text()
    assert "score of the last validation" in report
    kept = [json.loads(line) for line in (tmp_path / "run" / "trajectories" / "step-000000.jsonl").read_text().splitlines()]
    assert sorted((row["group_id"], row["sample_index"]) for row in kept) == [(group, index) for group in range(3) for index in range(2)]
    assert {(row["version_first"], row["version_last"]) for row in kept} == {(0, 0)}
    assert "best to worst, from trajectories/step-000000.jsonl" in report


@pytest.mark.parametrize("judge_devices", ["engines", "others"])
def test_judges_on_shared_devices_score_after_the_engines_or_beside_them(tmp_path: Path, judge_devices: str) -> None:
    _, leases = evaluate(tmp_path / "run", WatchedEngine(), judge_devices=judge_devices)
    engines = ["rollout: generation for step 0 begins", "rollout: generation for step 0 ends"]
    scores = ["judge: scores of step 0 begins", "judge: scores of step 0 ends"]
    assert leases == ([*engines, *scores] if judge_devices == "engines" else [engines[0], *scores, engines[1]])
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (row["validation/prompts"], row["validation/errors"]) == (3, 0)


def test_another_engine_takes_over_and_without_one_the_run_fails(tmp_path: Path) -> None:
    dead, alive = WatchedEngine("engine-0"), WatchedEngine("engine-1")
    dead.dead = True
    evaluate(tmp_path / "one", dead, alive)
    assert len({request.request_id.split("+")[0] for request in alive.seen}) == 6
    with pytest.raises(WorkerLostError, match="engine-0"):
        evaluate(tmp_path / "none", dead)
    assert json.loads((tmp_path / "none" / "summary.json").read_text())["status"] == "failed"


def test_the_only_engine_is_replaced_and_loads_its_weights_itself(tmp_path: Path) -> None:
    engine = WatchedEngine()
    engine.dead = True
    _, log = evaluate(tmp_path / "run", engine, restarts=1)
    assert "worker engine-0 is gone (signal 9); its log: engine.log; engine-0 is replaced now, restart 1 of 1" in "".join(log)
    assert len({request.request_id.split("+")[0] for request in engine.seen}) == 6


def test_episodes_are_played_once_and_the_report_has_their_turns(tmp_path: Path) -> None:
    """One of three tasks fails before its first action, and is counted, left out of the means, and kept to be read."""
    seeds = [int(str(task.metadata["seed"])) for task in TASKS]
    script = Script(turns=lambda seed: 2, delay_s=lambda seed, turn: 0.0, fails_at=lambda seed: 0 if seed == seeds[0] else None)
    games, engine = ScriptedEnvironments("games-0", script), WatchedEngine()
    _, leases = evaluate(tmp_path / "run", engine, games=games)
    assert leases == ["rollout: generation for step 0 begins", "rollout: generation for step 0 ends"]
    assert sorted(start.episode_id for start in games.started) == [f"v0/{group}/{index}" for group in range(3) for index in range(2)]
    assert len(engine.seen) == 2 * 2 * 2  # of two tasks, episodes and turns
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (row["validation/prompts"], row["validation/errors"], row["validation/turns_max"]) == (3, 2, 2)
    assert row["validation/stopped/error"] == pytest.approx(1 / 3)
    assert row["validation/info/lake/success"] == pytest.approx(sum(seed % 2 for seed in seeds[1:]) / 2)
    assert row["validation/pass_rate"] == row["validation/info/lake/success"]
    kept = [json.loads(line) for line in (tmp_path / "run" / "trajectories" / "step-000000.jsonl").read_text().splitlines()]
    assert [len(row["turns"]) for row in kept] == [2, 2, 2, 2, 0, 0]
    assert "How episodes" not in (tmp_path / "run" / "report.html").read_text()  # a curve needs steps
    assert "Episodes" in (tmp_path / "run" / "report.html").read_text()


def test_the_loss_of_the_last_environment_worker_is_what_ends_the_run(tmp_path: Path) -> None:
    script = Script(delay_s=lambda seed, turn: 0.0)
    with pytest.raises(WorkerLostError, match="games-0"):
        evaluate(tmp_path / "run", WatchedEngine(), games=ScriptedEnvironments("games-0", script, dies_at_s=0.0))
    assert "games-0" in json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]


def test_responses_without_a_score_are_counted_where_the_score_is(tmp_path: Path) -> None:
    shown, _ = evaluate(tmp_path / "run", WatchedEngine(), fails=lambda sample: sample == "v0/1/0")
    assert "warning: validation: reward 'task': ran past its limit" in shown
    assert "passed, 1 responses without a score" in shown
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["validation_unscored"] == 1
    assert "of its responses have no score" in (tmp_path / "run" / "report.html").read_text()


def test_an_evaluation_without_any_score_fails_with_the_most_frequent_error(tmp_path: Path) -> None:
    with pytest.raises(
        RewardsFailedError, match="none of 6 responses got a score, the most frequent error is: reward 'task': ran past its"
    ):
        evaluate(tmp_path / "run", WatchedEngine(), fails=lambda sample: True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert len((tmp_path / "run" / "trajectories" / "step-000000.jsonl").read_text().splitlines()) == 6
