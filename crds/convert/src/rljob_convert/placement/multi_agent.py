"""Placement of training with several agents: the actor and reward on the same units, engines of several models inside them.

The rules are RLinf 0.3.0's (``MultiAgentModelParallelComponentPlacement``). Components other than actor, rollout, reward and
inference, such as ``planner`` or ``rollout_worker``, may not share units with each other; :meth:`repacked` cuts their units into
engines of the same shape as the rollout's.
"""

from __future__ import annotations

from itertools import pairwise

from rljob_api.errors import PlacementError
from rljob_convert.placement.component import PlacementMode, located
from rljob_convert.placement.model_parallel import (
    ModelParallelComponentPlacement,
    ModelParallelEvalComponentPlacement,
    RolloutSyncMode,
    SizedComponentPlacement,
)
from rljob_convert.placement.strategies import PackedPlacementStrategy

SHARED_COMPONENTS = ("actor", "rollout", "reward", "inference")
"""Components that may share units with others."""


class MultiAgentModelParallelComponentPlacement(ModelParallelComponentPlacement):
    """Training with several agents; always COLLOCATED unless ``auto_scheduler`` is on."""

    @property
    def rollout_sync_mode(self) -> RolloutSyncMode:
        """Within devices only where the engines have all of the actor's units."""
        same = self._footprints["actor"] == self._footprints["rollout"]
        return RolloutSyncMode.COLLOCATED if same and self._mode is PlacementMode.COLLOCATED else RolloutSyncMode.DISAGGREGATED

    def repacked(self, component: str) -> PackedPlacementStrategy:
        """A component's units cut into engines like the rollout's; the rollout's helpers keep their own strategy.

        Raises:
            PlacementError: there is no such component, or its units do not fit the engines, or its own sizes (B2).
        """
        return _repacked(self, component)

    def _is_collocated(self) -> bool:
        return True

    def _arrange(self) -> None:
        super()._arrange()
        reward = self._footprint("reward")
        if self._footprints["actor"] != reward:
            raise PlacementError("A1", "actor and reward have different units", "give both the same units")
        for name in self._ranks:
            if name.startswith("rollout") and not self._footprints["actor"].contains(self._footprint(name)):
                raise PlacementError("A2", f"{name} has units that actor does not have", "place it inside the actor's units")
        self._check_exclusive()

    def _check_exclusive(self) -> None:
        """Components that share with nobody must not overlap; one sweep over the sorted ranges."""
        ranges = [
            ((node, hardware or ""), units.start, units.stop, name)
            for name in self._ranks
            if name not in SHARED_COMPONENTS
            for (node, hardware), on_node in self._footprint(name).ranges.items()
            for units in on_node
        ]
        ranges.sort()
        for (place, _, stop, name), (other_place, start, _, other) in pairwise(ranges):
            if place == other_place and start < stop:
                raise PlacementError("A3", f"{name} and {other} have units in common", "give each units of its own")


class MultiAgentModelParallelEvalComponentPlacement(ModelParallelEvalComponentPlacement):
    """Evaluation with several agents."""

    def repacked(self, component: str) -> PackedPlacementStrategy:
        """See :meth:`MultiAgentModelParallelComponentPlacement.repacked`.

        Raises:
            PlacementError: there is no such component, or its units do not fit the engines, or its own sizes (B2).
        """
        return _repacked(self, component)


def _repacked(placement: SizedComponentPlacement, component: str) -> PackedPlacementStrategy:
    entry = placement.get_component_ranks(component)
    own = placement.get_strategy(component)
    if component in SHARED_COMPONENTS and isinstance(own, PackedPlacementStrategy):
        return own
    rollout = placement.rollout_strategy
    sizes = placement.sizes.engines.get(component)
    if sizes is not None:
        units = entry.last_rank - entry.first_rank + 1
        for what, size in (("tensor parallelism", sizes.tp), ("pipeline parallelism", sizes.pp), ("number of engines", sizes.dp)):
            if size is not None and units % size:
                raise located(
                    PlacementError("B2", f"{units} units are no multiple of the {what} {size}", f"use a multiple of {size}"), component
                )
    return PackedPlacementStrategy(
        entry.first_rank, entry.last_rank, rollout.num_hardware_per_process, rollout.stride, entry.labels or None
    )
