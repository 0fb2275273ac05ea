"""Which actor process sends its weights to which engine shard: RLinf 0.3.0's two mappings (``workers/rollout/utils.py``).

With tensor parallelism a of the actor and e of the engines, m = a / e actor ranks of a tensor group feed m engines: rank t of
group g feeds shard t // m of engine g * m + t % m, having gathered the slices of m ranks.
"""

from __future__ import annotations

from enum import StrEnum

from rljob_api.errors import PlacementError

EngineShard = tuple[int, int]
"""Engine, and rank within it."""


class RolloutSyncMode(StrEnum):
    """How weights get from the actor to the engines."""

    COLLOCATED = "COLLOCATED"
    """Within one device: no traffic between devices."""
    DISAGGREGATED = "DISAGGREGATED"
    """Between devices."""


def engine_stride(trainer_tp: int, engine_size: int) -> int:
    """Distance between the units of an engine so that every one has a trainer shard that feeds it.

    Args:
        trainer_tp: tensor parallelism of the trainer, at least 1.
        engine_size: tensor parallelism of an engine, at least 1.

    Raises:
        PlacementError: the trainer's is larger and no multiple (M5).
    """
    if trainer_tp <= engine_size:
        return 1
    if trainer_tp % engine_size:
        raise PlacementError(
            "M5",
            f"the actor's tensor parallelism {trainer_tp} is not a multiple of the engines' {engine_size}",
            "choose sizes of which one divides the other",
        )
    return trainer_tp // engine_size


def collocated_map(*, actor_tp: int, actor_world: int, rollout_tp: int) -> dict[int, tuple[EngineShard, ...]]:
    """The one engine shard on the device of every actor rank.

    Raises:
        PlacementError: there is no such mapping (D11).
    """
    if actor_tp == 1:
        return {rank: (divmod(rank, rollout_tp),) for rank in range(actor_world)}
    per_group = _engines_per_group(actor_tp, rollout_tp)
    _check_groups("actor", actor_world, actor_tp)
    return {rank: (_shard(rank, actor_tp, per_group),) for rank in range(actor_world)}


def disaggregated_map(*, actor_tp: int, actor_world: int, rollout_tp: int, rollout_world: int) -> dict[int, tuple[EngineShard, ...]]:
    """The engine shards that every actor rank sends to; none for ranks beyond the number of shards.

    Raises:
        PlacementError: there is no such mapping, or it would leave engines without weights (D11).
    """
    per_group = _engines_per_group(actor_tp, rollout_tp)
    _check_groups("actor", actor_world, actor_tp)
    _check_groups("rollout", rollout_world, actor_tp)
    if actor_world > rollout_world:
        return {rank: (_shard(rank, actor_tp, per_group),) if rank < rollout_world else () for rank in range(actor_world)}
    if rollout_world % actor_world:
        raise PlacementError(
            "D11",
            f"{actor_world} actor ranks do not reach all of {rollout_world} engine units: the last engines would get no weights",
            f"give rollout a multiple of {actor_world} units",
        )
    engines_fed = per_group * (actor_world // actor_tp)
    shards = {rank: _shard(rank, actor_tp, per_group) for rank in range(actor_world)}
    copies = rollout_world // actor_world
    return {rank: tuple((engine + copy * engines_fed, shard) for copy in range(copies)) for rank, (engine, shard) in shards.items()}


def _engines_per_group(actor_tp: int, rollout_tp: int) -> int:
    if actor_tp % rollout_tp:
        raise PlacementError(
            "D11",
            f"the actor's tensor parallelism {actor_tp} is not a multiple of the engines' {rollout_tp}",
            "raise the actor's or lower the engines' tensor parallelism",
        )
    return actor_tp // rollout_tp


def _check_groups(name: str, world: int, actor_tp: int) -> None:
    if world % actor_tp or not world:
        raise PlacementError(
            "D11", f"{name} has {world} units, no multiple of the actor's tensor parallelism {actor_tp}", f"use a multiple of {actor_tp}"
        )


def _shard(rank: int, actor_tp: int, per_group: int) -> EngineShard:
    group, within = divmod(rank, actor_tp)
    return group * per_group + within % per_group, within // per_group
