"""Metrics of one step's groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.episodes import EpisodeCounters
from rljob_runtime.overlap.played import played_metrics
from rljob_runtime.overlap.scheduler import RolloutCounters
from rljob_runtime.records import FloatArray

SUMMED_AT_ONCE = 4096
"""Numbers: 32 kB that are used over and over, where fresh memory of a long response costs more than its sum."""


def group_metrics(groups: Sequence[Group], *, trainer_version: int) -> dict[str, float]:
    """Reward, response, prompt and staleness metrics of the trained groups.

    Args:
        groups: at least one, each with at least one trajectory.
        trainer_version: weights version the trainer held when it took them.
    """
    samples = [t for g in groups for t in g.trajectories]
    scores = np.array([t.reward.score for t in samples], dtype=np.float64)
    lengths = np.array([t.num_sampled for t in samples])
    deviations = score_deviations([[t.reward.score or 0.0 for t in g.trajectories] for g in groups])
    spans = [span for t in samples for segment in t.segments for span in segment.version_spans]
    lags = trainer_version - np.array([s.version for s in spans], dtype=np.int64)
    weights = np.array([s.end - s.start for s in spans], dtype=np.int64)
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/pass_rate": sum(t.reward.passed for t in samples) / len(samples),
        "reward/group_std_mean": float(deviations.mean()),
        "reward/uniform_groups_fraction": float((deviations == 0).mean()),
        "response/mean_tokens": float(lengths.mean()),
        "response/min_tokens": float(lengths.min()),
        "response/max_tokens": float(lengths.max()),
        "response/truncated_fraction": sum(t.finish_reason == "length" for t in samples) / len(samples),
        "prompt/mean_tokens": sum(len(g.trajectories[0].prompt.token_ids) for g in groups) / len(groups),
        "rollout/sequences": float(len(samples)),
        "rollout/tokens": float(lengths.sum()),
        "rollout/logprob_mean": sum(_sum(segment.logprobs) for t in samples for segment in t.segments) / max(float(lengths.sum()), 1.0),
        "staleness/mean": float((lags * weights).sum() / max(weights.sum(), 1)),
        "staleness/max": float(lags.max(initial=0)),
    }
    masks = [s.sampling_mask for t in samples for s in t.segments if s.sampling_mask is not None]
    if masks:
        counts = np.concatenate([mask.counts for mask in masks])
        known = counts[counts > 0]
        metrics |= {
            "rollout/possible_tokens_mean": float(known.mean()) if known.size else 0.0,
            "rollout/possible_tokens_max": float(counts.max(initial=0)),
            "rollout/possible_unknown_fraction": float((counts == 0).mean()) if counts.size else 0.0,
            "rollout/mask_bytes": float(sum(mask.size_bytes for mask in masks)),
        }
    routes = [s.routes for t in samples for s in t.segments if s.routes is not None]
    if routes:
        metrics["rollout/route_bytes"] = float(sum(part.nbytes for part in routes))
    if lags.any():
        tokens = np.bincount(lags, weights)
        metrics |= {f"staleness/histogram/{lag}": float(count / tokens.sum()) for lag, count in enumerate(tokens)}
    metrics.update(_means("reward/part", [(name, value) for t in samples for name, value in t.reward.parts.items()]))
    metrics.update(_means("reward/source", [(t.prompt.source, t.reward.score or 0.0) for t in samples]))
    metrics.update(_means("reward/tag", [(t.prompt.tag, t.reward.score or 0.0) for t in samples]))
    metrics.update(_means("reward/tag_pass_rate", [(t.prompt.tag, float(t.reward.passed)) for t in samples]))
    return metrics


def generated_tokens(groups: Sequence[Group]) -> int:
    """Response tokens of the groups that this attempt had generated."""
    return sum(t.num_sampled for g in groups if not g.recovered for t in g.trajectories)


def episode_metrics(groups: Sequence[Group], counters: EpisodeCounters | None) -> dict[str, float]:
    """How the trained episodes went, and what became of the others since the last step; empty where there are no episodes."""
    played = [t for g in groups for t in g.trajectories if t.episode is not None]
    if counters is None or not played:
        return {}
    metrics = {
        "episode/success": sum(t.reward.passed for t in played) / len(played),
        "episode/tokens_mean": sum(t.num_tokens for t in played) / len(played),
        "episode/errors": float(counters.errors.total()),
        "episode/timeouts": float(counters.timeouts.total()),
        "episode/restarts": float(counters.restarts),
        "episode/cancelled": float(counters.cancelled),
    }
    metrics |= {f"episode/errors/{name}": float(count) for name, count in counters.errors.items()}
    metrics |= {f"episode/timeouts/{name}": float(count) for name, count in counters.timeouts.items()}
    return metrics | {f"episode/{name}": value for name, value in played_metrics(played).items()}


def rollout_metrics(groups: Sequence[Group], counters: RolloutCounters) -> dict[str, float]:
    """What became of prompts, groups and responses since the last step."""
    by_reward = {f"reward/errors/{name}": float(count) for name, count in counters.reward_errors.items()}
    by_reward |= {f"reward/timeouts/{name}": float(count) for name, count in counters.reward_timeouts.items()}
    recovered = sum(g.recovered for g in groups)
    return (
        by_reward
        | ({"rollout/groups_recovered": float(recovered)} if recovered else {})
        | _history_metrics(counters)
        | counters.judges.metrics()
        | episode_metrics(groups, counters.episodes)
        | {
            "reward/errors": float(counters.reward_errors.total()),
            "reward/timeouts": float(counters.reward_timeouts.total()),
            "reward/retries": float(counters.reward_retries),
            "reward/dropped": float(counters.rewards_dropped),
            "rollout/groups_accepted": float(len(groups)),
            "rollout/groups_dropped": float(counters.groups_dropped),
            "rollout/groups_filtered": float(counters.groups_filtered),
            "rollout/groups_cancelled": float(counters.groups_cancelled),
            "rollout/requests_cancelled": float(counters.requests_cancelled),
            "rollout/requests_moved": float(counters.requests_moved),
            "rollout/tokens_cancelled": float(counters.tokens_cancelled),
            "rollout/tokens_kept": float(counters.tokens_kept),
            "rollout/engines_lost": float(counters.engines_lost),
        }
    )


def _history_metrics(counters: RolloutCounters) -> dict[str, float]:
    """Of requests with tokens that an engine had cached; empty where there were none."""
    kept, moved = counters.history_tokens_kept, counters.history_tokens_moved
    return {"rollout/history_tokens_kept": float(kept), "rollout/history_tokens_moved": float(moved)} if kept or moved else {}


def score_deviations(scores: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Standard deviation of each group, shape (groups,); 0 where all scores are equal, however their mean is rounded."""
    if len({len(group) for group in scores}) == 1:
        together = np.array(scores, dtype=np.float64)
        return np.where(together.min(axis=1) == together.max(axis=1), 0.0, np.std(together, axis=1))
    return np.array([0.0 if min(group) == max(group) else np.std(group) for group in scores])


def _sum(values: FloatArray) -> float:
    """In double precision, one after another: the same on every machine."""
    if values.size <= SUMMED_AT_ONCE:
        return float(np.add.accumulate(values, dtype=np.float64)[-1]) if values.size else 0.0
    total, room = 0.0, np.empty(SUMMED_AT_ONCE + 1)
    for first in range(0, values.size, SUMMED_AT_ONCE):
        part = values[first : first + SUMMED_AT_ONCE]
        sums = room[: part.size + 1]
        sums[0], sums[1:] = total, part
        total = float(np.add.accumulate(sums, out=sums)[-1])
    return total


def _means(prefix: str, values: Sequence[tuple[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": float(np.mean(found)) for name, found in by_name.items()}
