"""The planner on one conformance case (docs/placement.md): a JSON object in, a result object in the same format out.

::

    line ── run_lines ─> case ── result_of ─> {"ok": true, "nodes", "node_groups", "mode", "components", ..}
                                           or {"ok": false, "stage", "error": {"type", "message"}, "check"}

``check`` is the id of the violated check. ``difference`` is the id of the first intended difference from RLinf 0.3.0 that plays a
part, ``differences`` all of them. :func:`result_of` answers anything, however malformed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from rljob_api import collector
from rljob_api.errors import PlacementError
from rljob_convert.conformance.cases import check_size, read_config, read_hardware, strategy
from rljob_convert.conformance.cluster import Cluster, ClusterConfig, build_cluster, parse_cluster
from rljob_convert.conformance.limits import MAX_CASE_CHARACTERS
from rljob_convert.conformance.outcome import COMPONENT_KINDS, place_components, place_strategy
from rljob_convert.conformance.values import rank_list, section, sequence

Result = dict[str, object]
_STRATEGY_KINDS = ("packed", "flexible", "node")


class _Run:
    """One case on its way through the stages."""

    def __init__(self) -> None:
        self.stage = "case"
        self.differences: list[str] = []

    def result(self, case: Mapping[str, object]) -> Result:
        kind = case.get("kind")
        if kind == "parse_rank":
            self.stage = "parse_rank"
            return self._parse_rank(case)
        if kind not in _STRATEGY_KINDS and kind not in COMPONENT_KINDS:
            known = ", ".join((*COMPONENT_KINDS, *_STRATEGY_KINDS, "parse_rank"))
            raise PlacementError("K3", "the case has no known kind", f"write one of {known}")
        isolate, worker_env = _flag(case, "isolate_accelerator", True), _flag(case, "worker_env", False)
        hardware = read_hardware(case.get("cluster"))
        self.stage = "config_load"
        config: Mapping[str, object] = {}
        cluster_config = ClusterConfig(num_nodes=len(hardware.machines), component_placement={})
        if kind in COMPONENT_KINDS or case.get("config") is not None or "config_yaml" in case:
            config = read_config(case)
            self.stage = "cluster_config"
            cluster_config = parse_cluster(config.get("cluster"), len(hardware.machines))
        self.differences.extend(cluster_config.differences)
        self.stage = "node_probe" if cluster_config.num_nodes <= len(hardware.machines) else "cluster_init"
        cluster = build_cluster(cluster_config, hardware.machines, hardware.driver)
        if cluster.differs_from_rlinf:
            self.differences.append("D13")
        if kind in COMPONENT_KINDS:
            self.stage = "component_placement"
            placed = place_components(str(kind), config, cluster_config, cluster, isolate, worker_env, self.differences)
        else:
            self.stage = "strategy_init"
            chosen = strategy(str(kind), case.get("strategy_args"))
            self.stage = "get_placement"
            placed = place_strategy(chosen, cluster, isolate, worker_env, self.differences)
        self.stage = "cluster_config"
        cluster_config.check()
        return {"ok": True, **_described(cluster), **placed}

    def _parse_rank(self, case: Mapping[str, object]) -> Result:
        given = case.get("available_ranks")
        available = None if given is None else [rank for rank in sequence(given, "available_ranks", "K3") if type(rank) is int]
        if available is not None and len(available) < len(sequence(given, "available_ranks", "K3")):
            raise PlacementError("K3", "available_ranks is not a list of whole numbers", "write for example [0, 1]")
        return {"ok": True, "ranks": rank_list(case.get("rank_config"), available, str(case.get("rank_type") or "rank"))}

    def refused(self, error: PlacementError) -> Result:
        stage = self.stage
        if stage == "component_placement" and error.check[0] in "FBV":
            stage = "get_placement"
        if error.check.startswith("D"):
            self.differences.insert(0, error.check)
        elif error.check == "N8":
            # RLinf waits without a deadline; here the missing node is named.
            self.differences.append("D12")
        result: Result = {"ok": False, "stage": stage, "error": {"type": type(error).__name__, "message": str(error)}, "check": error.check}
        return result


def result_of(case: object) -> Result:
    """The outcome of one case; never raises, whatever ``case`` is."""
    run = _Run()
    try:
        check_size(case)
        with collector.paused():
            result = run.result(section(case, "the case"))
    except PlacementError as error:
        result = run.refused(error)
    # Other ranks (D13) explain other placements, never why something is refused or accepted: last.
    differences = sorted(dict.fromkeys(run.differences), key=lambda difference: difference == "D13")
    if differences:
        result |= {"difference": differences[0], "differences": differences}
    return result


def run_lines(lines: Iterable[str]) -> Iterator[str]:
    """One JSON result per line with a JSON case; empty lines are skipped, and lines that are no JSON get a result that says so."""
    for line in lines:
        if line.strip():
            yield json.dumps(_result_of_line(line))


def _result_of_line(line: str) -> Result:
    if len(line) > 2 * MAX_CASE_CHARACTERS:
        return _unreadable(f"the line has more than {2 * MAX_CASE_CHARACTERS} characters")
    try:
        case = json.loads(line)
    except RecursionError:
        return _unreadable("the line is nested too deep")
    except ValueError as error:
        return _unreadable(f"the line is not JSON: {error}")
    result = result_of(case)
    name = case.get("name") if isinstance(case, dict) else None
    return {"name": name, **result} if isinstance(name, str) else result


def _unreadable(problem: str) -> Result:
    return {
        "ok": False,
        "stage": "case",
        "error": {"type": "PlacementError", "message": f"{problem}; write one case a line"},
        "check": "K3",
    }


def _flag(case: Mapping[str, object], name: str, default: bool) -> bool:
    value = case.get(name, default)
    if not isinstance(value, bool):
        raise PlacementError("K3", f"{name} of the case is neither true nor false", "write true or false")
    return value


def _described(cluster: Cluster) -> Result:
    """Nodes and groups of the cluster."""
    labels: dict[int, list[str]] = {}
    for group in cluster.groups:
        for rank in group.node_ranks:
            labels.setdefault(rank, []).append(group.label)
    nodes = [
        {
            "rank": node.rank,
            "ip": machine.ip,
            "accelerators": node.num_accelerators,
            "accelerator_type": node.accelerator_type,
            "labels": labels.get(node.rank, []),
            "hardware": ({"Accelerator": node.num_accelerators} if node.num_accelerators else {}) | dict(node.hardware),
        }
        for node, machine in zip(cluster.topology.nodes, cluster.machines, strict=True)
    ]
    own = [group.label for group in cluster.groups]
    groups = {
        label: {
            "node_ranks": list(group.node_ranks),
            "hardware_type": group.hardware_type,
            "hardware_resource_count": sum(cluster.topology.nodes[rank].num_units(group.hardware_type) for rank in group.node_ranks),
        }
        for label in (*own, "cluster", "node")
        for group in (cluster.topology.groups[label],)
    }
    return {"nodes": nodes, "node_groups": groups}
