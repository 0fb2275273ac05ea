"""Sampled trajectories to read: ``trajectories/step-000010.jsonl`` with a few responses of that step, best to worst, and failed ones.

The same rows are shown in ``report.html`` and by ``rljob show``; the files hold the whole texts. :mod:`.reading` is the other direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rljob_runtime.records import IntArray, Segment, Trajectory, Turn
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import Row, dump_row, finite_or_none, read_rows

Decode = Callable[[Sequence[IntArray]], list[str]]
"""Token ids of several responses to texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySampling:
    """How many trajectories are kept for reading, and how often."""

    per_step: int = 8
    """0 keeps none."""
    every_steps: int = 10
    """Kept at step 1 and at every multiple of this; step 0, a validation without training, is one."""

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


def row_of(step: int, trajectory: Trajectory, response: str) -> Row:
    """The JSON object of one trajectory with its text; log-prob mean in nats a token, null for an empty response."""
    reward = trajectory.reward
    logprobs = [x for segment in trajectory.segments for x in segment.logprobs.tolist()]
    versions = [span.version for span in trajectory.version_spans]
    row: Row = {
        "step": step,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "source": trajectory.prompt.source,
        "prompt": trajectory.prompt.text,
        "response": response,
        "answer": trajectory.prompt.answer,
        "reward": None if reward.score is None else finite_or_none(reward.score),
        "parts": {name: finite_or_none(value) for name, value in reward.parts.items()},
        "passed": reward.passed,
        "error": reward.error,
        "finish_reason": trajectory.finish_reason,
        "prompt_tokens": len(trajectory.prompt.token_ids),
        "response_tokens": trajectory.num_tokens,
        "version_first": min(versions, default=None),
        "version_last": max(versions, default=None),
        "logprob_mean": finite_or_none(math.fsum(logprobs) / len(logprobs)) if logprobs else None,
        "generation_s": trajectory.generation_s,
    }
    if reward.judgements:
        row["judgements"] = {judgement.reward: judgement.text or judgement.error or "" for judgement in reward.judgements}
    if trajectory.episode is not None:
        actions = trajectory.actions
        row["stop"] = trajectory.episode.stop
        row["turns"] = [_turn_row(*pair) for pair in zip(trajectory.episode.turns, actions, strict=False)]  # the last may have no answer
        row["last_observation"] = trajectory.episode.last_observation
        row["summary"] = {name: finite_or_none(value) for name, value in trajectory.episode.summary.items()}
        row["environment_s"] = trajectory.episode.environment_s
    return row


def _turn_row(turn: Turn, action: Segment) -> Row:
    return {
        "observation": turn.observation,
        "action": turn.action,
        "reward": finite_or_none(turn.reward),
        "action_valid": turn.action_valid,
        "tokens": len(action),
        "versions": sorted({span.version for span in action.version_spans}),
        "generation_s": turn.generation_s,
        "environment_s": turn.environment_s,
    }


def write_trajectories(
    folder: RunFolder,
    step: int,
    trajectories: Sequence[Trajectory],
    sampling: TrajectorySampling,
    decode: Decode,
    failed: Sequence[Trajectory] = (),
) -> bool:
    """Write the sampled trajectories of a step when it is one of the sampled steps; returns whether it did.

    Only what is shown becomes text: ``decode`` is given the tokens after the prompt of each. ``failed`` are written besides, all of them.

    Raises:
        RuntimeFault: the file cannot be written.
    """
    if not sampling.wants(step) or not (trajectories or failed):
        return False
    chosen = [*choose(trajectories, sampling.per_step), *failed]
    no_tokens = np.zeros(0, dtype=np.int32)  # an environment may fail before the first action
    texts = decode([np.concatenate([no_tokens, *(segment.token_ids for segment in t.segments)]) for t in chosen])
    rows = [row_of(step, t, text) for t, text in zip(chosen, texts, strict=True)]
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
