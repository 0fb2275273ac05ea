"""Where the components of a job run, given in RLinf's notation: the placement section of a cluster.

::

    {"actor,rollout": "0-7", "env": {"node_group": "robots", "placement": "0-1:0-3"}}
        ── read, count, check ──> a strategy per component ──> placements of all components, at once

:class:`ComponentPlacement` takes any placement that the grammar allows; the classes of
:mod:`rljob_convert.placement.model_parallel` and :mod:`rljob_convert.placement.multi_agent` add rules and their own strategies.

Order of checks: what RLinf 0.3.0 checks while it reads the section, component by component; then the placements (RLinf: when
a component is launched); then what only RLJob refuses. So the first violated check is what RLinf reports, where it reports one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from rljob_api.errors import PlacementError, did_you_mean, show
from rljob_api.placement.ranks import Evaluation, evaluate
from rljob_api.placement.topology import Selection, Topology
from rljob_convert.placement.metadata import Placement
from rljob_convert.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PlacementStrategy

LONG_FORM_KEYS = ("node_group", "placement")
"""Keys of a component's placement that is written as a map."""
MAX_TOTAL_PROCESSES = 1_048_576
"""Processes that all components may have together; names of one key share theirs."""
_MAX_NUMBER = 10**9
_Value = TypeVar("_Value")


