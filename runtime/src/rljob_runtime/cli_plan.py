"""Plans for people and for tools: the output of ``rljob plan``.

rich is imported only where a table is drawn: ``rljob validate`` should answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rljob_api.plan import Plan, PlannedComponent
from rljob_api.validation import CheckedJob

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_PROCESS_ROWS = 64
"""Processes that the table lists one by one; JSON and YAML always list all."""


def as_document(checked: CheckedJob) -> dict[str, Any]:
    """The plan as plain data with camelCase keys, in a fixed order."""
    document: dict[str, Any] = _camel(asdict(checked.plan))
    for planned, component in zip(document["components"], checked.plan.components, strict=True):
        planned["worldSize"] = component.world_size
        planned["devices"] = list(component.devices)
    return {"name": checked.job.metadata.name, **document}


def as_json(checked: CheckedJob) -> str:
    """:func:`as_document` as JSON text."""
    return json.dumps(as_document(checked), indent=2)


def as_yaml(checked: CheckedJob) -> str:
    """:func:`as_document` as YAML text."""
    from rljob_api.generate import to_yaml

    return to_yaml(as_document(checked)).rstrip("\n")


def print_tables(checked: CheckedJob, console: Console) -> None:
    """Nodes, components and processes as tables, and one line about the mode."""
    plan = checked.plan
    console.print(f"[bold]{checked.job.metadata.name}[/bold]: {summary(checked)}", highlight=False, soft_wrap=True)
    console.print(_nodes(plan))
    console.print(_components(plan))
    if sum(component.world_size for component in plan.components) <= MAX_PROCESS_ROWS:
        console.print(_processes(plan))
    else:
        console.print(f"More than {MAX_PROCESS_ROWS} processes; --output json lists them all.", highlight=False)


def summary(checked: CheckedJob) -> str:
    """One line, for example ``1 node, 2 devices, Disaggregated; actor_train 1, actor_infer 1, reward 1; 300 steps``."""
    plan = checked.plan
    num_devices = sum(node.num_devices for node in plan.nodes)
    workers = ", ".join(f"{component.name} {component.world_size}" for component in plan.components)
    steps = checked.job.spec.training.steps
    return f"{_count(len(plan.nodes), 'node')}, {_count(num_devices, 'device')}, {plan.mode}; {workers}; {_count(steps, 'step')}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, runs shortened: ``0-3,6``; a dash for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in runs) or "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {_camel_key(key): _camel(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_camel(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _camel_key(key: str) -> str:
    head, *tail = key.split("_")
    return head + "".join(word.capitalize() for word in tail)


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _nodes(plan: Plan) -> Table:
    """One row per node group."""
    table = _table("Nodes", ("group", "node ranks", "devices of a node", "resource", "device ranks"))
    groups = dict.fromkeys(node.group for node in plan.nodes)
    for group in groups:
        nodes = [node for node in plan.nodes if node.group == group]
        first, last = nodes[0].first_device, nodes[-1].first_device + nodes[-1].num_devices
        has_devices = last > first
        table.add_row(
            group,
            ranges(node.rank for node in nodes),
            str(nodes[0].num_devices),
            nodes[0].device_resource if has_devices else "-",
            ranges(range(first, last)),
        )
    return table


def _components(plan: Plan) -> Table:
    table = _table("Components", ("component", "role", "processes", "devices", "shares devices with"))
    for component in plan.components:
        table.add_row(
            component.name,
            component.role.value,
            str(component.world_size),
            ranges(component.devices),
            ", ".join(component.shares_devices_with) or "-",
        )
    return table


def _processes(plan: Plan) -> Table:
    table = _table("Processes", ("worker", "node", "devices on the node", "device ranks", "local rank"))
    for component in plan.components:
        for row in _process_rows(plan, component):
            table.add_row(*row)
    return table


def _process_rows(plan: Plan, component: PlannedComponent) -> Iterable[tuple[str, ...]]:
    for process in component.processes:
        node = plan.nodes[process.node_rank]
        yield (
            f"{component.name}-{process.rank}",
            f"{node.rank} ({node.group}[{node.index}])",
            ranges(process.local_devices),
            ranges(process.devices),
            f"{process.local_rank} of {process.local_world_size}",
        )
