"""Placements of one conformance case, as plain data: components of an RLinf config, or a single strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rljob_api.errors import PlacementError, show
from rljob_api.placement.topology import CLUSTER, Topology
from rljob_convert.conformance.cluster import Cluster, ClusterConfig
from rljob_convert.conformance.environment import worker_environment
from rljob_convert.conformance.limits import MAX_COMPONENTS, MAX_LISTED_DEVICES, MAX_PROCESSES, MAX_WORKERS
from rljob_convert.conformance.sizes import model_parallel_sizes
from rljob_convert.placement.component import ComponentPlacement, HybridComponentPlacement, check_section, survey
from rljob_convert.placement.metadata import Placement
from rljob_convert.placement.model_parallel import (
    ModelParallelComponentPlacement,
    ModelParallelEvalComponentPlacement,
    SizedComponentPlacement,
)
from rljob_convert.placement.multi_agent import MultiAgentModelParallelComponentPlacement, MultiAgentModelParallelEvalComponentPlacement
from rljob_convert.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy

_SIZED: Mapping[str, type[SizedComponentPlacement]] = {
    "model_parallel": ModelParallelComponentPlacement,
    "model_parallel_eval": ModelParallelEvalComponentPlacement,
    "multi_agent": MultiAgentModelParallelComponentPlacement,
    "multi_agent_eval": MultiAgentModelParallelEvalComponentPlacement,
}
_PLAIN: Mapping[str, type[ComponentPlacement]] = {"component": ComponentPlacement, "hybrid": HybridComponentPlacement}
COMPONENT_KINDS = (*_PLAIN, *_SIZED)
"""Kinds of cases with a config."""
_GENERATED = ("actor", "rollout", "inference", "actor_inference", "critic_inference", "critic", "reward")
"""Components whose strategy RLinf replaces, and whose node group it then forgets (D3)."""
_STRATEGY_NAMES: Mapping[type, str] = {
    FlexiblePlacementStrategy: "FLEXIBLE",
    PackedPlacementStrategy: "PACKED",
    NodePlacementStrategy: "NODE",
}
_WORKER_GROUP = "worker_group_W"
Plain = dict[str, object]


def place_components(
    kind: str,
    config: Mapping[str, object],
    cluster_config: ClusterConfig,
    cluster: Cluster,
    isolate: bool,
    worker_env: bool,
    differences: list[str],
) -> Plain:
    """Mode and placements of all components.

    Args:
        kind: one of :data:`COMPONENT_KINDS`.
        config: the whole config.
        cluster_config: its section ``cluster``.
        cluster: the same on machines.
        isolate: hide accelerators that a process does not own.
        worker_env: describe the environment of every worker, too.
        differences: gets the ids of intended differences from RLinf that play a part, also when an error follows.

    Raises:
        PlacementError: any check of the placement classes, or too much to write down (S2).
    """
    section = cluster_config.component_placement
    differences.extend(_differences_in(section, kind))
    _check_amount(section, cluster.topology, isolate, MAX_WORKERS if worker_env else MAX_PROCESSES)
    try:
        placement = _component_placement(kind, config, section, cluster.topology)
    except PlacementError as error:
        if error.check == "B5" and kind in _SIZED:
            differences.append("D4")
        raise
    components: Plain = {}
    reordered = False
    for name, strategy in placement.strategies.items():
        placed = placement.get_placement(name, isolate)
        reordered = reordered or _is_reordered(placed)
        components[name] = {
            **_placed(strategy, placed, cluster, worker_env),
            "world_size": placement.get_world_size(name) if name in placement.components else len(placed),
            "hardware_ranks": list(placement.get_hardware_ranks(name)) if name in placement.components else [],
            "rank_map": _rank_map(placement, name),
        }
    if reordered:
        differences.append("D5")
    if any(part.is_uneven for name in placement.components for part in placement.get_component_ranks(name).evaluation.parts):
        differences.append("D19")
    mode = placement.placement_mode
    result: Plain = {"mode": None if mode is None else mode.value, "rollout_sync_mode": None}
    if isinstance(placement, ModelParallelComponentPlacement):
        result |= {"rollout_sync_mode": placement.rollout_sync_mode.value, "weight_sync_map": _weight_sync_map(placement, differences)}
    elif kind in _SIZED:
        result["rollout_sync_mode"] = None
    return result | {"components": components}


def place_strategy(strategy: PlacementStrategy, cluster: Cluster, isolate: bool, worker_env: bool, differences: list[str]) -> Plain:
    """Placements of a single strategy, under the name ``_``; arguments as of :func:`place_components`.

    Raises:
        PlacementError: the strategy does not fit the cluster, or there is too much to write down (S2).
    """
    most = max(node.num_accelerators for node in cluster.topology.nodes)
    num_processes = _num_processes(strategy)
    _check_total(num_processes, 0 if isolate else num_processes * most, MAX_WORKERS if worker_env else MAX_PROCESSES)
    try:
        placed = strategy.get_placement(cluster.topology, isolate)
    except PlacementError as error:
        if isinstance(strategy, PackedPlacementStrategy) and error.check == "B5" and _is_off_by_one(strategy, cluster.topology):
            differences.append("D4")
        raise
    if _is_reordered(placed):
        differences.append("D5")
    return {"components": {"_": _placed(strategy, placed, cluster, worker_env)}}


def _component_placement(kind: str, config: Mapping[str, object], section: Mapping[str, object], topology: Topology) -> ComponentPlacement:
    if kind in _PLAIN:
        return _PLAIN[kind](section, topology)
    try:
        sizes = model_parallel_sizes(config, evaluation=kind.endswith("_eval"))
    except PlacementError:
        # RLinf reads the placement first, so what is wrong there is reported first.
        check_section(section, topology)
        raise
    return _SIZED[kind](section, topology, sizes)


def _num_processes(strategy: PlacementStrategy) -> int:
    if isinstance(strategy, FlexiblePlacementStrategy):
        return len(strategy.hardware_ranks_list)
    if isinstance(strategy, NodePlacementStrategy):
        return len(strategy.node_ranks)
    if isinstance(strategy, PackedPlacementStrategy):
        units = strategy.end_hardware_rank - strategy.start_hardware_rank + 1
        # More units than any cluster has are refused by the strategy itself.
        return min(units, MAX_LISTED_DEVICES) // strategy.num_hardware_per_process
    raise TypeError(f"unknown strategy {strategy!r}")


def _check_amount(section: Mapping[str, object], topology: Topology, isolate: bool, most_processes: int) -> None:
    """Refuse what is too large to write down before any of it is computed. What is wrong otherwise is found later."""
    if len(section) > MAX_COMPONENTS:
        raise PlacementError("C1", f"there are {len(section)} components, more than {MAX_COMPONENTS}", "place fewer")
    most = max(node.num_accelerators for node in topology.nodes)
    num_processes = num_listed = num_names = 0
    for entry in survey(section, topology):
        names = len(entry.components)
        num_names += names
        num_processes += names * entry.evaluation.num_processes
        num_listed += names * max(entry.evaluation.num_units, 0 if isolate else entry.evaluation.num_processes * most)
        _check_total(num_processes, num_listed, most_processes)
        if num_names > MAX_COMPONENTS:
            raise PlacementError("C1", f"there are more than {MAX_COMPONENTS} components", "place fewer")


def _check_total(num_processes: int, num_listed: int, most_processes: int) -> None:
    if num_processes > most_processes:
        raise PlacementError("S2", f"{num_processes} processes in all, more than {most_processes}", "use fewer")
    if num_listed > MAX_LISTED_DEVICES:
        raise PlacementError("S2", f"processes hold or see {num_listed} devices in all, more than {MAX_LISTED_DEVICES}", "use fewer")


def _differences_in(section: Mapping[str, object], kind: str) -> Iterable[str]:
    """Intended differences that the section's text alone tells."""
    for key, value in section.items():
        if not isinstance(value, Mapping) or "node_group" not in value:
            continue
        group = value["node_group"]
        if isinstance(group, list):
            yield "D1"
        if kind in _SIZED and group != CLUSTER and any(name.strip() in _GENERATED for name in key.split(",")):
            yield "D3"


