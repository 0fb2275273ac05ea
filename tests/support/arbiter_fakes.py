"""Workers with a model of device memory: it is what the arbiter's books are compared with."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.errors import DeadlineError, HostBudgetError, OffloadError, WorkerFailedError, WorkerLostError
from rljob_runtime.offload.clients import ClientProcess, DeviceClient
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.states import MemorySnapshot, StateKind, SwitchReport

D0, D1, D2, D3 = (Device(0, i) for i in range(4))
PARAMS, GRADS, OPTIMIZER, KV, OTHER = StateKind


@dataclass
class Memory:
    """Bytes on every device; takes more than the budget as a test's failure."""

    budget_bytes: Mapping[Device, int]
    used: dict[Device, int] = field(default_factory=dict)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, worker, event)"""
    over: list[str] = field(default_factory=list)

    def add(self, worker: str, devices: Iterable[Device], num_bytes: int) -> None:
        for device in devices:
            self.used[device] = self.used.get(device, 0) + num_bytes
            if self.used[device] > self.budget_bytes[device]:
                self.over.append(f"{worker}: {device} has {self.used[device]} of {self.budget_bytes[device]}")

    def events(self) -> list[str]:
        return [f"{when:g} {worker} {event}" for when, worker, event in self.log]


class MemoryWorker:
    """Loads and offloads at ``bytes_per_s``, and answers one call at a time, as a worker with one thread does.

    Room for a load is taken at its start, room of an offload given back at its end.
    """

    bytes_per_s = 1.0

    def __init__(self, name: str, memory: Memory, devices: tuple[Device, ...], sizes: Mapping[StateKind, int], fixed: int = 0) -> None:
        self.name = name
        self.log_file = f"{name}.log"
        self.memory = memory
        self.devices = devices
        self.sizes = dict(sizes)
        self.resident: set[StateKind] = set()
        self.undefined_on_load: frozenset[StateKind] = frozenset()
        self.faults: deque[str] = deque()
        """Of the next moves: '', rolled_back, broken, foreign, stuck, lost, budget; killed dies in the middle of the copy."""
        self.alive = True
        self._fixed = fixed
        self._held_bytes = 0
        self._one = asyncio.Lock()

    def start_with(self, kinds: Iterable[StateKind]) -> None:
        self.resident = set(kinds)
        self._take(self._fixed + sum(self.sizes[k] for k in self.resident))

    def die(self) -> None:
        if self.alive:
            self._take(-self._held_bytes)
            self.alive = False
            self.resident = set()

    def _take(self, num_bytes: int) -> None:
        if self.alive:
            self._held_bytes += num_bytes
            self.memory.add(self.name, self.devices, num_bytes)

    def _check_alive(self) -> None:
        if not self.alive:
            raise WorkerLostError(self.name, "signal 9", self.log_file)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s), self._one:
                return await getattr(self, f"_{method}")(*args)
        except DeadlineError:
            raise
        except TimeoutError as error:
            raise DeadlineError(f"{self.name}.{method} did not answer within {timeout_s:g} s") from error

    def start(self, method: str, *args: Any) -> "Started":
        return Started(self, method, args)

    async def _score(self, seconds: float, value: str = "") -> str:
        """A call of a component: what it found on the device."""
        await self._work(seconds, 0)
        return f"{value}{'+'.join(k for k in StateKind if k in self.resident)}"

    async def _fail(self) -> None:
        raise WorkerFailedError(self.name, "fail", "ValueError: x", self.log_file)

    async def _work(self, seconds: float, num_bytes: int) -> None:
        self._check_alive()
        self._take(num_bytes)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._take(-num_bytes)
        self._check_alive()

    async def _offload(self, kinds: tuple[StateKind, ...]) -> SwitchReport:
        return await self._move("offload", kinds)

    async def _load(self, kinds: tuple[StateKind, ...]) -> SwitchReport:
        return await self._move("load", kinds)

    async def _move(self, direction: str, kinds: tuple[StateKind, ...]) -> SwitchReport:
        self._check_alive()
        loads = direction == "load"
        assert all((kind in self.resident) is not loads for kind in kinds), f"{self.name}: {direction} {kinds}, resident {self.resident}"
        total = sum(self.sizes[kind] for kind in kinds)
        names = "+".join(kinds) or "nothing"
        fault = self.faults.popleft() if self.faults else ""
        self._note(f"{direction} {names}")
        if fault == "stuck":
            await asyncio.sleep(1e6)
        if loads:
            self._take(total)
        if fault == "killed":
            asyncio.get_running_loop().call_later(total / 2, self.die)
        await asyncio.sleep(sum(self.sizes[k] for k in kinds if k not in (KV, GRADS)) / self.bytes_per_s)
        if fault == "killed":
            self.die()
        self._check_alive()
        if fault:
            if loads and fault in ("rolled_back", "foreign", "budget"):
                self._take(-total)
            if loads and fault in ("lost", "broken"):
                self.resident |= set(kinds)  # some of it
            if fault == "lost":
                self.die()
                raise WorkerLostError(self.name, "signal 9", self.log_file)
            if fault == "foreign":
                raise WorkerFailedError(self.name, direction, "ValueError: x", self.log_file)
            if fault == "budget":
                raise HostBudgetError(f"{self.name}: {direction} of {names} needs 2 bytes, the budget is 1", True)
            raise OffloadError(f"{self.name}: {direction} of {names} failed: no memory", fault == "rolled_back")
        if loads:
            self.resident |= set(kinds)
        else:
            self._take(-total)
            self.resident -= set(kinds)
        self._note(f"{direction}ed {names}" if not loads else f"loaded {names}")
        sizes = {kind: self.sizes[kind] * len(self.devices) for kind in kinds}
        copied = {kind: size for kind, size in sizes.items() if kind not in (KV, GRADS)}
        snapshot = MemorySnapshot(
            allocated_bytes=1, reserved_bytes=2, peak_bytes=max(sizes.values(), default=0), host_rss_bytes=4, pinned_bytes=5
        )
        return SwitchReport(
            direction=direction,
            copied_bytes=copied,
            freed_bytes=sizes,
            elapsed_s=1.0,
            before=snapshot,
            after=snapshot,
            undefined=self.undefined_on_load & set(kinds) if loads else frozenset(),
        )

    def _note(self, event: str) -> None:
        self.memory.log.append((asyncio.get_running_loop().time(), self.name, event))


@dataclass
class Started:
    """A call that runs once somebody waits for it."""

    worker: MemoryWorker
    method: str
    args: tuple[Any, ...]

    async def result(self, timeout_s: float) -> Any:
        return await self.worker.call(self.method, *self.args, timeout_s=timeout_s)


def make_client(
    memory: Memory,
    name: str,
    devices: Iterable[Device | tuple[Device, ...]],
    sizes: Mapping[StateKind, int],
    *,
    policies: Mapping[StateKind, OffloadPolicy] | None = None,
    rederivable: Iterable[StateKind] = (),
    resident: Iterable[StateKind] | None = None,
    fixed: int = 0,
    working: int = 0,
    partial: int | None = None,
    estimate: Callable[[int], int] = lambda size: size,
) -> tuple[DeviceClient, list[MemoryWorker]]:
    """A client with a process per entry of ``devices``; its workers' memory holds what ``resident`` says, or everything."""
    processes, workers = [], []
    for rank, entry in enumerate(devices):
        own = (entry,) if isinstance(entry, Device) else entry
        worker = MemoryWorker(f"{name}-{rank}", memory, own, sizes, fixed)
        worker.start_with(sizes if resident is None else resident)
        workers.append(worker)
        reported = {kind: estimate(size) for kind, size in sizes.items()}
        process = ClientProcess(
            worker=worker,  # type: ignore[arg-type]
            devices=own,
            size_bytes=reported,
            fixed_bytes=fixed,
            working_bytes=working,
            partial_working_bytes=partial,
        )
        processes.append(process)
    return DeviceClient(name=name, processes=tuple(processes), policies=policies or {}, rederivable=frozenset(rederivable)), workers
