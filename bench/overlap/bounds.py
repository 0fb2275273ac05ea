"""What no schedule can beat, what queue scheduling promises, and the mean staleness to expect.

Per step: Q samples of B groups, W slot-seconds of generation, L seconds of the longest response, K slots, X seconds from the start
of training until new weights are served, d seconds in which the engines stand still for them, r the asynchronous generation ratio.

Three things bound a step from below, whatever the order of the requests:

- the slots: ``W / K + d``;
- the trainer's loop: ``X``;
- the tail: a response that starts under version s is trained at the latest in the step that makes s + r + 1, so that r + 1 steps
  hold the response, r stops and one turn of the trainer's loop: ``(L + X + r * d) / (r + 1)``, with r rounded up.

For r < 1 generation waits for ``(1 - r) B`` groups of its own step: with r = 0 a step takes at least ``max(W / K, L) + X``;
with a fraction at least ``X`` plus the longest of the ``(1 - r) B`` shortest groups.

Promises (upper bounds on time) are those of ROLL Flash (arXiv 2510.11345): ``T_sync <= W / K + L + X`` (Graham's list scheduling) and
``T_async <= max(W / K + L / (alpha + 1), X)``; for alpha -> infinity ``max(W / K, X)``. With one set of devices shared at will
the speed-up ends at ``S_max = 1 + (L + T_switch) / (W / K + T_train)``, where W / K and T_train use all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljob_api.rules.rollout import default_max_staleness
from rljob_runtime.simulation.lengths import Lengths
from rljob_runtime.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The responses of some steps, without their order in time."""

    generate_s: float
    """W / K: mean over steps."""
    longest_s: float
    """L: mean over steps of the longest response."""
    at_least_s: float
    """Mean over steps of max(W / K, L): generation of one batch on idle engines."""
    dealt_s: float
    """The same where every slot is dealt its responses beforehand (no queue)."""
    short_groups_s: float
    """Mean over steps of the longest among the (1 - r) B shortest groups; 0 where r >= 1."""
    group_s: float
    """Mean seconds of a group's longest response."""


def workload(world: World, lengths: Lengths) -> Workload:
    """Of the steps after warm-up, groups in the order of admission."""
    groups = np.arange(world.warmup_steps * world.groups_per_step, world.steps * world.groups_per_step) % len(lengths.table)
    seconds = lengths.table[groups] * world.token_s
    steps = seconds.reshape(-1, world.samples_per_step)
    work_s, longest_s = steps.sum(axis=1) / world.total_slots, steps.max(axis=1)
    rounds = -(-world.samples_per_step // world.total_slots)
    dealt = np.zeros((len(steps), rounds * world.total_slots))
    dealt[:, : world.samples_per_step] = steps
    by_group = np.sort(seconds.max(axis=1).reshape(len(steps), world.groups_per_step), axis=1)
    needed = world.groups_per_step - math.floor(world.ratio * world.groups_per_step)
    return Workload(
        generate_s=float(work_s.mean()),
        longest_s=float(longest_s.mean()),
        at_least_s=float(np.maximum(work_s, longest_s).mean()),
        dealt_s=float(dealt.reshape(len(steps), rounds, world.total_slots).sum(axis=1).max(axis=1).mean()),
        short_groups_s=float(by_group[:, needed - 1].mean()) if needed > 0 else 0.0,
        group_s=float(seconds.max(axis=1).mean()),
    )


def loop_s(world: World) -> float:
    """X: training and sync."""
    return world.train_s + world.sync_s


def least_step_s(world: World, load: Workload) -> dict[str, float]:
    """Lower bounds on the mean step, by what binds; the largest one counts."""
    loop = loop_s(world) + world.reward_s * (world.ratio == 0)
    if world.ratio == 0:
        return {"one after the other": load.at_least_s + loop}
    staleness = default_max_staleness(world.ratio)
    found = {
        "slots": load.generate_s + world.sync_s,
        "trainer": loop,
        "tail": (load.longest_s + loop + staleness * world.sync_s) / (staleness + 1),
    }
    if world.ratio < 1:
        found["own groups"] = load.short_groups_s + loop
    return found


def promised_step_s(world: World, load: Workload) -> float:
    """Upper bound on the mean step by ROLL Flash; the stop of the engines is added."""
    if world.ratio == 0:
        return load.generate_s + load.longest_s + loop_s(world)
    return max(load.generate_s + load.longest_s / (world.ratio + 1) + world.sync_s, loop_s(world))


def expected_staleness(world: World, load: Workload) -> float:
    """Mean versions by which a trained group's oldest token is behind, away from the balance of engines and trainer.

    Little's law: a group is under way for G (its longest response), waits T / 2 on average for the next batch to be taken (steps of
    T), and X
    until the version made of it is served: ``(G + T / 2 + X) / T`` versions, of which half a one is the part of its first version that
    was over before it began. So ``(G + X) / T`` where the engines bound the step (T = W / K + d). Where the trainer does (T = X),
    finished groups pile up
    until the gate stops admission, and r is reached. Never more than r.
    """
    generate_s = load.generate_s + world.sync_s
    if world.ratio == 0 or generate_s <= loop_s(world):
        return world.ratio
    return min(world.ratio, (load.group_s + world.reward_s + loop_s(world)) / generate_s)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of values over sizes, both as logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
