"""Where processes run: the public placement API.

::

    nodes, groups -> topology() -> Topology ── select(groups) ─> Selection ── a strategy, or a grammar ─> Placement per process

Component placement in RLinf's notation: :class:`ComponentPlacement` and its subclasses.

Strategies: :class:`FlexiblePlacementStrategy`, :class:`PackedPlacementStrategy`, :class:`NodePlacementStrategy`. Grammars:
:mod:`rljob_api.placement.ranks` (RLinf) and :mod:`rljob_api.placement.device_mapping` (ROLL). A job's spec is planned by
:func:`rljob_api.planner.plan`, which uses nothing else.
"""

from rljob_api.errors import PlacementError
from rljob_api.placement.component import ComponentPlacement, HybridComponentPlacement, PlacementMode
from rljob_api.placement.metadata import Placement
from rljob_api.placement.model_parallel import ModelParallelComponentPlacement, ModelParallelEvalComponentPlacement
from rljob_api.placement.multi_agent import MultiAgentModelParallelComponentPlacement, MultiAgentModelParallelEvalComponentPlacement
from rljob_api.placement.sizes import EngineSizes, ModelParallelSizes
from rljob_api.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)
from rljob_api.placement.topology import Node, NodeGroup, Selection, Topology, topology
from rljob_api.placement.weight_sync import RolloutSyncMode

__all__ = [
    "ComponentPlacement",
    "EngineSizes",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "ModelParallelComponentPlacement",
    "ModelParallelEvalComponentPlacement",
    "ModelParallelSizes",
    "MultiAgentModelParallelComponentPlacement",
    "MultiAgentModelParallelEvalComponentPlacement",
    "Node",
    "NodeGroup",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Placement",
    "PlacementError",
    "PlacementMode",
    "PlacementStrategy",
    "RolloutSyncMode",
    "Selection",
    "Topology",
    "topology",
]