def _is_reordered(placements: Sequence[Placement]) -> bool:
    """Whether groups are written against the order of their nodes, which RLinf refuses or numbers by unit (D5)."""
    by_unit = sorted(placements, key=lambda placement: placement.units[0])
    return any(after.cluster_node_rank < before.cluster_node_rank for before, after in pairwise(by_unit))


def _is_off_by_one(strategy: PackedPlacementStrategy, topology: Topology) -> bool:
    """Whether RLinf lets this pass because no process reaches further than one unit past its node (D4)."""
    labels = strategy.node_group
    selection = topology.select([] if labels is None else [labels] if isinstance(labels, str) else labels, together=False)
    for ranks in strategy.ranks():
        segment = selection.locate(ranks.start)
        if ranks[-1] - segment.first > segment.num_units or selection.locate(ranks[-1]).hardware_type != segment.hardware_type:
            return False
    return True


def _placed(strategy: PlacementStrategy, placements: Sequence[Placement], cluster: Cluster, worker_env: bool) -> Plain:
    placed: Plain = {"strategy": _STRATEGY_NAMES[type(strategy)], "placements": [_plain(placement) for placement in placements]}
    if isinstance(strategy, PackedPlacementStrategy):
        placed["args"] = [
            strategy.start_hardware_rank,
            strategy.end_hardware_rank,
            strategy.num_hardware_per_process,
            strategy.stride,
        ]
    if worker_env:
        placed["workers"] = _workers(placements, cluster)
    return placed


