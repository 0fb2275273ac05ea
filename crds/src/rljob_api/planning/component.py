"""Places the processes of one component: one of the grammars gives ranks, the role says how many devices a process has.

| given           | ranks count                        | processes                                                           |
|-----------------|------------------------------------|---------------------------------------------------------------------|
| ranks           | what the groups offer, else nodes  | one per unit, or per engine; as written where process ranks follow  |
| deviceMapping   | devices                            | consecutive slices in written order                                 |
| workers         | -                                  | round the nodes, without devices                                    |

A Trainer, Reference or Critic process has one device of its own. A Rollout process has its engine's devices; an engine of one
device may share it with others. Rewards and environments run on nodes, or on hardware that is no accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from operator import attrgetter

from rljob_api.errors import FieldError, PlacementError, counted, show
from rljob_api.placement import device_mapping, ranks
from rljob_api.placement.assignment import NodeShare, shares, shifted, strided
from rljob_api.placement.topology import ACCELERATOR, Selection, Topology
from rljob_api.planning.plan import PlannedNode, PlannedProcess
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import Component, EngineType, PlacementChoice
from rljob_api.v1alpha1.rljob import RLJobSpec

MAX_PROCESSES = 262_144
"""Processes a job may have, all components together."""
SPLIT_CHECK = "F6"
"""A process on two nodes."""
ACROSS_NODES = {
    EngineType.VLLM: "vLLM itself can span nodes, with its Ray executor",
    EngineType.SGLANG: "SGLang itself can span nodes, with one launch on each",
}
"""Engines that can do more than RLJob uses; the documentation of vLLM ("Parallelism and Scaling") and SGLang ("Multi-Node Deployment")."""
GROUP_CHECKS = frozenset({"G1", "D6", "D8", "V3"})
"""Checks that are about the choice of node groups."""


def engine_size(component: Component) -> int:
    """Devices of one process: tensor times pipeline parallel size of a Rollout's engine, else 1."""
    if TRAITS[component.role].has_engine and component.engine is not None:
        return component.engine.num_devices
    return 1


