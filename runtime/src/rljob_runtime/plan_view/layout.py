"""What a picture shows of a grid: panels (nodes) with columns (devices) and bands (processes), the same for terminal and SVG.

A fold of ``FOLD_FROM`` nodes or more is drawn once and described in a note. A node with more devices than columns is compressed:
neighboring devices that the same components use become one column. Panels beyond the budget are counted, not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rljob_api.placement.topology import ACCELERATOR
from rljob_runtime.plan_view.grid import Fold, Grid, GridComponent, GridGroup
from rljob_runtime.plan_view.words import count, listing, ranges

CPU = "cpu"
"""Kind of the column that counts CPU processes."""
FOLD_FROM = 4
"""Nodes from which on a fold is drawn once."""
MAX_COLUMNS = 32
"""Columns of a kind in a panel."""
_LABEL_CHARS = 9
_LIST_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One device, several that are used alike, one robot, or the CPU processes of a node."""

    kind: str
    """``Accelerator``, another hardware type, or ``cpu``."""
    first: int
    """Index on the node of its first unit."""
    last: int
    """Index of its last one, included."""

    @property
    def label(self) -> str:
        """Text above the column."""
        if self.kind == CPU:
            return "cpu"
        text = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return text if self.kind == ACCELERATOR else f"{self.kind[:10]} {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Processes of one component on neighboring columns."""

    start: int
    """Index of its first column in the panel."""
    end: int
    """Index of its last one, included."""
    ranks: tuple[int, ...]
    """Process ranks, ascending."""
    label: str
    """The ranks, or how many there are when that is too long or they are CPU processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One node."""

    node_rank: int
    is_folded: bool
    """Whether it stands for further nodes."""
    columns: tuple[Column, ...]
    bands: dict[int, tuple[Band, ...]]
    """By component, only those that are on the node."""
    free: frozenset[int]
    """Columns that no component uses."""
    first_device: int
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One node group."""

    group: GridGroup
    title: str
    """For example ``2 nodes × 8 devices (nvidia.com/gpu), 4 of 16 free``."""
    components: tuple[int, ...]
    """Those that are on the drawn nodes, in spec order."""
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    """What is folded or left out."""


def blocks(grid: Grid, max_cells: int) -> tuple[Block, ...]:
    """One block per node group, with at most about ``max_cells`` bands and columns in all; the first panel is always there."""
    max_columns = max(4, min(MAX_COLUMNS, max_cells // max(len(grid.components), 1)))
    budget = max_cells
    result: list[Block] = []
    for group in grid.groups:
        panels: list[Panel] = []
        num_left_out = 0
        for fold, position in _drawn(group):
            panel = _panel(fold, position, max_columns)
            cost = sum(map(len, panel.bands.values())) + len(panel.columns)
            if cost > budget and (panels or result):
                num_left_out += len(fold.nodes) if _is_folded(fold) else 1
                continue
            budget -= cost
            panels.append(panel)
        shown = {panel.node_rank for panel in panels}
        notes = [_fold_note(fold, grid.components) for fold in group.folds if _is_folded(fold) and fold.nodes[0] in shown]
        if num_left_out:
            notes.append(f"{count(num_left_out, 'more node')} in other patterns; --output json lists every process")
        result.append(
            Block(
                group=group,
                title=_title(group),
                components=tuple(sorted({component for panel in panels for component in panel.bands})),
                panels=tuple(panels),
                notes=tuple(notes),
            )
        )
    return tuple(result)


def component_facts(component: GridComponent) -> str:
    """For example ``4 processes of 2 devices, devices 0-7, shared with actor_train``."""
    text = count(component.num_processes, "CPU process" if component.unit == "CPU" else "process")
    if component.unit != "CPU":
        low, high = component.units_per_process[0], component.units_per_process[-1]
        text += f" of {count(high, component.unit) if low == high else f'{low} to {high} {component.unit}s'}"
    if component.devices:
        devices = ranges(component.devices)
        if len(devices) > _LIST_CHARS:
            text += f", on {count(len(component.devices), 'device')}"
        else:
            text += f", device{'' if len(component.devices) == 1 else 's'} {devices}"
    if component.shares_devices_with:
        text += f", shared with {listing(component.shares_devices_with)}"
    return text


def _is_folded(fold: Fold) -> bool:
    return len(fold.nodes) >= FOLD_FROM


def _drawn(group: GridGroup) -> list[tuple[Fold, int]]:
    """The nodes to draw, by rank: of every fold the first, or all when they are few."""
    drawn = [(fold, position) for fold in group.folds for position in range(1 if _is_folded(fold) else len(fold.nodes))]
    return sorted(drawn, key=lambda item: item[0].nodes[item[1]])


def _title(group: GridGroup) -> str:
    units = []
    if group.num_devices:
        of_node = sorted({fold.num_devices for fold in group.folds})
        each = str(of_node[0]) if len(of_node) == 1 else f"{of_node[0]}-{of_node[-1]}"
        units.append(f"{each} device{'' if each == '1' else 's'} ({group.device_resource})")
    units += dict.fromkeys(f"{number} {kind}" for fold in group.folds for kind, number in fold.hardware)
    text = " × ".join((count(group.num_nodes, "node"), *filter(None, (" + ".join(units),))))
    return text + (f", {group.num_free:,} of {group.num_devices:,} free" if group.num_free else "")


def _fold_note(fold: Fold, components: Sequence[GridComponent]) -> str:
    rest = fold.nodes[1:]
    where = f"{rest[0]}-{rest[-1]}" if rest.step == 1 else f"{rest[0]}, {rest[1]} .. {rest[-1]}"
    steps = fold.rank_steps
    if not steps:
        return f"nodes {where}: the same, no process"
    if len(set(steps.values())) == 1:
        growth = f"{next(iter(steps.values())):+d}{' each' if len(steps) > 1 else ''}"
    else:
        growth = ", ".join(f"{components[component].name} {step:+d}" for component, step in steps.items())
    return f"nodes {where}: same pattern, process ranks {growth} per node"


def _panel(fold: Fold, position: int, max_columns: int) -> Panel:
    users: dict[tuple[str, int], dict[int, list[int]]] = {}
    """Unit -> component -> process ranks on it."""
    cpu: dict[int, list[int]] = {}
    for seat in fold.seats:
        rank = fold.rank(seat, position)
        if seat.kind is None:
            cpu.setdefault(seat.component, []).append(rank)
        for place in seat.places:
            users.setdefault((seat.kind or CPU, place), {}).setdefault(seat.component, []).append(rank)
    columns, cells = _columns(fold, users, max_columns)
    if cpu:
        columns.append(Column(kind=CPU, first=0, last=0))
        cells.append(cpu)
    present = sorted({component for cell in cells for component in cell})
    return Panel(
        node_rank=fold.nodes[position],
        is_folded=_is_folded(fold),
        columns=tuple(columns),
        bands={component: tuple(_bands(component, columns, cells)) for component in present},
        free=frozenset(index for index, cell in enumerate(cells) if not cell),
        first_device=fold.first_device + (fold.nodes[position] - fold.nodes[0]) * fold.num_devices,
        num_devices=fold.num_devices,
    )


_Cell = dict[int, list[int]]
"""Component -> process ranks in a column."""


def _columns(fold: Fold, users: dict[tuple[str, int], _Cell], max_columns: int) -> tuple[list[Column], list[_Cell]]:
    sizes = {ACCELERATOR: fold.num_devices, **dict(fold.hardware)}
    for kind, place in users:
        sizes[kind] = max(sizes.get(kind, 0), place + 1)
    columns: list[Column] = []
    cells: list[_Cell] = []
    for kind, size in sizes.items():
        units: list[_Cell] = [users.get((kind, place), {}) for place in range(size)]
        for run in _runs(units, max_columns):
            columns.append(Column(kind=kind, first=run[0], last=run[-1]))
            cells.append(_merged(units[place] for place in run))
    return columns, cells


def _runs(units: Sequence[_Cell], max_columns: int) -> list[range]:
    """Every unit on its own if that fits; else units with the same users together, and the last columns as one."""
    if len(units) <= max_columns:
        return [range(place, place + 1) for place in range(len(units))]
    runs: list[range] = []
    for _, same in groupby(range(len(units)), key=lambda place: units[place].keys()):
        places = list(same)
        runs.append(range(places[0], places[-1] + 1))
    if len(runs) > max_columns:
        runs[max_columns - 1 :] = [range(runs[max_columns - 1].start, len(units))]
    return runs


def _merged(cells: Iterable[_Cell]) -> _Cell:
    merged: dict[int, dict[int, None]] = {}
    for cell in cells:
        for component, ranks in cell.items():
            merged.setdefault(component, {}).update(dict.fromkeys(ranks))
    return {component: sorted(ranks) for component, ranks in merged.items()}


def _bands(component: int, columns: Sequence[Column], cells: Sequence[_Cell]) -> Iterable[Band]:
    """Bands of one component; equal neighbors of a kind are joined."""
    looks = [(column.kind, tuple(cell.get(component, ()))) for column, cell in zip(columns, cells, strict=True)]
    start = 0
    for (kind, ranks), group in groupby(looks):
        end = start + len(list(group)) - 1
        if ranks:
            yield Band(start=start, end=end, ranks=ranks, label=_label(kind, ranks))
        start = end + 1


def _label(kind: str, ranks: tuple[int, ...]) -> str:
    text = ranges(ranks)
    return f"×{len(ranks)}" if kind == CPU or len(text) > _LABEL_CHARS else text
