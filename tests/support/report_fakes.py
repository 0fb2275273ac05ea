"""Builders and a clock for the report tests."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljob_runtime.records import EpisodeRecord, IntArray, Prompt, RewardResult, Segment, StepRecord, Trajectory, Turn, VersionSpan
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


def first_ids(responses: Sequence[IntArray]) -> list[str]:
    """A decoder: the text of a response is its first token."""
    return [str(ids[0]) for ids in responses]


def make_trajectory(index: int, score: float | None, **changes: object) -> Trajectory:
    """One scored response; a score of None is a reward that failed."""
    segment = Segment(
        token_ids=np.array([index, 6, 7], dtype=np.int32),
        sampled=True,
        logprobs=np.array([-0.5, -0.25, -0.75], dtype=np.float32),
        version_spans=(VersionSpan(start=0, end=2, version=3), VersionSpan(start=2, end=3, version=4)),
    )
    error = "sums: ran past 1 s" if score is None else None
    reward = RewardResult(
        sample_id=f"s{index}", score=score, parts={} if score is None else {"sums": score}, passed=bool(score and score > 0.5), error=error
    )
    prompt = Prompt(index=index, text=f"{index} + 1 = ?", token_ids=np.array([1, 2], dtype=np.int32), answer=str(index + 1), source="sums")
    trajectory = Trajectory(
        group_id=index // 2,
        sample_index=index % 2,
        prompt=prompt,
        segments=(segment,),
        finish_reason="stop",
        reward=reward,
        generation_s=0.25,
    )
    return dataclasses.replace(trajectory, **changes)


def make_episode(index: int, score: float | None, *, stop: str = "done", source: str = "lake", answers: int = 2) -> Trajectory:
    """Two actions with an observation between them; the environment answered the first ``answers`` of them, the second invalid."""
    response = make_trajectory(index, score)
    (first,) = response.segments
    given = Segment(token_ids=np.array([40, 41], dtype=np.int32), sampled=False)
    second = dataclasses.replace(first, version_spans=(VersionSpan(start=0, end=3, version=4),))
    turns = [
        Turn(observation="P F\nH G", action="<answer>Down</answer>", reward=0.0, action_valid=True, generation_s=0.5, environment_s=0.002),
        Turn(
            observation="P F\nX G", action="Fly \x1b[31m<b>", reward=score or 0.0, action_valid=False, generation_s=1.5, environment_s=0.004
        ),
    ]
    record = EpisodeRecord(
        turns=tuple(turns[:answers]), stop=stop, summary={"success": score or 0.0}, environment_s=0.007, last_observation="F F\nH P"
    )
    return dataclasses.replace(
        response,
        prompt=dataclasses.replace(response.prompt, source=source, answer=""),
        segments=(first, given, second)[: 2 * answers - 1] if answers else (),
        episode=record,
        generation_s=2.0,
        reward=dataclasses.replace(response.reward, parts={}, error="raised ValueError: broken" if score is None else None),
    )
