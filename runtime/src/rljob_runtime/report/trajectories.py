"""Sampled trajectories to read: ``trajectories/step-000010.jsonl`` with a few responses of that step, best to worst.

The same rows are shown in ``report.html``; the files hold the whole texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_runtime.records import Trajectory
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import Row, dump_row, finite_or_none, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySampling:
    """How many trajectories are kept for reading, and how often."""

    per_step: int = 8
    """0 keeps none."""
    every_steps: int = 10
    """Kept at step 1 and at every multiple of this."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            ValueError: ``per_step`` is negative or ``every_steps`` is not positive.
        """
        if self.per_step < 0 or self.every_steps < 1:
            raise ValueError(f"trajectory sampling: per_step {self.per_step} must be >= 0 and every_steps {self.every_steps} >= 1")

    def wants(self, step: int) -> bool:
        """Whether trajectories of ``step`` are kept."""
        return self.per_step > 0 and (step == 1 or step % self.every_steps == 0)


def choose(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Pick ``count`` trajectories evenly over the ranking by score, best first; failed rewards rank last.

    The choice depends on nothing but its arguments: ties go to the lower group and sample.
    """

    def rank(trajectory: Trajectory) -> tuple[float, int, int]:
        score = trajectory.reward.score
        return (math.inf if score is None else -score, trajectory.group_id, trajectory.sample_index)

    ranked = sorted(trajectories, key=rank)
    if count >= len(ranked):
        return ranked
    if count == 1:
        return ranked[:1]
    last = len(ranked) - 1
    return [ranked[index * last // (count - 1)] for index in range(count)]


def row_of(step: int, trajectory: Trajectory) -> Row:
    """The JSON object of one trajectory; log-prob mean in nats a token, null for an empty response."""
    completion, reward = trajectory.completion, trajectory.reward
    logprobs = completion.logprobs
    versions = [span.version for span in completion.version_spans]
    return {
        "step": step,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "source": trajectory.prompt.source,
        "prompt": trajectory.prompt.text,
        "response": trajectory.response_text,
        "answer": trajectory.prompt.answer,
        "reward": None if reward.score is None else finite_or_none(reward.score),
        "parts": {name: finite_or_none(value) for name, value in reward.parts.items()},
        "passed": reward.passed,
        "error": reward.error,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(trajectory.prompt.token_ids),
        "response_tokens": len(completion.token_ids),
        "version_first": min(versions, default=None),
        "version_last": max(versions, default=None),
        "logprob_mean": finite_or_none(math.fsum(logprobs) / len(logprobs)) if logprobs else None,
    }


def write_trajectories(folder: RunFolder, step: int, trajectories: Sequence[Trajectory], sampling: TrajectorySampling) -> bool:
    """Write the sampled trajectories of a step when it is one of the sampled steps; returns whether it did.

    Raises:
        RuntimeFault: the file cannot be written.
    """
    if not sampling.wants(step) or not trajectories:
        return False
    rows = [row_of(step, t) for t in choose(trajectories, sampling.per_step)]
    replace_text(folder.trajectories_of(step), "".join(dump_row(row) + "\n" for row in rows), "sampled trajectories")
    return True


def sampled_steps(folder: RunFolder) -> list[int]:
    """Steps that have a file of trajectories, ascending."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.trajectories.glob("step-*.jsonl"))


def read_trajectories(folder: RunFolder, step: int) -> list[Row]:
    """The rows of one sampled step.

    Raises:
        RuntimeFault: the file is malformed.
    """
    return read_rows(folder.trajectories_of(step))


def drop_after(folder: RunFolder, step: int) -> None:
    """Remove the files of steps above ``step``; used on resume."""
    for sampled in sampled_steps(folder):
        if sampled > step:
            folder.trajectories_of(sampled).unlink()
