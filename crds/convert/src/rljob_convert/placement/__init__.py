"""RLinf's placement in Python: its classes, over the topology and the grammar that RLJob's own planner uses.

::

    nodes, groups -> topology() -> Topology ── select(groups) ─> Selection ── a strategy ─> Placement per process

Component placement: :class:`ComponentPlacement` and its subclasses. Strategies: :class:`FlexiblePlacementStrategy`,
:class:`PackedPlacementStrategy`, :class:`NodePlacementStrategy`. A job's spec is planned by rljob_api without any of them.
"""

from rljob_api.errors import PlacementError
from rljob_api.placement.topology import Node, NodeGroup, Selection, Topology, topology
from rljob_convert.placement.component import ComponentPlacement, HybridComponentPlacement, PlacementMode
from rljob_convert.placement.metadata import Placement
from rljob_convert.placement.model_parallel import ModelParallelComponentPlacement, ModelParallelEvalComponentPlacement
from rljob_convert.placement.multi_agent import MultiAgentModelParallelComponentPlacement, MultiAgentModelParallelEvalComponentPlacement
from rljob_convert.placement.sizes import EngineSizes, ModelParallelSizes
from rljob_convert.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from rljob_convert.placement.weight_sync import RolloutSyncMode

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
