"""Which processes are together on a device or a node, by distinct situation: thousands of devices come down to a few.

Time grows with the number of processes and their devices, memory with that of devices and nodes: one may have a hundred thousand processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_api.memory.known_shapes import Served
from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.roles import TRAITS

Resident = tuple[int, bool]
"""Index of a component, and whether the process is its rank 0 (of a Trainer, which then gathers weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Equal pools."""

    group: str
    residents: tuple[tuple[Resident, int], ...]
    """Who is in one of them, and how many processes (of an engine: devices); ordered."""
    count: int
    first: int
    """Lowest rank of these pools."""


class _Chain:
    """Maps each pool to an interned set of residents, one number per distinct set."""

    def __init__(self) -> None:
        self._sets: list[tuple[str, dict[Resident, int]]] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._next: dict[tuple[int, Resident, int], int] = {}

    def start(self, group: str) -> int:
        """The empty set of a group."""
        return self._intern(group, {})

    def add(self, number: int, resident: Resident, count: int) -> int:
        """The set with so many more processes, of a kind that it does not have yet."""
        found = self._next.get((number, resident, count))
        if found is None:
            group, members = self._sets[number]
            found = self._next[number, resident, count] = self._intern(group, members | {resident: count})
        return found

    def add_all(self, pools: dict[int, int], resident: Resident, counts: Mapping[int, int]) -> None:
        """Move pools to the sets with more processes, whose numbers are given by pool."""
        for pool, count in counts.items():
            pools[pool] = self.add(pools[pool], resident, count)

    def situations(self, pools: dict[int, int]) -> Iterator[Situation]:
        """Pools with equal sets, in order of their first pool."""
        counts = Counter(pools.values())
        first: dict[int, int] = {}
        for rank in sorted(pools):
            first.setdefault(pools[rank], rank)
        for number, rank in first.items():
            group, members = self._sets[number]
            yield Situation(group=group, residents=tuple(sorted(members.items())), count=counts[number], first=rank)

    def _intern(self, group: str, members: dict[Resident, int]) -> int:
        key = (group, *sorted(members.items()))
        number = self._numbers.setdefault(key, len(self._sets))
        if number == len(self._sets):
            self._sets.append((group, members))
        return number


def situations(plan: Plan, served: Served) -> tuple[list[Situation], list[Situation]]:
    """(of devices, of nodes) that hold a model of known size: the job's, or one of ``served``, by component."""

    def is_known(component: PlannedComponent) -> bool:
        traits = TRAITS[component.role]
        return traits.holds_model and (not traits.has_own_model or component.name in served)

    return _situations(plan, is_known)


def engine_situations(plan: Plan) -> list[Situation]:
    """Of devices that hold engines, whether the size of their models is known or not."""
    return _situations(plan, lambda component: TRAITS[component.role].has_engine)[0]


def _situations(plan: Plan, counts: Callable[[PlannedComponent], bool]) -> tuple[list[Situation], list[Situation]]:
    """(of devices, of nodes) with processes of the components that count."""
    chain = _Chain()
    empty = {node.group: chain.start(node.group) for node in plan.nodes}
    groups = [empty[node.group] for node in plan.nodes]
    devices: dict[int, int] = {}
    nodes: dict[int, int] = {}
    for index, component in enumerate(plan.components):
        traits = TRAITS[component.role]
        if not counts(component):
            continue
        for first, alike in _alike(component, traits.publishes_weights):
            on_devices: dict[int, int] = {}
            on_nodes: dict[int, int] = {}
            for process in alike:
                node = process.node_rank
                for device in process.devices:
                    devices.setdefault(device, groups[node])
                    on_devices[device] = on_devices.get(device, 0) + 1
                if held := len(process.devices) if traits.has_engine else 1:
                    nodes.setdefault(node, groups[node])
                    on_nodes[node] = on_nodes.get(node, 0) + held
            chain.add_all(devices, (index, first), on_devices)
            chain.add_all(nodes, (index, first), on_nodes)
    return list(chain.situations(devices)), list(chain.situations(nodes))


def _alike(component: PlannedComponent, publishes_weights: bool) -> Iterator[tuple[bool, Sequence[PlannedProcess]]]:
    """The process that gathers weights, where there is one, and the others."""
    if publishes_weights:
        yield True, [process for process in component.processes if process.rank == 0]
        yield False, [process for process in component.processes if process.rank != 0]
    else:
        yield False, component.processes
