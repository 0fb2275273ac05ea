"""RLinf's component_placement: names, groups and rank maps to components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_api import paths
from rljob_api.errors import PlacementError, counted
from rljob_api.placement import ranks
from rljob_api.placement.topology import CLUSTER, NODE, RESERVED_GROUPS
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.notes import NoteKind
from rljob_convert.rlinf.cluster import MAX_NODES, Cluster, Group, cut, lends_its_nodes, read_groups
from rljob_convert.source import Source

DEFAULT_DEVICES_PER_NODE = 8
PLACEMENT = ("cluster", "component_placement")
CLUSTER_KEYS = ("num_nodes", "node_groups", "component_placement")
INFERENCE = ("inference", "actor_inference")
_TRAINING_ROLES = ("Trainer", "Critic", "Reference")
_DEVICE_ROLES = ("Trainer", "Rollout", "Critic", "Reference")
MAX_ROBOT_PROCESSES = 65_536
MAX_COMPONENTS = 64
MAX_DEVICES = 131_072
"""Devices up to which it is found out whether components share some; the planner refuses more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One component of the file."""

    name: str
    role: str | None
    """None for what has no counterpart."""
    where: paths.Parts
    labels: tuple[str, ...]
    ranks: str


@dataclass(slots=True, kw_only=True)
class Placed:
    """Machines and components."""

    node_groups: list[Section]
    components: list[Section]
    entries: list[Entry]
    sharing: frozenset[str] = frozenset()
    """Components that have a device in common with others."""
    workers: dict[str, int] = field(default_factory=dict)
    """Processes by component of the file."""


def place(source: Source, devices_per_node: int | None, *, has_kl: bool, trains: bool = True) -> Placed:
    """Node groups and components of a configuration; without training, those that answer and score."""
    entries = _entries(source, has_kl=has_kl)
    num_nodes = _num_nodes(source)
    groups = read_groups(source, num_nodes)
    devices = devices_per_node or DEFAULT_DEVICES_PER_NODE
    if devices_per_node is None:
        why = "RLinf counts the accelerators of a node at start, its files do not say how many"
        source.assume(("cluster", "devices_per_node"), devices, why, "give --devices-per-node")
    num_nodes = _undefined_groups(source, entries, groups, num_nodes, devices)
    shared = _labels_with_robots(entries, groups)
    cluster = cut(source, num_nodes, groups, devices, shared)
    placed = Placed(node_groups=[run.section for run in cluster.runs], components=[], entries=entries)
    for entry in entries:
        if not trains and entry.role in _TRAINING_ROLES:
            _about(source, entry, NoteKind.DROPPED, f"{entry.name}: nothing is trained", "")
            continue
        component = _component(source, entry, cluster, placed)
        if component is not None:
            placed.components.append(component)
    _missing_roles(source, placed, cluster, has_kl=has_kl, trains=trains)
    placed.sharing = _sharing(cluster, placed)
    _scope(source, cluster, entries)
    return placed


def _num_nodes(source: Source) -> int:
    number = source.integer("cluster", "num_nodes", low=1, high=MAX_NODES)
    if number is None:
        number = source.assume(("cluster", "num_nodes"), 1, "the file does not say how many nodes there are", "set nodeGroups[].nodes")
    return number


def _entries(source: Source, *, has_kl: bool) -> list[Entry]:
    entries: list[Entry] = []
    places: list[tuple[str, ...]] = [(*PLACEMENT, key) for key in source.keys(*PLACEMENT)]
    for key in source.keys("cluster"):
        if key not in CLUSTER_KEYS and _looks_like_placement(source, ("cluster", key)):
            source.differs(("cluster", key), "is taken for a component; RLinf reads components below component_placement only")
            places.append(("cluster", key))
    for where in places:
        if len(entries) >= MAX_COMPONENTS:
            source.drop(where, f"a job has at most {MAX_COMPONENTS} components")
            continue
        labels, text = _labels_and_ranks(source, where)
        if text is None:
            source.reject(where, source.peek(*where), "says nothing about where to run")
            continue
        for name in (part.strip() for part in str(where[-1]).split(",")):
            if not name:
                source.differs(where, "the empty name after a comma is left out; RLinf places a component without a name")
            elif any(entry.name == name for entry in entries):
                source.differs(where, f"{name} is placed twice, the first one counts; RLinf refuses this")
            else:
                entries.append(Entry(name=name, role=_role(name, has_kl=has_kl), where=where, labels=labels, ranks=text))
    return entries


def _looks_like_placement(source: Source, where: paths.Parts) -> bool:
    value = source.peek(*where)
    if isinstance(value, dict):
        return "placement" in value
    if isinstance(value, str):
        try:
            ranks.parse(value)
        except PlacementError:
            return False
        return True
    return False


def _role(name: str, *, has_kl: bool) -> str | None:
    if name == "actor":
        return "Trainer"
    if name in INFERENCE:
        return "Reference" if has_kl else None
    if name == "critic_inference":
        return None
    if name == "critic":
        return "Critic"
    if name.startswith("rollout"):
        return "Rollout"
    return "Reward" if name.startswith("reward") else "Environment"


def _labels_and_ranks(source: Source, where: paths.Parts) -> tuple[tuple[str, ...], str | None]:
    if not source.keys(*where):
        return (), source.text(*where, limit=4096)
    written = source.texts(*where, "node_group")
    labels = tuple(part.strip() for text in written for part in text.split(",") if part.strip())
    return labels, source.text(*where, "placement", limit=4096)


def _last_rank(text: str) -> int:
    """The highest resource rank of a map; 0 when it names none."""
    try:
        parts = ranks.parse(text).parts
    except PlacementError:
        return 0
    return max((part.resources.end for part in parts if part.resources is not None), default=0)


def _undefined_groups(source: Source, entries: Sequence[Entry], groups: dict[str, Group], num_nodes: int, devices: int) -> int:
    """Make up the groups that placements name and the file does not define, as an excerpt may; returns the number of nodes."""
    needs: dict[str, tuple[int, bool, Entry]] = {}
    for entry in entries:
        for label in entry.labels:
            if label not in groups and label not in RESERVED_GROUPS:
                last, is_robot, first = needs.get(label, (0, True, entry))
                needs[label] = (max(last, _last_rank(entry.ranks)), is_robot and entry.role == "Environment", first)
    free = [node for node in range(num_nodes) if not any(node in group.nodes for group in groups.values())] if needs else []
    total = num_nodes
    for label, (last, is_robot, entry) in needs.items():
        wanted = 1 if is_robot else min(-(-(last + 1) // devices), MAX_NODES - total)
        wanted = max(1, wanted)
        nodes, free = free[:wanted], free[wanted:]
        nodes += range(total, total + wanted - len(nodes))
        total += max(0, wanted - len([node for node in nodes if node < total]))
        group = Group(label=label, where=entry.where, nodes=nodes)
        what = f"{counted(wanted, 'node')} of {counted(devices, 'device')}"
        if is_robot:
            group.hardware_type = "Robot"
            group.pieces = [(nodes[0], {}) for _ in range(min(last + 1, 1024))]
            group.pieces = [(node, {"index": index}) for index, (node, _) in enumerate(group.pieces)]
            what = f"one node with {len(group.pieces)} pieces of hardware"
        source.assume(("cluster", "node_groups"), label, f"the file does not define this group: {what}", "describe it in nodeGroups")
        groups[label] = group
    if total != num_nodes and source.has("cluster", "num_nodes"):
        source.differs(("cluster", "num_nodes"), f"becomes {total}: the ranks name more")
    return total


def _labels_with_robots(entries: Sequence[Entry], groups: dict[str, Group]) -> set[str]:
    """Labels whose accelerators are used although robots of another label are on one of their nodes."""
    robots = {node for group in groups.values() if group.hardware_type is not None for node, _ in group.pieces}
    used = {label for entry in entries if entry.role in _DEVICE_ROLES for label in entry.labels if label in groups}
    return {label for label in used if groups[label].hardware_type is None and robots & set(groups[label].nodes)}


def _component(source: Source, entry: Entry, cluster: Cluster, placed: Placed) -> Section | None:
    placed.workers[entry.name] = _count(cluster, entry)
    if entry.role is None:
        why = (
            "RLJob's engines give the log-probs of what they sampled and the Trainer computes its own; these devices are free"
            if entry.name in INFERENCE
            else "the Critic computes its own values; these devices are free"
        )
        _about(source, entry, NoteKind.DROPPED, f"{entry.name}: {why}", "give the devices to actor or rollout")
        return None
    name = common.component_name(entry.name, (component["name"] for component in placed.components))
    if entry.name in INFERENCE:
        why = "inference: becomes the Reference of the KL term; what it recomputed with the actor's weights, the Trainer computes itself"
        _about(source, entry, NoteKind.DIFFERENT, why, "check algorithm.kl")
    if entry.role == "Environment" and not entry.name.startswith(("env", "agent")):
        _about(source, entry, NoteKind.DIFFERENT, f"{entry.name}: becomes an Environment, the role of all other workers", "check its role")
    if entry.role == "Reward" and (not entry.labels or entry.labels[0] != NODE):
        workers = placed.workers[entry.name]
        _about(
            source, entry, NoteKind.DIFFERENT, f"{entry.name}: rewards run on CPU: {counted(workers, 'worker')}, spread over the nodes", ""
        )
        names = [] if not entry.labels or entry.labels[0] in RESERVED_GROUPS else [run.name for run in cluster.of(entry.labels)]
        placement = compact({"nodeGroups": list(dict.fromkeys(names)), "workers": workers})
    else:
        placement = _placement(source, entry, cluster)
    section: Section = {"name": name, "role": entry.role, "placement": placement}
    moved = [cluster.component_env[label] for label in entry.labels if label in cluster.component_env]
    if len(moved) > 1:
        _about(source, entry, NoteKind.DIFFERENT, f"{entry.name}: has the environment of its first group only", "check components[].env")
    return section | (moved[0] if moved else {})


def _about(source: Source, entry: Entry, kind: NoteKind, why: str, remedy: str) -> None:
    source.note(kind, entry.where, why, remedy)


def _placement(source: Source, entry: Entry, cluster: Cluster) -> Section:
    by_node = _robots_by_node(source, entry, cluster)
    if by_node is not None:
        return {"nodeGroups": [NODE], "ranks": by_node}
    text = entry.ranks
    if not entry.labels or entry.labels == (CLUSTER,):
        return {"ranks": text}
    if entry.labels[0] in RESERVED_GROUPS:
        return {"nodeGroups": [entry.labels[0]], "ranks": text}
    return {"nodeGroups": list(dict.fromkeys(run.name for run in cluster.of(entry.labels))), "ranks": text}


def _robots_by_node(source: Source, entry: Entry, cluster: Cluster) -> str | None:
    """A placement on robots whose nodes lend their accelerators to others, as a placement on nodes; None when it is no such."""
    groups = [cluster.groups[label] for label in entry.labels if label in cluster.groups]
    pieces = sorted(node for group in groups for node, _ in group.pieces)
    if not any(lends_its_nodes(cluster, group) for group in groups):
        return None
    evaluation = _evaluated(entry.ranks, len(pieces))
    if evaluation is None or evaluation.num_processes > MAX_ROBOT_PROCESSES:
        return None
    nodes = [pieces[units[0]] for units in evaluation.split()]
    parts: list[str] = []
    start = 0
    for index in range(1, len(nodes) + 1):
        if index == len(nodes) or nodes[index] != nodes[start]:
            parts.append(f"{nodes[start]}:{start}" if index - 1 == start else f"{nodes[start]}:{start}-{index - 1}")
            start = index
    why = f"{entry.name}: placed on the robots' nodes, because other components use the accelerators of a node with robots"
    _about(source, entry, NoteKind.DIFFERENT, why, "give the robots' parameters in environments[].parameters")
    return ",".join(parts)


def _evaluated(text: str, num_units: int) -> ranks.Evaluation | None:
    """A rank map against the units there are; None when the planner will refuse it."""
    try:
        evaluation = ranks.evaluate(text, num_units)
    except PlacementError:
        return None
    return None if evaluation.refused is not None else evaluation


def _count(cluster: Cluster, entry: Entry) -> int:
    evaluation = _evaluated(entry.ranks, cluster.units(entry.labels))
    return 1 if evaluation is None else max(1, min(evaluation.num_processes, 1_000_000))


def _missing_roles(source: Source, placed: Placed, cluster: Cluster, *, has_kl: bool, trains: bool) -> None:
    """A job needs a Trainer and a Rollout, with a KL term a Reference, and a Reward."""
    by_role = {component["role"]: component for component in reversed(placed.components)}
    other = by_role.get("Trainer") or by_role.get("Rollout")
    wanted = ({"actor": "Trainer"} if trains else {}) | {"rollout": "Rollout"} | ({"inference": "Reference"} if has_kl else {})
    for position, (name, role) in enumerate(wanted.items()):
        if role in by_role:
            continue
        placement = dict(other["placement"]) if other else {"ranks": "0"}
        if other is None and cluster.runs and not any(run.devices_per_node for run in cluster.runs):
            placement["ranks"] = "0"
        source.assume((*PLACEMENT, name), placement, f"the file places no {name}, and a job needs a {role}", "set its placement")
        component = {"name": common.component_name(name, (item["name"] for item in placed.components)), "role": role}
        placed.components.insert(position, {**component, "placement": placement})
        other = other or placed.components[position]
    if "Reward" not in by_role:
        source.assume((*PLACEMENT, "reward"), 1, "the file places no reward, one CPU worker scores", "set workers of the Reward component")
        name = common.component_name("reward", (item["name"] for item in placed.components))
        placed.components.append({"name": name, "role": "Reward", "placement": {"workers": 1}})


def _sharing(cluster: Cluster, placed: Placed) -> frozenset[str]:
    """Components that have a device in common with others, as far as their texts can be read."""
    offsets: dict[str, range] = {}
    total = 0
    for run in cluster.runs:
        offsets[run.name] = range(total, total + run.nodes * run.devices_per_node)
        total = offsets[run.name].stop
    if total > MAX_DEVICES:
        return frozenset()
    first: dict[int, str] = {}
    sharing: set[str] = set()
    for component in placed.components:
        placement = component["placement"]
        names = placement.get("nodeGroups") or list(offsets)
        if "ranks" not in placement or component["role"] not in _DEVICE_ROLES or names[0] == NODE:
            continue
        available = [device for name in names for device in offsets.get(name, ())]
        evaluation = _evaluated(placement["ranks"], len(available))
        if evaluation is None:
            continue
        for device in {available[unit] for part in evaluation.parts for unit in part.units}:
            other = first.setdefault(device, component["name"])
            if other != component["name"]:
                sharing |= {other, component["name"]}
    return frozenset(sharing)


def _scope(source: Source, cluster: Cluster, entries: Sequence[Entry]) -> None:
    """Say where variables of a group reach components that RLinf keeps them from."""
    everywhere = [entry.name for entry in entries if not entry.labels or entry.labels[0] in RESERVED_GROUPS]
    for group in cluster.groups.values():
        if everywhere and (group.env or group.interpreter) and group.label not in cluster.component_env:
            why = f"reaches every worker on these nodes; RLinf keeps it from {', '.join(everywhere)}, placed on the whole cluster"
            source.differs((*group.where, "env_configs"), why, "move it to components[].env where that matters")
