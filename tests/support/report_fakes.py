"""Builders and a clock for the report tests."""

import dataclasses
from pathlib import Path

from rljob_runtime.records import Completion, Prompt, RewardResult, StepRecord, Trajectory, VersionSpan
from rljob_runtime.report import RunInfo

GOLDEN = Path(__file__).parents[1] / "golden" / "report"

INFO = RunInfo(
    job_name="math-grpo",
    model="Qwen2.5-0.5B",
    algorithm="GRPO",
    devices="trainer cpu 0, engines cpu 1-2",
    total_steps=30,
    seed=17,
    spec_yaml="kind: RLJob\nmetadata: {name: math-grpo}\n",
)


class FakeClock:
    """Monotonic seconds that pass only when a test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def make_record(step: int, **changes: float) -> StepRecord:
    """A step whose figures are a plain function of its number; ``changes`` use ``__`` for the slash."""
    metrics = {
        "reward/mean": min(1.0, 0.1 + 0.03 * step),
        "reward/pass_rate": min(1.0, 0.03 * step),
        "response/mean_tokens": 12.0 - 0.25 * step,
        "response/max_tokens": 16.0,
        "response/truncated_fraction": 0.02,
        "rollout/tokens": 640.0,
        "rollout/tokens_per_s": 6400.0,
        "staleness/mean": 0.5,
        "sync/bytes": 1.5 * 2**20,
        "sync/probe_max_abs_diff": 1.5e-6,
        "time/step_s": 0.1,
        "time/generate_s": 0.058,
        "time/reward_s": 0.004,
        "time/train_s": 0.027,
        "time/sync_s": 0.009,
        "train/grad_norm": 0.8 + 0.01 * (step % 7),
        "mismatch/kl_k3": 1.4e-6,
    }
    metrics.update({name.replace("__", "/"): value for name, value in changes.items()})
    return StepRecord(step=step, version=step, metrics=metrics)


def make_trajectory(index: int, score: float | None, **changes: object) -> Trajectory:
    """One scored response; a score of None is a reward that failed."""
    logprobs = (-0.5, -0.25, -0.75)
    completion = Completion(
        request_id=f"r{index}",
        token_ids=(5, 6, 7),
        logprobs=logprobs,
        version_spans=(VersionSpan(start=0, end=2, version=3), VersionSpan(start=2, end=3, version=4)),
        finish_reason="stop",
    )
    error = "sums: ran past 1 s" if score is None else None
    reward = RewardResult(
        sample_id=f"s{index}", score=score, parts={} if score is None else {"sums": score}, passed=bool(score and score > 0.5), error=error
    )
    prompt = Prompt(index=index, text=f"{index} + 1 = ?", token_ids=(1, 2), answer=str(index + 1), source="sums")
    trajectory = Trajectory(
        group_id=index // 2, sample_index=index % 2, prompt=prompt, response_text=str(index), completion=completion, reward=reward
    )
    return dataclasses.replace(trajectory, **changes)
