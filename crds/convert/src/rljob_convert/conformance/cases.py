"""The input of a conformance case (docs/placement.md): simulated machines, config, strategy arguments. Nothing here is trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.errors import PlacementError, SpecInvalidError, show
from rljob_convert.conformance.limits import MAX_ACCELERATORS_PER_NODE, MAX_CASE_CHARACTERS, MAX_CASE_VALUES, MAX_DEPTH, MAX_NODES
from rljob_convert.conformance.node_ranks import Machine
from rljob_convert.conformance.values import check_fields, section, sequence
from rljob_convert.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy

_ACCELERATORS_PER_NODE = 8
_MAX_INT_BITS = 4_096
"""Python refuses to write whole numbers of more than 4300 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Simulated machines."""

    machines: tuple[Machine, ...]
    driver: int
    """Index of the machine that the driver runs on."""


def check_size(case: object) -> None:
    """Refuse a case that is too deep or too large to look at, without recursion.

    Raises:
        PlacementError: it is (K3), or has a key that is not text, or a value that JSON does not know.
    """
    num_values = num_characters = 0
    level: list[object] = [case]
    for _ in range(MAX_DEPTH):
        following: list[object] = []
        num_values += len(level)
        for value in level:
            if isinstance(value, Mapping):
                if not all(isinstance(key, str) for key in value):
                    raise PlacementError("K3", "the case has a key that is not text", "write keys as text")
                num_characters += sum(map(len, value))
                following.extend(value.values())
            elif isinstance(value, (list, tuple)):
                following.extend(value)
            elif isinstance(value, str):
                num_characters += len(value)
            elif not (
                value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS)
            ):
                raise PlacementError("K3", f"the case has a value of type {type(value).__name__}", "write JSON")
        if num_values + len(following) > MAX_CASE_VALUES or num_characters > MAX_CASE_CHARACTERS:
            raise PlacementError(
                "K3", f"the case has more than {MAX_CASE_VALUES} values or {MAX_CASE_CHARACTERS} characters", "use a smaller case"
            )
        if not following:
            return
        level = following
    raise PlacementError("K3", f"the case is nested more than {MAX_DEPTH} levels deep", "use a flatter case")


def read_hardware(value: object) -> Hardware:
    """The ``cluster`` of a case.

    Raises:
        PlacementError: malformed (K3), or too large (K1).
    """
    entry = section(value, "the case's cluster")
    if "nodes" in entry:
        check_fields(entry, "the case's cluster", required=("nodes",), optional=("head", "num_nodes"))
        nodes = sequence(entry["nodes"], "cluster.nodes", "K3")
        _check_num_nodes(len(nodes))
        machines = tuple(_machine(section(node, f"cluster.nodes[{index}]"), index) for index, node in enumerate(nodes))
        return Hardware(machines=machines, driver=_natural(entry.get("head", 0), "cluster.head", len(machines) - 1))
    check_fields(entry, "the case's cluster", required=(), optional=("num_nodes", "accelerators_per_node", "accel_type", "model", "head"))
    per_node = entry.get("accelerators_per_node", _ACCELERATORS_PER_NODE)
    listed = per_node if isinstance(per_node, list) else None
    num_nodes = _natural(entry.get("num_nodes", 1 if listed is None else len(listed)), "cluster.num_nodes", MAX_NODES)
    _check_num_nodes(num_nodes)
    counts: Sequence[object] = [per_node] * num_nodes if listed is None else listed
    if len(counts) != num_nodes:
        raise PlacementError("K3", f"cluster has {num_nodes} nodes and {len(counts)} numbers of accelerators", "give one per node")
    kind = {"accel_type": entry.get("accel_type"), "model": entry.get("model")}
    machines = tuple(
        _machine({"accelerators": count, "node_rank": index} | {key: item for key, item in kind.items() if item is not None}, index)
        for index, count in enumerate(counts)
    )
    return Hardware(machines=machines, driver=_natural(entry.get("head", 0), "cluster.head", num_nodes - 1))


def _check_num_nodes(num_nodes: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise PlacementError("K1", f"the cluster has {num_nodes} nodes", f"use 1 to {MAX_NODES}")


def _machine(entry: Mapping[str, object], index: int) -> Machine:
    where = f"cluster.nodes[{index}]"
    check_fields(entry, where, required=(), optional=("accelerators", "accel_type", "model", "ip", "node_rank", "env"))
    environment = section(entry.get("env") or {}, f"{where}.env")
    return Machine(
        num_accelerators=_natural(entry.get("accelerators", 0), f"{where}.accelerators", MAX_ACCELERATORS_PER_NODE),
        accelerator_type=_text(entry.get("accel_type", "NV_GPU"), f"{where}.accel_type"),
        accelerator_model=_text(entry.get("model", "H100"), f"{where}.model"),
        ip=_text(entry.get("ip", f"10.0.{(index + 1) // 256}.{(index + 1) % 256}"), f"{where}.ip"),
        given_rank=entry.get("node_rank", index),
        environment={name: _text(setting, f"{where}.env.{name}") for name, setting in environment.items()},
    )


def _natural(value: object, where: str, largest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise PlacementError(
            "K1" if where.endswith("num_nodes") else "K3", f"{where} is {show(value)}", f"write a whole number from 0 to {largest}"
        )
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise PlacementError("K3", f"{where} is {show(value)}, not a text", "write a text")
    return value


def read_config(case: Mapping[str, object]) -> Mapping[str, object]:
    """``config``, or ``config_yaml`` read without YAML 1.1's surprises.

    Raises:
        PlacementError: neither is there (K2), it is no map (K2), no YAML (K3), or YAML reads a value as something else (D9).
    """
    if "config_yaml" not in case:
        if case.get("config") is None:
            raise PlacementError("K2", "the case has no config", "add config or config_yaml")
        return section(case["config"], "config", "K2")
    # Only these cases need a YAML parser.
    from rljob_api.reading import yaml_text

    try:
        documents = yaml_text.load(_text(case["config_yaml"], "config_yaml"))
    except SpecInvalidError as error:
        raise PlacementError("K3", error.errors[0].problem, error.errors[0].remedy) from None
    if len(documents) != 1:
        raise PlacementError("K2", f"config_yaml has {len(documents)} documents", "write one")
    for surprise in documents[0].errors:
        raise PlacementError("D9", f"config_yaml, {surprise.path}: {surprise.value}: {surprise.problem}", surprise.remedy)
    return section(documents[0].data, "config_yaml", "K2")


def strategy(kind: str, value: object) -> PlacementStrategy:
    """The strategy of a case of kind packed, flexible or node, made with the arguments of RLinf's constructor.

    Raises:
        PlacementError: wrong arguments (B1, B2, F1, F2, V1).
    """
    arguments = section(value, "strategy_args")
    if kind == "packed":
        names = ("start_hardware_rank", "end_hardware_rank")
        check_fields(arguments, "strategy_args", required=names, optional=("num_hardware_per_process", "stride", "node_group"))
        return PackedPlacementStrategy(
            _rank(arguments["start_hardware_rank"], "start_hardware_rank", "B1"),
            _rank(arguments["end_hardware_rank"], "end_hardware_rank", "B1"),
            _rank(arguments.get("num_hardware_per_process", 1), "num_hardware_per_process", "B2"),
            _rank(arguments.get("stride", 1), "stride", "B2"),
            _labels(arguments.get("node_group"), "B3"),
        )
    if kind == "flexible":
        check_fields(arguments, "strategy_args", required=("hardware_ranks_list",), optional=("node_group_label",))
        lists = sequence(arguments["hardware_ranks_list"], "hardware_ranks_list", "F1")
        ranks = [
            [_rank(rank, "a hardware rank", "F1") for rank in sequence(each, "a process of hardware_ranks_list", "F1")] for each in lists
        ]
        return FlexiblePlacementStrategy(ranks, _labels(arguments.get("node_group_label"), "F3"))
    check_fields(arguments, "strategy_args", required=("node_ranks",), optional=("node_group_label",))
    node_ranks = [_rank(rank, "a node rank", "V1") for rank in sequence(arguments["node_ranks"], "node_ranks", "V1")]
    return NodePlacementStrategy(node_ranks, _labels(arguments.get("node_group_label"), "F3"))


def _rank(value: object, where: str, check: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlacementError(check, f"{where} is {show(value)}, not a whole number", "write a whole number")
    # Beyond any cluster; keeps every number printable.
    return max(-(10**9), min(value, 10**9))


def _labels(value: object, check: str) -> tuple[str, ...] | None:
    """One label or a list of labels; unlike in a config, a comma is part of a label."""
    if value is None:
        return None
    labels = value if isinstance(value, list) else [value]
    if not all(isinstance(label, (str, int)) for label in labels):
        raise PlacementError(check, f"node group {show(value)} is not a label", "write a label or a list of labels")
    return tuple(str(label) for label in labels)