class PlacementMode(StrEnum):
    """How the components of a job share units."""

    COLLOCATED = "COLLOCATED"
    """Trainer and engines have the same units, one at a time."""
    DISAGGREGATED = "DISAGGREGATED"
    """Every model has units of its own."""
    HYBRID = "HYBRID"
    """Any component on any units."""
    AUTO = "AUTO"
    """Disaggregated at first; units move between components while the job runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRanks:
    """What one key of the placement section says; the names in the key share it."""

    key: str
    """As written, for messages."""
    components: tuple[str, ...]
    """Names in the key."""
    labels: tuple[str, ...]
    """Node groups as written; empty means the whole cluster."""
    selection: Selection
    """What the ranks count."""
    evaluation: Evaluation
    """Units and processes."""
    refused: PlacementError | None
    """Why RLJob does not take it although RLinf does (D7, D9, D20)."""

    @property
    def first_rank(self) -> int:
        """Lowest unit rank."""
        return self.evaluation.parts[0].units.start

    @property
    def last_rank(self) -> int:
        """Highest unit rank."""
        return self.evaluation.parts[-1].units[-1]

    @property
    def num_units(self) -> int:
        """Selected units."""
        return self.evaluation.num_units


class ComponentPlacement:
    """The placement of all components; everything is computed, and refused, at construction."""

    def __init__(self, component_placement: Mapping[str, object], topology: Topology, *, max_processes: int = MAX_TOTAL_PROCESSES) -> None:
        """Read the placement section and place every component.

        Args:
            component_placement: rank map (short form) or ``{node_group, placement}`` (long form) by component names, as decoded from
                YAML or JSON; ``node_group`` is a label, labels with commas, or a list of labels.
            topology: what there is to place on.
            max_processes: processes that all components may have together.

        Raises:
            PlacementError: any check of the grammar (G, P, S, C), of a strategy (F, V), or D6 to D9, D20; subclasses add M, A, B, D.
        """
        self._topology = topology
        self._ranks: dict[str, ComponentRanks] = {}
        self._strategies: dict[str, PlacementStrategy] = {}
        self._differences: list[PlacementError] = []
        entries: list[ComponentRanks] = []
        for key, value in component_placement.items():
            try:
                entry = _read(str(key), value, topology)
                max_processes -= entry.evaluation.num_processes
                if max_processes < 0:
                    raise PlacementError("S2", "with this, the components have too many processes together", "use fewer")
                self._add(entry)
            except PlacementError as error:
                raise located(error, str(key)) from None
            entries.append(entry)
            if entry.refused is not None:
                self._refuse_at_the_end(located(entry.refused, entry.key))
        self._arrange()
        self._placements = self._place()
        for entry in entries:
            if len(entry.labels) > 1:
                self._check_groups(entry)
        if self._differences:
            raise self._differences[0]

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components, in the order of the section."""
        return tuple(self._ranks)

    @property
    def strategies(self) -> Mapping[str, PlacementStrategy]:
        """Strategies by component; a subclass may have added names."""
        return MappingProxyType(self._strategies)

    @property
    def placement_mode(self) -> PlacementMode | None:
        """How components share units; None where nothing is said about it."""
        return None

    @property
    def topology(self) -> Topology:
        """What the components are placed on."""
        return self._topology

    def get_component_ranks(self, component: str) -> ComponentRanks:
        """What the section says about a component: groups, units, processes.

        Raises:
            PlacementError: there is no such component.
        """
        return _known(component, self._ranks)

    def get_hardware_ranks(self, component: str) -> tuple[int, ...]:
        """Unit ranks of a component within its node groups, ascending; node ranks where it counts nodes.

        Raises:
            PlacementError: there is no such component.
        """
        return tuple(rank for part in self.get_component_ranks(component).evaluation.parts for rank in part.units)

    def get_rank_map(self, component: str) -> tuple[tuple[range, range], ...]:
        """Unit ranks and process ranks of every part of a component's rank map.

        Raises:
            PlacementError: there is no such component.
        """
        return tuple((part.units, part.processes) for part in self.get_component_ranks(component).evaluation.parts)

    def get_world_size(self, component: str) -> int:
        """Processes that the rank map of a component gives.

        As in RLinf, an engine of several units that takes its size from the model's configuration counts with all of its units;
        the number of processes is ``len(get_placement(component))``.

        Raises:
            PlacementError: there is no such component.
        """
        return self.get_component_ranks(component).evaluation.num_processes

    def get_strategy(self, component: str) -> PlacementStrategy:
        """The strategy that places a component; names of one key share it.

        Raises:
            PlacementError: there is no such component.
        """
        return _known(component, self._strategies)

    def get_placement(self, component: str, isolate_accelerator: bool = True) -> tuple[Placement, ...]:
        """The placement of every process of a component, by rank.

        Raises:
            PlacementError: there is no such component.
        """
        placements = _known(component, self._placements)
        return placements if isolate_accelerator else self._strategies[component].get_placement(self._topology, isolate_accelerator=False)

    def _arrange(self) -> None:
        """Check, and replace strategies, once every component is known; for subclasses."""

    def _refuse_at_the_end(self, error: PlacementError) -> None:
        """Note something that RLinf takes and RLJob does not: raised when RLinf's own checks have passed."""
        self._differences.append(error)

    def _add(self, entry: ComponentRanks) -> None:
        strategy = _strategy(entry)
        for name in entry.components:
            if name in self._ranks:
                raise _placed_twice(name)
            self._ranks[name] = entry
            self._strategies[name] = strategy

    def _check_groups(self, entry: ComponentRanks) -> None:
        try:
            self._topology.select(entry.labels)
        except PlacementError as error:
            raise located(error, entry.key) from None

    def _place(self) -> dict[str, tuple[Placement, ...]]:
        """Placements by component; a strategy that components share is asked once."""
        by_strategy: dict[int, tuple[Placement, ...]] = {}
        for name, strategy in self._strategies.items():
            if id(strategy) not in by_strategy:
                try:
                    by_strategy[id(strategy)] = strategy.get_placement(self._topology)
                except PlacementError as error:
                    raise located(error, name) from None
        return {name: by_strategy[id(strategy)] for name, strategy in self._strategies.items()}


class HybridComponentPlacement(ComponentPlacement):
    """Any component on any units: for agents with environments, robots and for supervised training."""

    @property
    def placement_mode(self) -> PlacementMode:
        """Always hybrid."""
        return PlacementMode.HYBRID


def survey(component_placement: Mapping[str, object], topology: Topology) -> Iterator[ComponentRanks]:
    """What every key says, in their order, up to the first wrong one: to know how large a placement is before it is computed."""
    for key, value in component_placement.items():
        try:
            yield _read(str(key), value, topology)
        except PlacementError:
            return


def check_section(component_placement: Mapping[str, object], topology: Topology) -> None:
    """Check names and rank maps only, as far as RLinf does before it looks at anything else of a run's configuration.

    Raises:
        PlacementError: G, P, S or C.
    """
    names: set[str] = set()
    for key, value in component_placement.items():
        try:
            entry = _read(str(key), value, topology)
            _strategy(entry)
            for name in entry.components:
                if name in names:
                    raise _placed_twice(name)
                names.add(name)
        except PlacementError as error:
            raise located(error, str(key)) from None


