"""Plans for people and for tools: the output of ``rljob plan``.

rich and the pictures are imported only where a picture is made: ``rljob validate`` should answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.v1alpha1.components import Role
from rljob_api.validation import CheckedJob

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rljob_api.memory import MemoryEstimate
    from rljob_runtime.plan_view import Line, Route, Section

NOT_CHECKED = "not checked, because the size of the model is not known: set spec.model.parameterCount, or spec.model.path to its folder"
FEW_PROCESSES = 8
"""Up to so many processes are listed without being asked for."""
MAX_PROCESS_ROWS = 2_000
"""Processes that the table lists at most; JSON and YAML always list all."""


def as_document(checked: CheckedJob) -> dict[str, Any]:
    """The plan as plain data with camelCase keys, in a fixed order."""
    document: dict[str, Any] = _camel(asdict(checked.plan))
    for planned, component in zip(document["components"], checked.plan.components, strict=True):
        planned["worldSize"] = component.world_size
        planned["devices"] = list(component.devices)
    from rljob_api import memory

    estimate = _memory(checked)
    known = {"memory": memory.as_document(estimate)} if estimate.shape is not None else {}
    return {"name": checked.job.metadata.name, **document, **known}


def as_json(checked: CheckedJob) -> str:
    """:func:`as_document` as JSON text."""
    return json.dumps(as_document(checked), indent=2)


def as_yaml(checked: CheckedJob) -> str:
    """:func:`as_document` as YAML text."""
    from rljob_api.generate import to_yaml

    return to_yaml(as_document(checked)).rstrip("\n")


def print_picture(checked: CheckedJob, console: Console, *, processes: bool = False) -> None:
    """The picture, and the table of processes where it was asked for or is short.

    Raises:
        PlacementError: weights cannot reach an engine in the way that spec.weightSync asks for.
    """
    from rljob_runtime import plan_view

    plan = checked.plan
    routes = sync_routes(checked)
    console.print(f"[bold]{checked.job.metadata.name}[/bold]: {summary(checked)}\n", highlight=False, soft_wrap=True)
    lines = plan_view.picture(plan_view.grid_of(plan), console.width, routes)
    console.print(_styled(lines, ascii_only=console.options.ascii_only), highlight=False, soft_wrap=True)
    num_processes = sum(component.world_size for component in plan.components)
    if num_processes <= (MAX_PROCESS_ROWS if processes else FEW_PROCESSES):
        console.print()
        console.print(_processes(plan))
    elif processes:
        console.print(f"\nMore than {MAX_PROCESS_ROWS} processes; --output json lists them all.", highlight=False)


def print_memory(checked: CheckedJob, console: Console, *, arithmetic: bool = False) -> None:
    """Where memory is fullest, one line per situation, and warnings; with ``arithmetic`` every phase and where its bytes come from.

    Where the size of the model is unknown, that it is, if anybody wants to know of memory.
    """
    from rljob_api import memory

    estimate = _memory(checked)
    if estimate.shape is None:
        if arithmetic or any(group.device_memory for group in checked.job.spec.node_groups):
            console.print(f"\n[bold]Memory[/bold]: {NOT_CHECKED}", highlight=False, soft_wrap=True)
        return
    console.print("\n[bold]Memory[/bold] (estimated)", highlight=False)
    if arithmetic:
        console.print(memory.as_text(estimate).rstrip("\n"), highlight=False, markup=False, soft_wrap=True)
    else:
        for place, phase, needs, limit, used in memory.peak_rows(estimate):
            share = f" of {limit} ({used})" if limit != "?" else ""
            console.print(f"  {place}: {needs}{share} in phase {phase}", highlight=False, markup=False, soft_wrap=True)
    for warning in memory.warnings(estimate):
        console.print(f"  warning: {warning}", highlight=False, markup=False, soft_wrap=True)


def print_transport(checked: CheckedJob, console: Console) -> None:
    """Which transport weights take; nothing where nothing is synced."""
    from rljob_runtime.commands.sync_transport import sync_transport

    transport = sync_transport(checked.job.spec, checked.plan)
    if transport is not None:
        console.print(f"\n[bold]Transport of weights[/bold]: {transport}", highlight=False, soft_wrap=True)


def print_overlap(checked: CheckedJob, console: Console) -> None:
    """What a weight sync costs running responses; nothing where none are."""
    from rljob_runtime.commands.overlap_cost import overlap_cost

    cost = overlap_cost(checked.job.spec, checked.plan)
    if cost is not None:
        console.print(f"\n[bold]Overlap[/bold]: {cost}", highlight=False, soft_wrap=True)


def print_standby(checked: CheckedJob, console: Console) -> None:
    """Where processes wait to take the place of lost engines, and what they cost; nothing where there are none."""
    from rljob_api.planning.standby import standby_places
    from rljob_runtime.plan_view import ranges

    nodes: dict[str, list[int]] = {}
    for component, node in standby_places(checked.job.spec, checked.plan):
        nodes.setdefault(component, []).append(node)
    if nodes:
        where = ", ".join(f"{component} on node{'s' if len(ranks) > 1 else ''} {ranges(ranks)}" for component, ranks in nodes.items())
        what = "a standby process on each can replace a lost engine"
        console.print(
            f"\n[bold]Standby[/bold]: {where}: {what}; about 1 GiB of host memory each, no device (rollout.standbyProcesses).",
            highlight=False,
            soft_wrap=True,
        )


def _memory(checked: CheckedJob) -> MemoryEstimate:
    from rljob_api import memory

    spec = checked.job.spec
    return memory.estimate(spec, checked.plan, checked.shape or memory.shape_of(spec), checked.served)


def _memory_sections(checked: CheckedJob) -> tuple[Section, ...]:
    """The whole table of the estimate for the HTML page; nothing where the size of the model is unknown."""
    from rljob_api import memory
    from rljob_api.memory.rendering import HEADERS
    from rljob_runtime.plan_view import Section

    estimate = _memory(checked)
    if estimate.shape is None:
        return ()
    return (Section(title="Memory (estimated)", columns=HEADERS, rows=tuple(memory.as_rows(estimate))),)


def as_svg(checked: CheckedJob) -> str:
    """The picture as an SVG document.

    Raises:
        PlacementError: as :func:`print_picture`.
    """
    from rljob_runtime import plan_view

    return plan_view.svg(plan_view.grid_of(checked.plan), checked.job.metadata.name, sync_routes(checked))


def as_html(checked: CheckedJob) -> str:
    """The picture, its tables and the memory estimate as one HTML page.

    Raises:
        PlacementError: as :func:`print_picture`.
    """
    from rljob_runtime import plan_view

    name, grid = checked.job.metadata.name, plan_view.grid_of(checked.plan)
    return plan_view.page(grid, name, summary(checked), sync_routes(checked), _memory_sections(checked))


def sync_routes(checked: CheckedJob) -> tuple[Route, ...]:
    """How weights travel from every Trainer to every Rollout; nothing for components without devices.

    Raises:
        PlacementError: they cannot, in the way that spec.weightSync asks for.
    """
    from rljob_api.planning.sync_routes import chosen_backend, chosen_senders, sync_plan_of
    from rljob_runtime.plan_view import routes_of

    spec, plan = checked.job.spec, checked.plan
    engines = {component.name: component.engine for component in spec.components}
    routes: list[Route] = []
    for trainer in plan.with_role(Role.TRAINER):
        for rollout in plan.with_role(Role.ROLLOUT):
            engine = engines[rollout.name]
            if not all(process.devices for component in (trainer, rollout) for process in component.processes):
                continue
            sync = sync_plan_of(
                chosen_backend(spec, plan),
                trainer,
                rollout,
                senders=chosen_senders(spec, plan),
                broadcasts=True,
                trainer_tensor_parallel_size=spec.training.tensor_parallel_size,
                tensor_parallel_size=engine.tensor_parallel_size if engine else 1,
                pipeline_parallel_size=engine.pipeline_parallel_size if engine else 1,
            )
            routes += routes_of(sync, trainer.name, rollout.name)
    return tuple(routes)


def summary(checked: CheckedJob) -> str:
    """One line, for example ``1 node, 2 devices, Disaggregated; actor_train 1, actor_infer 1, reward 1; 300 steps``."""
    plan = checked.plan
    num_devices = sum(node.num_devices for node in plan.nodes)
    workers = ", ".join(f"{component.name} {component.world_size}" for component in plan.components)
    steps = checked.job.spec.training.steps
    what = _count(steps, "step") if steps else "validation alone"
    return f"{_count(len(plan.nodes), 'node')}, {_count(num_devices, 'device')}, {plan.mode}; {workers}; {what}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _camel(value: Any) -> Any:
    if isinstance(value, PlannedProcess):  # a tuple to asdict
        return _camel(value._asdict())
    if isinstance(value, dict):
        return {_camel_key(key): _camel(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_camel(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _camel_key(key: str) -> str:
    head, *tail = key.split("_")
    return head + "".join(word.capitalize() for word in tail)


_ASCII = str.maketrans({"·": ".", "─": "-", "×": "x", "→": ">", "…": "~"})
"""For terminals that cannot show more; one character each, so that columns stay in line."""


def _styled(lines: Iterable[Line], *, ascii_only: bool) -> Text:
    """The lines with colors."""
    from rich.style import Style
    from rich.text import Text

    from rljob_runtime.plan_view import Tone, color

    styles = {Tone.PLAIN: Style(), Tone.DIM: Style(dim=True), Tone.BOLD: Style(bold=True)}
    rows: list[Text] = []
    for line in lines:
        row = Text()
        for span in line:
            fill = color(span.component)
            style = Style(color=fill.ink, bgcolor=fill.fill) if span.tone is Tone.COMPONENT else styles[span.tone]
            row.append(span.text.translate(_ASCII) if ascii_only else span.text, style)
        if line and line[-1].tone is not Tone.COMPONENT:  # else the spaces are part of a colored box
            row.rstrip()
        rows.append(row)
    return Text("\n").join(rows)


def _processes(plan: Plan) -> Table:
    from rich import box
    from rich.table import Table

    columns = ("worker", "node", "runs on", "device ranks", "local rank")
    table = Table(*columns, title="Processes", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for component in plan.components:
        for row in _process_rows(plan, component):
            table.add_row(*row)
    return table


def _process_rows(plan: Plan, component: PlannedComponent) -> Iterable[tuple[str, ...]]:
    from rljob_runtime.plan_view import place, ranges, units

    for process in component.processes:
        node = plan.nodes[process.node_rank]
        yield (
            f"{component.name}-{process.rank}",
            f"{node.rank} ({node.group}[{node.index}])",
            units(*place(process)),
            ranges(process.devices),
            f"{process.local_rank} of {process.local_world_size}",
        )