class ComponentPlanner:
    """Places the processes of one component; used once."""

    def __init__(
        self, spec: RLJobSpec, index: int, topology: Topology, nodes: Sequence[PlannedNode], trainer: Set[int], max_processes: int
    ) -> None:
        """``trainer``: the Trainer's devices, empty while it is not placed. ``max_processes``: what other components left."""
        self._spec = spec
        self._component = spec.components[index]
        self._traits = TRAITS[self._component.role]
        self._path = f"spec.components[{index}].placement"
        self._topology = topology
        self._nodes = nodes
        self._trainer = trainer
        self._max_processes = max_processes
        self._size = engine_size(self._component)
        self.too_many = False
        """Whether the job's processes are used up: then the other components are not worth planning."""

    def run(self) -> tuple[PlannedProcess, ...] | FieldError:
        """The processes by rank, or the first problem of this component."""
        field, text = "", ""
        try:
            field, text = self._field()
            if field == "workers":
                placements = self._round_the_nodes(int(text))
            elif field == "deviceMapping":
                placements = self._mapped(text)
            else:
                placements = self._ranked(text)
            return self._processes(placements)
        except PlacementError as error:
            return self._field_error(error, field, text)

    def _field_error(self, error: PlacementError, field: str, text: str) -> FieldError:
        value: object = text or None
        if error.check in GROUP_CHECKS:
            names = self._component.placement.node_groups
            unknown = next((index for index, name in enumerate(names) if name not in self._topology.groups), None)
            field = "nodeGroups" if unknown is None else f"nodeGroups[{unknown}]"
            value = list(names) if unknown is None else names[unknown]
        if isinstance(error, _AtField):
            field, value = error.field, error.value
        path = f"{self._path}.{field}" if field else self._path
        problem, remedy = error.problem, error.remedy
        if error.check == SPLIT_CHECK and self._traits.has_engine:
            engine = self._component.engine.type if self._component.engine else EngineType.VLLM
            problem += "; RLJob runs an engine as one process on one node"
            if engine in ACROSS_NODES:
                problem += f", although {ACROSS_NODES[engine]}"
            remedy += ", or use smaller engines and more of them, which are data parallel"
        return FieldError(path=path, value=None if value is None else show(value), problem=problem, remedy=remedy)

    def _field(self) -> tuple[str, str]:
        """Which of the three placement fields is used, and its text."""
        placement, role = self._component.placement, self._component.role
        given = {"ranks": placement.ranks, "deviceMapping": placement.device_mapping, "workers": placement.workers}
        used = [name for name, value in given.items() if value is not None]
        if placement.mode is PlacementChoice.AUTO:
            raise PlacementError("-", "is chosen by the planner, which found no choice", "give ranks")
        if len(used) != 1:
            problem = f"gives {' and '.join(used)} at the same time" if used else "says nothing about where to run"
            raise PlacementError("-", problem, "give exactly one of ranks, deviceMapping and workers, or mode: Auto")
        if used[0] == "workers" and not self._traits.takes_workers:
            raise _AtField(
                "workers", placement.workers, f"a {role} needs devices, workers are CPU-only", "give ranks or deviceMapping instead"
            )
        self._check_devices_per_worker(used[0])
        return used[0], str(given[used[0]])

    def _check_devices_per_worker(self, used: str) -> None:
        stated = self._component.placement.devices_per_worker
        if stated is None:
            return
        if used != "deviceMapping":
            raise _AtField("devicesPerWorker", stated, f"has no meaning together with {used}", "remove it, or use deviceMapping")
        if stated != self._size:
            problem = f"differs from {self._size}, {self._size_source()}"
            raise _AtField("devicesPerWorker", stated, problem, f"write {self._size} or leave it out")

    def _size_source(self) -> str:
        """Where the devices of one process come from, for messages."""
        if self._traits.has_engine:
            return "engine.tensorParallelSize * engine.pipelineParallelSize"
        return f"what one {self._component.role} process uses"

    def _round_the_nodes(self, count: int) -> Iterable[NodeShare]:
        """CPU processes, one node after the other."""
        nodes = self._topology.count_nodes(self._component.placement.node_groups, "G1")
        self._check_number(count)
        return self._place(nodes, [(rank % nodes.num_units,) for rank in range(count)], keep_order=True)

    def _mapped(self, text: str) -> Iterable[NodeShare]:
        """ROLL's grammar: every process has the next slice of the list."""
        selection = self._devices()
        chosen = device_mapping.parse(text, selection.num_units)
        return self._place(selection, self._slices(chosen), keep_order=True)

    def _ranked(self, text: str) -> Iterable[NodeShare]:
        """RLinf's grammar."""
        if self._traits.takes_workers:
            selection = self._topology.select(self._component.placement.node_groups)
            return self._place(selection, ranks.processes(text, selection.num_units, selection.unit_name))
        selection = self._devices()
        written = ranks.checked(text, selection.num_units, "device")
        if written.gives_processes:
            as_written = written.split()
            self._check_sizes(as_written)
            return self._place(selection, as_written)
        return self._place(selection, self._engines(selection, [unit for part in written.parts for unit in part.units]))

    def _place(self, selection: Selection, processes: Sequence[Sequence[int]], *, keep_order: bool = False) -> Iterable[NodeShare]:
        self._check_number(len(processes))
        return shares(selection, processes, keep_order=keep_order)

    def _check_number(self, count: int) -> None:
        if count > self._max_processes:
            self.too_many = True
            raise PlacementError(
                "S2",
                f"asks for {count} processes, but a job has at most {MAX_PROCESSES}, of which {self._max_processes} are left",
                "use fewer workers or devices",
            )

    def _devices(self) -> Selection:
        """The devices of the chosen groups, in the order in which the placement names the groups."""
        selection = self._topology.select(self._component.placement.node_groups)
        if any(kind != ACCELERATOR for kind in selection.hardware_types) or selection.counts_nodes:
            role = self._component.role
            raise PlacementError(
                "G1" if self._component.placement.node_groups else "P5",
                f"a {role} needs devices, but {', '.join(selection.labels)} offers {selection.unit_name}s",
                "choose groups with devices, or set devicesPerNode",
            )
        return selection

    def _check_sizes(self, processes: Sequence[Sequence[int]]) -> None:
        """Process ranks must agree with what a process of this role has."""
        for rank, units in enumerate(processes):
            if len(units) != self._size:
                raise PlacementError(
                    "D3",
                    f"gives process {rank} {counted(len(units), 'device')}, which differs from {self._size}, {self._size_source()}",
                    "leave the process ranks out, or let them agree",
                )
        held = Counter(unit for units in processes for unit in units)
        shared = next((unit for unit, count in held.items() if count > 1), None)
        if shared is not None and not self._traits.has_engine:
            role = self._component.role
            problem = f"puts {held[shared]} processes on device {shared}, but the processes of a {role} compute at the same time"
            raise PlacementError("D3", problem, "give every process a device of its own")

    def _engines(self, selection: Selection, units: Sequence[int]) -> Sequence[Sequence[int]]:
        """Devices of every engine; strided where that puts engine shards on the devices of the trainer shards that feed them.

        Not where a group of the trainer spans nodes, because then strided engines would too.
        """
        stride = self._stride(selection, units)
        if stride > 1:
            engines = [[units[position] for position in process] for process in strided(0, len(units) - 1, self._size, stride)]
            if all(selection.locate(min(engine)) is selection.locate(max(engine)) for engine in engines):
                return engines
        return self._slices(units)

    def _stride(self, selection: Selection, units: Sequence[int]) -> int:
        """1, or trainer tensor parallel size / engine size where both use the same devices (RLinf, collocated mode)."""
        tensor = self._spec.training.tensor_parallel_size
        if not self._traits.has_engine or tensor <= self._size or tensor % self._size or len(units) % tensor:
            return 1
        devices = {self._global_device(selection, unit) for unit in units}
        return tensor // self._size if devices == self._trainer else 1

    def _global_device(self, selection: Selection, unit: int) -> int:
        segment = selection.locate(unit)
        return self._nodes[segment.node.rank].first_device + unit - segment.first

    def _slices(self, chosen: Sequence[int]) -> Sequence[Sequence[int]]:
        size = self._size
        if len(chosen) % size:
            low = len(chosen) // size * size
            near = f"{low} or {low + size}" if low else f"{size}"
            raise PlacementError(
                "P14",
                f"selects {counted(len(chosen), 'device')}, which the engine's {size} devices per process do not divide",
                f"select {near} devices, or change engine.tensorParallelSize",
            )
        return list(zip(*[iter(chosen)] * size, strict=True))

    def _processes(self, nodes: Iterable[NodeShare]) -> tuple[PlannedProcess, ...]:
        processes: list[PlannedProcess] = []
        same: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Nodes are alike: their processes can share these."""
        for share in nodes:
            node, local_world_size = self._nodes[share.node.rank], len(share.seats)
            for local_rank, (rank, segment, units) in enumerate(share.seats):
                kind = segment.hardware_type
                own = shifted(units, -segment.first) if kind is not None else ()
                own = same.setdefault(own, own)
                on_devices = kind == ACCELERATOR
                processes.append(
                    PlannedProcess(  # by position: names take twice as long
                        rank,
                        node.rank,
                        own if on_devices else (),
                        shifted(own, node.first_device) if on_devices else (),
                        local_rank,
                        local_world_size,
                        segment.group,
                        share.index,
                        kind,
                        () if on_devices else own,
                    )
                )
        processes.sort(key=attrgetter("rank"))
        if not self._traits.has_engine and len({node.device_resource for node in self._nodes if node.num_devices}) > 1:
            self._check_one_device_type(processes)
        return tuple(processes)

    def _check_one_device_type(self, processes: Iterable[PlannedProcess]) -> None:
        types: dict[str, int] = {}
        for process in processes:
            if process.devices:
                types.setdefault(self._nodes[process.node_rank].device_resource, process.node_rank)
        if len(types) > 1:
            what = " and ".join(f"{kind} (node {rank})" for kind, rank in types.items())
            raise PlacementError(
                "F8",
                f"mixes {what}; the processes of a {self._component.role} exchange tensors, which needs one device type",
                "use one kind of device",
            )


class _AtField(PlacementError):
    """A problem of another field of the placement than the one that selects."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__("-", problem, remedy)
        self.field = field
        self.value = value
