"""An arbiter over workers that keep a model of device memory, and what tests say about it."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.records import SwitchRecord
from rljob_runtime.offload.states import Residence, StateKind
from tests.support.arbiter_fakes import D0, GRADS, KV, OPTIMIZER, PARAMS, Memory, MemoryWorker, make_client
from tests.support.virtual_time import run_virtual

ALWAYS, NEVER = OffloadPolicy.ALWAYS, OffloadPolicy.NEVER
TRAINER = {PARAMS: 4, GRADS: 4, OPTIMIZER: 8}
ENGINE = {PARAMS: 2, KV: 6}


class World:
    """An arbiter over workers that keep a model of device memory."""

    def __init__(self, budget: int, devices: tuple[Device, ...] = (D0,), **more: Any) -> None:
        self.memory = Memory(dict.fromkeys(devices, budget))
        self.records: list[SwitchRecord] = []
        self.arbiter = DeviceArbiter(self.memory.budget_bytes, on_switch=self.records.append, **more)
        self.workers: dict[str, MemoryWorker] = {}
        self.order: list[str] = []

    def add(self, name: str, sizes: Mapping[StateKind, int], devices: Any = (D0,), **more: Any) -> MemoryWorker:
        client, workers = make_client(self.memory, name, devices, sizes, **more)
        self.arbiter.add(client, resident=more.get("resident"))
        self.workers |= {worker.name: worker for worker in workers}
        return workers[0]

    async def block(self, client: str, seconds: float = 0.0, what: str = "", timeout_s: float = 100.0, **more: Any) -> None:
        async with self.arbiter.use(client, what=what or client, timeout_s=timeout_s, **more):
            self.order.append(f"{asyncio.get_running_loop().time():g} {what or client}")
            await asyncio.sleep(seconds)

    def states(self, client: str) -> dict[StateKind, Residence]:
        return next(dict(p.states) for d in self.arbiter.residency() for p in d.processes if p.client == client)

    async def end(self) -> None:
        """All is at rest, the books agree with the workers, and no device was ever over its budget."""
        await self.arbiter.settle()
        assert self.memory.over == []
        assert self.arbiter.leases() == []
        assert self.arbiter.queue() == []
        for device in self.arbiter.residency():
            for process in device.processes:
                if not process.broken:
                    reported = {kind for kind, where in process.states.items() if where is Residence.ON_DEVICE}
                    assert reported == self.workers[process.worker].resident
                    assert all(where in (Residence.ON_DEVICE, Residence.OFFLOADED) for where in process.states.values())


def collocated(policy: OffloadPolicy = OffloadPolicy.AUTO, budget: int = 16, **more: Any) -> World:
    world = World(budget, **more)
    world.add("trainer", TRAINER, policies=dict.fromkeys(TRAINER, policy))
    world.add("engine", ENGINE, policies=dict.fromkeys(ENGINE, policy), resident=())
    return world


def play(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)
