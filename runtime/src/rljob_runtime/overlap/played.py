"""How episodes went, in numbers: those of a batch and those of a validation alike. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rljob_runtime.records import Trajectory


def played_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, the environment's time, invalid actions, reasons of the end, and the environments' numbers; empty without episodes.

    Episodes without a score count among the reasons alone: they are no measure of the policy. Names have no group yet: ``turns_mean``,
    ``stopped/<reason>``, ``info/<environment>/<name>``.
    """
    stops = Counter(t.episode.stop for t in trajectories if t.episode is not None)
    stopped = {f"stopped/{stop}": count / stops.total() for stop, count in stops.items()}
    played = [(t, t.episode) for t in trajectories if t.episode is not None and t.reward.score is not None]
    if not played:
        return stopped
    turns = np.array([len(episode.turns) for _, episode in played])
    actions = [turn for _, episode in played for turn in episode.turns]
    metrics = stopped | {
        "turns_mean": float(turns.mean()),
        "turns_max": float(turns.max()),
        "environment_s": sum(episode.environment_s for _, episode in played) / len(played),
        "invalid_actions_fraction": sum(not turn.action_valid for turn in actions) / max(len(actions), 1),
    }
    infos: dict[str, list[float]] = {}
    for trajectory, episode in played:
        for name, value in episode.summary.items():
            infos.setdefault(f"info/{trajectory.prompt.source}/{name}", []).append(value)
    return metrics | {name: float(np.mean(values)) for name, values in infos.items()}
