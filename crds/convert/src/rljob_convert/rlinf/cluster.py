"""RLinf's cluster section: overlapping node groups become runs of equal nodes, and placements lists of runs.

RLinf's node groups may overlap and have gaps; RLJob's partition the nodes in rank order. So the nodes are cut into runs of equal
membership, environment and hardware, each run becomes one node group, and a placement on a label names the label's runs in rank order:
the ranks then count the same units (RLinf 0.3.0, "placement": inside a group by node rank, then by index).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rljob_api import paths
from rljob_api.placement.topology import RESERVED_GROUPS
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

MAX_NODES = 8192
"""Nodes of a cluster that is converted."""
MAX_NAMED_NODES = 262_144
"""Nodes that all lists of node ranks of a file may name together: work and memory grow with them."""
MAX_GROUPS = 64
TYPES = ("DOSW1", "DualFranka", "Franka", "GimArm", "Turtle2")
"""RLinf's own hardware types."""
_RESERVED_NAMES = ("head", "headgroup", *RESERVED_GROUPS)
_RANKS = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")


@dataclass(slots=True, kw_only=True)
class Group:
    """One of RLinf's node groups."""

    label: str
    where: paths.Parts
    nodes: list[int] = field(default_factory=list)
    """Ascending."""
    env: dict[int, dict[str, Section]] = field(default_factory=dict)
    """Node -> variable -> entry."""
    interpreter: dict[int, str] = field(default_factory=dict)
    hardware_type: str | None = None
    pieces: list[tuple[int, Section]] = field(default_factory=list)
    """Node and parameters of each robot."""
    ignore_hardware: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """Neighboring nodes that are alike: one of RLJob's node groups."""

    name: str
    first: int
    nodes: int
    labels: tuple[str, ...]
    section: Section
    hardware_type: str | None
    num_pieces: int
    devices_per_node: int
    counts_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines."""

    runs: tuple[Run, ...]
    groups: dict[str, Group]
    component_env: dict[str, Section]
    """Label -> what every component placed through it gets, because its nodes have another environment under another label."""

    def at(self, node: int) -> Run:
        """The run of a node."""
        return self.runs[bisect_right(self.runs, node, key=lambda run: run.first) - 1]

    def of(self, labels: Sequence[str]) -> list[Run]:
        """Runs of these labels, in their order; all runs for the reserved ones."""
        if not labels or labels[0] in RESERVED_GROUPS:
            return list(self.runs)
        return [run for label in labels for run in self.runs if label in run.labels]

    def units(self, labels: Sequence[str]) -> int:
        """How many ranks a placement on these labels may name."""
        runs = self.of(labels)
        if labels and labels[0] == "node":
            return sum(run.nodes for run in runs)
        if not labels or labels[0] == "cluster":
            devices = sum(run.nodes * run.devices_per_node for run in runs)
            return devices or sum(run.nodes for run in runs)
        if any(run.hardware_type for run in runs):
            return sum(run.num_pieces for run in runs)
        if any(run.counts_nodes for run in runs):
            return sum(run.nodes for run in runs)
        return sum(run.nodes * run.devices_per_node for run in runs) or sum(run.nodes for run in runs)


def parse_nodes(text: str, available: Sequence[int]) -> list[int] | None:
    """Node ranks such as ``0-3,5`` or ``all``; None when the text is none."""
    if text.strip().lower() == "all":
        return list(available)
    found: set[int] = set()
    for part in text.split(","):
        if not part.strip():
            continue
        match = _RANKS.fullmatch(part)
        if match is None:
            return None
        start, end = int(match[1]), int(match[2] or match[1])
        if not start <= end < MAX_NODES:
            return None
        if len(found) < MAX_NODES:
            found.update(range(start, end + 1))
    return sorted(found)


def read_groups(source: Source, num_nodes: int) -> dict[str, Group]:
    """The node groups of the file by label."""
    groups: dict[str, Group] = {}
    budget = [MAX_NAMED_NODES]
    for index in range(min(source.length("cluster", "node_groups"), MAX_GROUPS)):
        where: paths.Parts = ("cluster", "node_groups", index)
        label = source.text(*where, "label", limit=256)
        if label is None or label in groups or label in RESERVED_GROUPS:
            why = "has no label" if label is None else f"label {label} is taken" if label in groups else f"{label} is a reserved label"
            source.reject(where, source.peek(*where), why)
            continue
        group = Group(label=label, where=where)
        group.nodes = _node_ranks(source, (*where, "node_ranks"), range(num_nodes), budget)
        _read_env(source, group, budget)
        _read_hardware(source, group)
        groups[label] = group
    return groups


def _node_ranks(source: Source, where: paths.Parts, available: Sequence[int], budget: list[int]) -> list[int]:
    if budget[0] <= 0:
        source.reject(where, source.peek(*where), f"the file names more than {MAX_NAMED_NODES} nodes in all")
        return []
    if isinstance(source.peek(*where), list):
        text = ",".join(source.texts(*where, most=4096))
    else:
        text = source.text(*where, limit=4096) or ""
    nodes = parse_nodes(text, available)
    beyond = [node for node in nodes or () if node >= len(available)]
    if nodes is None or beyond:
        why = f"node {beyond[0]} does not exist, there are {len(available)}" if beyond else "is not a list of node ranks such as 0-3,5"
        source.reject(where, source.peek(*where), why)
        nodes = [node for node in nodes or () if node < len(available)]
    budget[0] -= len(nodes) + 1
    return nodes


def _read_env(source: Source, group: Group, budget: list[int]) -> None:
    members = set(group.nodes)
    at = (*group.where, "env_configs")
    is_list = source.length(*at) > 0
    entries: list[paths.Parts] = [(*at, index) for index in range(source.length(*at))] if is_list else ([at] if source.keys(*at) else [])
    for entry in entries:
        nodes = group.nodes
        if source.has(*entry, "node_ranks"):
            nodes = [node for node in _node_ranks(source, (*entry, "node_ranks"), range(MAX_NODES), budget) if node in members]
        interpreter = source.text(*entry, "python_interpreter_path")
        variables: dict[str, Section] = {}
        for position, name in _variable_names(source, (*entry, "env_vars")):
            variable, _ = common.environment(source, (*position, name), name)
            if variable is not None:
                variables[name] = variable
        for node in nodes:
            if interpreter:
                group.interpreter[node] = interpreter
            if variables:
                group.env.setdefault(node, {}).update(variables)


def _variable_names(source: Source, at: paths.Parts) -> Iterable[tuple[paths.Parts, str]]:
    """Variables of a list of one-key maps, or of one map."""
    for name in source.keys(*at):
        yield at, name
    for index in range(source.length(*at)):
        for name in source.keys(*at, index):
            yield (*at, index), name


def _read_hardware(source: Source, group: Group) -> None:
    at = (*group.where, "hardware")
    group.ignore_hardware = bool(source.flag(*group.where, "ignore_hardware"))
    if not source.keys(*at):
        return
    group.hardware_type = source.text(*at, "type", limit=64)
    if group.hardware_type is None:
        return
    if group.hardware_type not in TYPES:
        source.differs((*at, "type"), f"is none of RLinf's types {', '.join(TYPES)}; kept as a generic type")
    members = set(group.nodes)
    for index in range(min(source.length(*at, "configs"), 1024)):
        where = (*at, "configs", index)
        node = source.integer(*where, "node_rank", high=MAX_NODES)
        if node is None or node not in members:
            source.reject(where, source.peek(*where), f"node_rank is none of the nodes of group {group.label}")
            continue
        parameters = {key: _parameter(source, (*where, key)) for key in source.keys(*where) if key != "node_rank"}
        group.pieces.append((node, {key: value for key, value in parameters.items() if value is not None}))


def _parameter(source: Source, where: paths.Parts) -> object:
    """One setting of a robot, copied as it is."""
    return source.copy(where)


def cut(source: Source, num_nodes: int, groups: dict[str, Group], devices_per_node: int, shared: set[str]) -> Cluster:
    """Cut the nodes into runs.

    Args:
        source: the configuration.
        num_nodes: of the cluster.
        groups: by label.
        devices_per_node: accelerators of a node that is not only there for its robots.
        shared: labels whose accelerators are used although a robot hangs on one of their nodes; their robots cannot be units then.
    """
    labels: list[tuple[str, ...]] = [()] * num_nodes
    for group in groups.values():
        for node in group.nodes:
            labels[node] = (*labels[node], group.label)
    component_env = _conflicts(source, groups, labels)
    keys = [_signature(node, labels[node], groups, component_env) for node in range(num_nodes)]
    runs: list[Run] = []
    start = 0
    names = common.Labels(_RESERVED_NAMES)
    for node in range(1, num_nodes + 1):
        if node == num_nodes or keys[node] != keys[start]:
            lends = not shared.isdisjoint(labels[start])
            runs.append(_run(start, node - start, labels[start], groups, devices_per_node, component_env, names, lends=lends))
            start = node
    cluster = Cluster(runs=tuple(runs), groups=groups, component_env=component_env)
    for group in groups.values():
        if lends_its_nodes(cluster, group):
            why = "its node also has accelerators or hardware that others use, and a node group of RLJob offers one kind"
            source.drop((*group.where, "hardware"), why, "give the parameters in environments[].parameters")
    return cluster


def lends_its_nodes(cluster: Cluster, group: Group) -> bool:
    """Whether a node with a robot of the group offers something else, so that the robots cannot be units there."""
    return any(cluster.at(node).hardware_type != group.hardware_type for node, _ in group.pieces)


def _conflicts(source: Source, groups: dict[str, Group], labels: Sequence[tuple[str, ...]]) -> dict[str, Section]:
    """Labels whose environment goes with their components: a node of theirs is under another label too, which may have its own.

    What differs by node stays with the nodes, unless two labels contradict each other there.
    """
    result: dict[str, Section] = {}
    for label, group in groups.items():
        others = [(node, groups[other]) for node in group.nodes for other in labels[node] if other != label]
        if not others or not (group.env or group.interpreter):
            continue
        first = group.nodes[0]
        is_uniform = all(_settings(group, node) == _settings(group, first) for node in group.nodes)
        if not is_uniform and not any(_contradict(group, other, node) for node, other in others):
            why = "differs by node, so it reaches every worker of a node, also those placed through another label"
            source.differs((*group.where, "env_configs"), why, "move it to components[].env where that matters")
            continue
        if not is_uniform:
            source.differs(
                (*group.where, "env_configs"), "differs by node and contradicts another group's; the first node's is used for all"
            )
        variables = [item for item in group.env.get(first, {}).values() if "value" in item]
        result[label] = compact({"env": variables, "pythonInterpreter": group.interpreter.get(first)})
        why = f"goes to the components placed through {label}, because its nodes are under another label too"
        source.differs((*group.where, "env_configs"), why)
    return result


def _settings(group: Group, node: int) -> tuple[object, ...]:
    return group.env.get(node), group.interpreter.get(node)


def _contradict(one: Group, other: Group, node: int) -> bool:
    """Whether two labels of a node give one variable two values, or two interpreters."""
    mine, theirs = one.env.get(node, {}), other.env.get(node, {})
    interpreters = {one.interpreter.get(node), other.interpreter.get(node)} - {None}
    return len(interpreters) > 1 or any(mine[key] != theirs[key] for key in mine.keys() & theirs.keys())


def _signature(node: int, labels: tuple[str, ...], groups: dict[str, Group], moved: dict[str, Section]) -> tuple[object, ...]:
    env = tuple((label, str(groups[label].env.get(node)), groups[label].interpreter.get(node)) for label in labels if label not in moved)
    return labels, env


def _run(
    first: int,
    count: int,
    labels: tuple[str, ...],
    groups: dict[str, Group],
    devices: int,
    moved: dict[str, Section],
    names: common.Labels,
    *,
    lends: bool,
) -> Run:
    """One run; ``lends``: its accelerators are used although robots are attached, so it offers no robots."""
    name = names.next("-".join(labels) or "nodes", "group")
    members = [groups[label] for label in labels]
    robots = None if lends else next((group for group in members if group.hardware_type is not None), None)
    only_robots = bool(members) and all(group.hardware_type is not None or group.ignore_hardware for group in members)
    env: dict[str, Section] = {}
    interpreter = None
    for group in members:
        if group.label not in moved:
            env.update(group.env.get(first, {}))
            interpreter = interpreter or group.interpreter.get(first)
        else:
            env.update({key: item for key, item in group.env.get(first, {}).items() if "value" not in item})
    pieces = [(node, parameters) for node, parameters in robots.pieces if first <= node < first + count] if robots else []
    per_node = 0 if only_robots else devices
    ignore = any(group.ignore_hardware for group in members) and robots is None
    section = compact(
        {
            "name": name,
            "nodes": count,
            "devicesPerNode": per_node or None,
            "env": list(env.values()),
            "pythonInterpreter": interpreter,
            "hardware": None
            if robots is None
            else compact(
                {
                    "type": robots.hardware_type,
                    "configs": [compact({"nodeRank": node - first, "parameters": parameters}) for node, parameters in pieces],
                }
            ),
            "ignoreHardware": True if ignore and per_node else None,
        }
    )
    # nodeRank 0 counts within the group; compact keeps it, being neither None nor empty.
    return Run(
        name=name,
        first=first,
        nodes=count,
        labels=labels,
        section=section,
        hardware_type=robots.hardware_type if robots else None,
        num_pieces=len(pieces),
        devices_per_node=per_node,
        counts_nodes=ignore,
    )