def _placed_twice(name: str) -> PlacementError:
    return PlacementError("C1", f"component {show(name)} is placed twice", "name every component once")


def located(error: PlacementError, key: str) -> PlacementError:
    """The same error with the key of the placement section that it is about."""
    return PlacementError(error.check, f"component_placement[{show(key)}]: {error.problem}", error.remedy)


def _known(component: str, by_name: Mapping[str, _Value]) -> _Value:
    if component not in by_name:
        remedy = did_you_mean(component, by_name) or f"use one of {', '.join(by_name) or 'none'}"
        raise PlacementError("C1", f"no component is called {show(component)}", remedy)
    return by_name[component]


def _read(key: str, value: object, topology: Topology) -> ComponentRanks:
    """One key and its value against what there is."""
    refused = None
    labels: tuple[str, ...] = ()
    placement = value
    if isinstance(value, Mapping):
        labels = _labels(value["node_group"]) if "node_group" in value else ()
        selection = topology.select(labels, together=False)
        unknown = next((name for name in value if name not in LONG_FORM_KEYS), None)
        if "placement" not in value:
            near = None if unknown is None else did_you_mean(str(unknown), ["placement"])
            raise PlacementError("G2", "placement is missing", near or "add placement with the rank map")
        if unknown is not None:
            remedy = did_you_mean(str(unknown), LONG_FORM_KEYS) or f"use {' and '.join(LONG_FORM_KEYS)}"
            refused = PlacementError("D20", f"unknown key {show(str(unknown))}", remedy)
        placement = value["placement"]
    else:
        selection = topology.select((), together=False)
    evaluation = evaluate(_rank_text(placement), selection.num_units, selection.unit_name)
    names = tuple(name.strip() for name in key.split(","))
    if "" in names:
        refused = refused or PlacementError("D20", "a component without a name", "remove the comma too many, or name the component")
    return ComponentRanks(
        key=key, components=names, labels=labels, selection=selection, evaluation=evaluation, refused=refused or evaluation.refused
    )


def _labels(value: object) -> tuple[str, ...]:
    """Labels out of text with commas, one label, or a list; a label may be a number (RLinf's documentation has ``4090``)."""
    if isinstance(value, str):
        return tuple(label.strip() for label in value.split(","))
    listed: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not listed or not all(isinstance(label, str | int) and not isinstance(label, bool) for label in listed):
        raise PlacementError("G1", "node_group is not a label", "write a label, labels with commas, or a list of labels")
    return tuple(_number_text(label) if isinstance(label, int) else str(label).strip() for label in listed)


def _rank_text(value: object) -> str:
    """A rank map as text; YAML reads ``3`` as a number."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return _number_text(value)
    raise PlacementError("P2", f"the rank map is not text but {_kind(value)}", 'write it in quotes, for example "0-3"')


def _number_text(value: int) -> str:
    # Python refuses to write integers of more than 4300 digits.
    return str(value) if abs(value) < _MAX_NUMBER else ("-" if value < 0 else "") + str(_MAX_NUMBER)


def _kind(value: object) -> str:
    return "empty" if value is None else type(value).__name__


def _strategy(entry: ComponentRanks) -> PlacementStrategy:
    """What places the processes of a rank map."""
    processes = entry.evaluation.split()
    if not _counts_nodes(entry):
        return FlexiblePlacementStrategy(processes, entry.labels or None)
    for rank, nodes in enumerate(processes):
        if len(nodes) > 1:
            raise PlacementError(
                "S1",
                f"process {rank} has {len(nodes)} nodes, {nodes[0]} to {nodes[-1]}",
                "give every process one node: as many processes as nodes, or more",
            )
    return NodePlacementStrategy([nodes[0] for nodes in processes], entry.labels or None)


def _counts_nodes(entry: ComponentRanks) -> bool:
    """Whether any of the groups counts nodes; such groups are placed on together with each other only (D8)."""
    return entry.selection.counts_nodes or any(segment.hardware_type is None for segment in entry.selection.segments)
