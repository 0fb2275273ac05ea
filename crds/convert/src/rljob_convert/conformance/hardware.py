"""Hardware of RLinf node groups other than accelerators: the five robot types of RLinf 0.3.0, and their units on a node.

Fields are those of ``rlinf/scheduler/hardware/robots/*.py``. One config is one unit on its node. Where a node's environment has
the variables of a type (``ROBOT_IP=a,b``) and no config is written, RLinf makes one config per value; so does this module.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.errors import PlacementError, did_you_mean, show
from rljob_convert.conformance.values import check_fields, section, sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotType:
    """What a config of one type may say."""

    fields: tuple[str, ...] = ()
    """Optional fields; ``node_rank`` is required of every type."""
    addresses: tuple[str, ...] = ()
    """Fields that hold an IP address."""
    choices: Mapping[str, tuple[str, ...]] | None = None
    """Allowed values of fields that RLinf restricts."""
    counted_by: tuple[str, ...] = ()
    """Fields whose environment variables tell how many robots a node has when no config does."""


def _both_arms(*names: str) -> tuple[str, ...]:
    return tuple(f"{side}_{name}" for side in ("left", "right") for name in names)


_ARM = ("robot_ip", "camera_serials", "camera_type", "gripper_type", "gripper_connection", "controller_node_rank")

ROBOTS: Mapping[str, RobotType] = {
    "Franka": RobotType(fields=(*_ARM, "disable_validate"), addresses=("robot_ip",), counted_by=("robot_ip",)),
    "DualFranka": RobotType(
        fields=(*_both_arms(*_ARM), "base_camera_serials", "base_camera_type", "camera_type"),
        addresses=("left_robot_ip", "right_robot_ip"),
        counted_by=("left_robot_ip", "right_robot_ip"),
    ),
    "DOSW1": RobotType(
        fields=("robot_url", "left_arm_port", "right_arm_port", "left_lead_port", "right_lead_port", "camera_serials"),
        counted_by=("robot_url",),
    ),
    "GimArm": RobotType(
        fields=(
            "can_interface",
            "arm_variant",
            "camera_serials",
            "camera_type",
            "enable_gripper",
            "gripper_type",
            "controller_node_rank",
            "disable_validate",
        ),
        choices={"arm_variant": ("gim_arm", "gim_arm_xl")},
        counted_by=("can_interface",),
    ),
    "Turtle2": RobotType(),
}
"""Robot types by name, case-sensitive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSection:
    """``hardware`` of a node group: one type, and the pieces of it."""

    type: str
    """Name in :data:`ROBOTS`, or any name where generic types are allowed."""
    node_ranks: tuple[int, ...]
    """Node of every piece, in the order they are written."""
    parameters: tuple[Mapping[str, object], ...]
    """Everything else that is said of every piece."""
    refused: PlacementError | None = None
    """A piece that is there twice although RLinf does not notice (D18)."""


def parse_hardware(value: object, where: str, *, allow_generic: bool = False) -> HardwareSection:
    """Read ``hardware: {type, configs}``.

    Args:
        value: the section.
        where: its place, for messages.
        allow_generic: accept types that RLinf does not know, with any fields; a manifest of RLJob may use them.

    Raises:
        PlacementError: malformed (K3, K11), an unknown type (K10), or a piece given twice (K13).
    """
    entry = section(value, where)
    check_fields(entry, where, required=("type", "configs"), optional=())
    name = str(entry["type"])
    robot = ROBOTS.get(name)
    if robot is None and not allow_generic:
        known = ", ".join(ROBOTS)
        raise PlacementError("K10", f"{where} has the unknown type {show(name)}", did_you_mean(name, ROBOTS) or f"known are {known}")
    configs = [
        section(config, f"{where}.configs[{i}]", "K11") for i, config in enumerate(sequence(entry["configs"], f"{where}.configs", "K11"))
    ]
    if robot is not None:
        for index, config in enumerate(configs):
            _check_config(config, robot, f"{where}.configs[{index}]")
    refused = _check_repetition(configs, where)
    ranks = tuple(_node_rank(config, f"{where}.configs[{index}]") for index, config in enumerate(configs))
    parameters = tuple({key: item for key, item in config.items() if key != "node_rank"} for config in configs)
    return HardwareSection(type=name, node_ranks=ranks, parameters=parameters, refused=refused)


