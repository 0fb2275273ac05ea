"""``cluster.node_groups`` of an RLinf config: labels, nodes, hardware, and the environment of every node.

Ids of the checks are those of docs/placement.md. Beyond RLinf 0.3.0, ``node_ranks`` may be a list (D2) and two nodes of a group may
give one variable different values (D10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.errors import PlacementError, show
from rljob_api.placement.topology import RESERVED_GROUPS
from rljob_convert.conformance.hardware import HardwareSection, parse_hardware
from rljob_convert.conformance.limits import MAX_GROUP_NODES
from rljob_convert.conformance.values import check_fields, rank_list, section, sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """Environment of some nodes of a group."""

    node_ranks: tuple[int, ...]
    variables: Mapping[str, str]
    """By name."""
    interpreter: str | None
    """Python of workers that are placed through the group; None means the node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One entry of ``node_groups``."""

    label: str
    node_ranks: tuple[int, ...]
    """Ascending; a group may be empty."""
    hardware: HardwareSection | None = None
    hardware_type: str | None = None
    """What its ranks count; None: accelerators where there are any, unless ``ignore_hardware``."""
    ignore_hardware: bool = False
    env_configs: tuple[EnvConfig, ...] = ()
    differences: frozenset[str] = field(default_factory=frozenset)
    """Where RLinf 0.3.0 would have refused what is accepted here: D2, D10."""


def parse_groups(value: object, num_nodes: int) -> tuple[GroupConfig, ...]:
    """Read ``node_groups``.

    Args:
        value: the list of entries.
        num_nodes: nodes of the cluster.

    Raises:
        PlacementError: K3 to K14, D9.
    """
    groups: list[GroupConfig] = []
    total = 0
    for index, entry in enumerate(sequence(value, "node_groups", "K3")):
        group = _parse_group(section(entry, f"node_groups[{index}]"), f"node_groups[{index}]", num_nodes)
        total += len(group.node_ranks)
        if total > MAX_GROUP_NODES:
            raise PlacementError("K5", f"node groups name more than {MAX_GROUP_NODES} nodes together", "use fewer or smaller groups")
        groups.append(group)
    _check_hardware_places(groups)
    return tuple(groups)


def _parse_group(entry: Mapping[str, object], where: str, num_nodes: int) -> GroupConfig:
    check_fields(
        entry,
        where,
        required=("label", "node_ranks"),
        optional=("env_configs", "hardware", "hardware_type", "ignore_hardware"),
    )
    hardware = None if entry.get("hardware") is None else parse_hardware(entry["hardware"], f"{where}.hardware")
    hardware_type = entry.get("hardware_type")
    if hardware is not None and hardware_type is not None:
        raise PlacementError("K6", f"{where} has hardware and hardware_type", "remove hardware_type")
    ignore = entry.get("ignore_hardware", False)
    if not isinstance(ignore, bool):
        raise PlacementError("K3", f"{where}.ignore_hardware is {show(ignore)}", "write true or false")
    if hardware is not None and ignore:
        raise PlacementError("K6", f"{where} has hardware and ignores hardware", "remove one of the two")
    label = _label(entry["label"], where)
    ranks, differences = _node_ranks(entry["node_ranks"], range(num_nodes), f"{where}.node_ranks", "K5")
    env_configs, env_differences = _env_configs(entry.get("env_configs"), ranks, where)
    return GroupConfig(
        label=label,
        node_ranks=ranks,
        hardware=hardware,
        hardware_type=hardware.type if hardware is not None else (None if hardware_type is None else str(hardware_type)),
        ignore_hardware=ignore,
        env_configs=env_configs,
        differences=frozenset(differences | env_differences),
    )


def _label(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise PlacementError("K3", f"{where}.label is {show(value)}, not a text", "write a name")
    label = str(value)
    if label in RESERVED_GROUPS:
        raise PlacementError("K4", f"{where}.label {show(label)} is reserved", "use another name")
    return label


def _node_ranks(value: object, available: Sequence[int], where: str, check: str) -> tuple[tuple[int, ...], set[str]]:
    """Node ranks, written as RLinf's text or as a list of whole numbers, and the difference that the list makes."""
    differences: set[str] = set()
    if isinstance(value, list):
        wrong = next((rank for rank in value if isinstance(rank, bool) or not isinstance(rank, int)), None)
        if wrong is not None:
            raise PlacementError(check, f"{where} has {show(wrong)}, not a whole number", "list node ranks, for example [0, 1]")
        differences.add("D2")
        value = ",".join(map(str, value))
    try:
        return tuple(rank_list(value, available)), differences
    except PlacementError as error:
        id_ = error.check if error.check.startswith("D") else check
        raise PlacementError(id_, f"{where}: {error.problem}", error.remedy) from None


def _env_configs(value: object, group_ranks: tuple[int, ...], where: str) -> tuple[tuple[EnvConfig, ...], set[str]]:
    if value is None:
        return (), set()
    where = f"{where}.env_configs"
    configs: list[EnvConfig] = []
    differences: set[str] = set()
    used_ranks: set[int] = set()
    used_names: set[str] = set()
    inside = set(group_ranks)
    for index, item in enumerate(sequence(value, where, "K7")):
        here = f"{where}[{index}]"
        entry = section(item, here, "K7")
        check_fields(entry, here, required=("node_ranks",), optional=("env_vars", "python_interpreter_path"))
        variables = _variables(entry.get("env_vars"), f"{here}.env_vars")
        ranks, found = _node_ranks(entry["node_ranks"], group_ranks, f"{here}.node_ranks", "K8")
        outside = next((rank for rank in ranks if rank not in inside), None)
        if outside is not None:
            raise PlacementError("K8", f"{here} names node {outside}, which is not in its group", "use nodes of the group")
        twice = next((rank for rank in ranks if rank in used_ranks), None)
        if twice is not None:
            raise PlacementError("K8", f"{here} names node {twice}, which an earlier entry has", "name every node once")
        used_ranks.update(ranks)
        if ranks or variables:
            differences |= found | ({"D10"} if not used_names.isdisjoint(variables) else set())
        used_names.update(variables)
        interpreter = entry.get("python_interpreter_path")
        configs.append(EnvConfig(node_ranks=ranks, variables=variables, interpreter=None if interpreter is None else str(interpreter)))
    return tuple(configs), differences


def _variables(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    variables: dict[str, str] = {}
    for index, item in enumerate(sequence(value, where, "K7")):
        entry = section(item, f"{where}[{index}]", "K7")
        if len(entry) != 1:
            raise PlacementError("K7", f"{where}[{index}] has {len(entry)} variables", "write one variable per entry")
        name, setting = next(iter(entry.items()))
        if name in variables:
            raise PlacementError("K9", f"{where} sets {show(name)} twice", "keep one of them")
        variables[str(name)] = str(setting)
    return variables


def _check_hardware_places(groups: Sequence[GroupConfig]) -> None:
    """Hardware must be on nodes of its group (K12), and of one type on a node in one group only (K14)."""
    owners: dict[tuple[int, str], str] = {}
    for group in groups:
        inside = set(group.node_ranks)
        for rank in group.hardware.node_ranks if group.hardware else ():
            kind = group.hardware_type or ""
            if rank not in inside:
                raise PlacementError(
                    "K12", f"{kind} of group {show(group.label)} is on node {rank}, which is not in the group", "use its nodes"
                )
            owner = owners.setdefault((rank, kind), group.label)
            if owner != group.label:
                raise PlacementError(
                    "K14",
                    f"{kind} on node {rank} is configured in groups {show(owner)} and {show(group.label)}",
                    "configure it in one group",
                )