def _plain(placement: Placement) -> Plain:
    """The fields that RLinf's placements have."""
    return {
        "rank": placement.rank,
        "cluster_node_rank": placement.cluster_node_rank,
        "placement_node_rank": placement.placement_node_rank,
        "local_accelerator_rank": placement.local_accelerator_rank,
        "accelerator_type": placement.accelerator_type,
        "local_rank": placement.local_rank,
        "local_world_size": placement.local_world_size,
        "visible_accelerators": list(placement.visible_accelerators),
        "isolate_accelerator": placement.isolate_accelerator,
        "local_hardware_ranks": list(placement.local_hardware_ranks),
        "node_group_label": placement.node_group_label,
    }


def _workers(placements: Sequence[Placement], cluster: Cluster) -> list[Plain]:
    environments = cluster.group_environments()
    master = cluster.machines[placements[0].cluster_node_rank].ip
    workers: list[Plain] = []
    for placement in placements:
        node = placement.cluster_node_rank
        group = environments.get((placement.node_group_label, node))
        workers.append(
            {
                "worker_name": f"{_WORKER_GROUP}:{placement.rank}",
                "node_rank": node,
                "env": worker_environment(
                    placement, cluster.machines[node], group_name=_WORKER_GROUP, world_size=len(placements), master_address=master
                ),
                "node_group_env": {} if group is None else dict(group.variables),
                "python": None if group is None else group.interpreter,
            }
        )
    return workers


def _rank_map(placement: ComponentPlacement, name: str) -> list[object]:
    if name not in placement.components:
        return []
    return [[list(units), list(processes)] for units, processes in placement.get_rank_map(name)]


def _weight_sync_map(placement: ModelParallelComponentPlacement, differences: list[str]) -> Plain:
    """Engine shards that every actor rank feeds: RLinf's mapping, else (D11) the general sync routes."""
    try:
        return {str(rank): [list(shard) for shard in shards] for rank, shards in placement.weight_sync_map().items()}
    except PlacementError as error:
        if error.check != "D11":
            raise
        differences.append("D11")
        return _sync_routes(placement)


def _sync_routes(placement: ModelParallelComponentPlacement) -> Plain:
    # Few cases need it, and it brings the models of the manifest along.
    from rljob_api.planning.sync_routes import EngineLayout, SyncDevice, TrainerLayout, sync_plan
    from rljob_api.v1alpha1.operations import SyncBackend

    def devices(placed: Placement) -> tuple[SyncDevice, ...]:
        return tuple(SyncDevice(placed.cluster_node_rank, index) for index in placed.local_hardware_ranks)

    sizes = placement.sizes
    actors, engines = placement.get_placement("actor"), placement.get_placement("rollout")
    bare = next((show(name) for name, placed in (("actor", actors), ("rollout", engines)) if not placed[0].local_hardware_ranks), None)
    if bare is not None:
        raise PlacementError("D11", f"{bare} has no devices to exchange weights between", "place it on accelerators")
    trainer = TrainerLayout(
        ranks=tuple(devices(placed)[0] for placed in actors[: placement.actor_world_size]), tensor_parallel_size=sizes.actor_tp
    )
    layout = EngineLayout(
        engines=tuple(devices(placed) for placed in engines),
        tensor_parallel_size=sizes.rollout_tp,
        pipeline_parallel_size=sizes.rollout_pp,
    )
    shards: dict[str, list[list[int]]] = {str(rank): [] for rank in range(len(trainer.ranks))}
    for route in sync_plan(SyncBackend.NCCL, trainer, layout).routes():
        shard = (route.stage or 0) * sizes.rollout_tp + (route.engine_shard or 0)
        fed = shards[str(route.source_rank)]
        if [route.engine, shard] not in fed[-1:]:
            fed.append([route.engine, shard])
    return dict(shards)