def _node_rank(config: Mapping[str, object], where: str) -> int:
    rank = config.get("node_rank")
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise PlacementError(
            "K11", f"{where}.node_rank is {show(rank)}, not a whole number", "write the rank of the node it is attached to"
        )
    return rank


def _check_config(config: Mapping[str, object], robot: RobotType, where: str) -> None:
    check_fields(config, where, required=("node_rank",), optional=robot.fields, missing="K11", unknown="K11")
    for name in robot.addresses:
        address = config.get(name)
        if address is not None and not _is_address(address):
            raise PlacementError("K11", f"{where}.{name} is {show(address)}, not an IP address", "write for example 10.10.10.1")
    for name, allowed in (robot.choices or {}).items():
        if name in config and config[name] not in allowed:
            raise PlacementError("K11", f"{where}.{name} is {show(config[name])}", f"write {' or '.join(allowed)}")


def _is_address(value: object) -> bool:
    try:
        ipaddress.ip_address(str(value))
    except ValueError:
        return False
    return True


def _check_repetition(configs: Sequence[Mapping[str, object]], where: str) -> PlacementError | None:
    """Refuse a piece given twice; what RLinf 0.3.0 overlooks (a value is a list, or only ``disable_validate`` differs) is returned."""
    seen: dict[str, int] = {}
    overlooked: PlacementError | None = None
    for index, config in enumerate(configs):
        piece = {key: [str(part) for part in item] if isinstance(item, list) else item for key, item in config.items()}
        piece.pop("disable_validate", None)
        first = seen.setdefault(json.dumps(piece, sort_keys=True, default=str), index)
        if first != index:
            is_plain = configs[first] == config and not any(isinstance(item, (list, Mapping)) for item in config.values())
            problem = f"{where}.configs[{first}] and [{index}] are the same piece of hardware"
            if is_plain:
                raise PlacementError("K13", problem, "remove one of them")
            overlooked = overlooked or PlacementError("D18", problem, "remove one of them")
    return overlooked


def count_units(sections: Sequence[HardwareSection], num_nodes: int, environments: Sequence[Mapping[str, str]]) -> list[dict[str, int]]:
    """Pieces of every type on every node: as written, else as the node's environment says.

    Args:
        sections: hardware of all groups.
        num_nodes: nodes of the cluster.
        environments: environment of every node, by rank.

    Raises:
        PlacementError: variables of one node disagree on the number of robots (K11).
    """
    written: list[Counter[str]] = [Counter() for _ in range(num_nodes)]
    for hardware in sections:
        for rank in hardware.node_ranks:
            if 0 <= rank < num_nodes:
                written[rank][hardware.type] += 1
    for rank, environment in enumerate(environments):
        if not environment:
            continue
        for name, robot in ROBOTS.items():
            found = {
                field.upper(): len(environment[field.upper()].split(",")) for field in robot.counted_by if field.upper() in environment
            }
            pieces = written[rank][name]
            if pieces:
                _check_filled(environment, robot, pieces, rank)
            elif len(set(found.values())) > 1:
                raise PlacementError(
                    "K11",
                    f"variables {', '.join(found)} of node {rank} count {', '.join(map(str, found.values()))} robots",
                    "give one value per robot",
                )
            elif found:
                written[rank][name] = next(iter(found.values()))
                _check_filled(environment, robot, written[rank][name], rank)
    return [dict(+counts) for counts in written]


def _check_filled(environment: Mapping[str, str], robot: RobotType, num_robots: int, rank: int) -> None:
    """RLinf fills fields from variables of the same name, one value per robot, and insists on the number of values."""
    if num_robots == 1:
        return
    for field in robot.fields:
        values = environment.get(field.upper())
        if values is not None and not field.endswith("_node_rank") and len(values.split(",")) != num_robots:
            raise PlacementError(
                "K11",
                f"variable {field.upper()} of node {rank} is {show(values)}, which is not {num_robots} values",
                "give one value per robot",
            )
