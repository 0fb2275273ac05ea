"""RESIDENT and NO-HANG of the DeviceArbiter: any clients, budgets, schedules and failures, against a model of the workers."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.errors import NoRoomError, RuntimeFault, WorkerLostError
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.clients import DeviceClient
from rljob_runtime.offload.plan import Device, ProcessState, Switch, SwitchRequest, plan_switch
from rljob_runtime.offload.states import Residence, StateKind
from tests.support.arbiter_fakes import GRADS, KV, Memory, MemoryWorker, make_client
from tests.support.virtual_time import run_virtual

FAULTS = ("rolled_back", "rolled_back rolled_back", "broken", "foreign", "stuck", "lost", "killed", "budget")
BODIES = ("ok", "raises", "overruns", "deaf", "dies", "nests", "offloads")
KINDS = tuple(StateKind)


class BodyError(Exception):
    """What a block raises."""


@dataclass
class Grant:
    """A claim that was granted."""

    arrival: int
    devices: frozenset[Device]
    token: int


@dataclass
class Play:
    """One random job."""

    random: Random
    with_faults: bool
    memory: Memory = field(init=False)
    arbiter: DeviceArbiter = field(init=False)
    clients: dict[str, DeviceClient] = field(default_factory=dict)
    workers: dict[str, list[MemoryWorker]] = field(default_factory=dict)
    grants: list[Grant] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    arrivals: Any = field(default_factory=count)

    def build(self) -> None:
        random = self.random
        devices = [Device(0, i) for i in range(random.randint(1, 4))]
        self.memory = Memory({device: random.randint(12, 30) for device in devices})
        self.arbiter = DeviceArbiter(self.memory.budget_bytes, switch_timeout_s=500, hold_s=2000)
        for name in "abcd"[: random.randint(1, 4)]:
            own = random.sample(devices, random.randint(1, len(devices)))
            pairs = len(own) > 1 and random.random() < 0.3
            policies = {kind: random.choice(list(OffloadPolicy) + [OffloadPolicy.AUTO] * 3) for kind in KINDS}
            sizes = {kind: random.randint(0, 7) for kind in random.sample(KINDS, random.randint(1, 4))}
            client, workers = make_client(
                self.memory,
                name,
                [tuple(own)] if pairs else own,
                sizes,
                policies=policies,
                resident=(),
                fixed=random.randint(0, 1),
                working=random.randint(0, 4),
            )
            self.arbiter.add(client, resident=())
            self.clients[name], self.workers[name] = client, workers
            if self.with_faults:
                for worker in workers:
                    chosen = [random.choice(FAULTS).split() if random.random() < 0.12 else [""] for _ in range(20)]
                    worker.faults.extend(fault for faults in chosen for fault in faults)

    def some(self, items: Iterable[Any]) -> list[Any]:
        items = sorted(items)
        return self.random.sample(items, self.random.randint(0, len(items)))

    async def act(self, owner: str) -> None:
        """One driver's thread of work."""
        for _ in range(self.random.randint(1, 5)):
            await asyncio.sleep(self.random.choice((0, 0, 1, 7)))
            name = self.random.choice(sorted(self.clients))
            timeout_s = self.random.choice((3, 30, 5000))
            what = self.random.choice(("use", "use", "use", "offload", "reload"))
            if what == "use":
                step = self.use(owner, name, timeout_s, self.random.choice(BODIES if self.with_faults else (*BODIES[:1], *BODIES[5:])))
            elif what == "offload":
                step = self.arbiter.offload_states(name, None, timeout_s=timeout_s, owner=owner)
            else:
                step = self.arbiter.reload_states(name, self.some(self.clients[name].kinds), timeout_s=timeout_s, owner=owner)
            await self.outcome(step, cancel=self.with_faults and self.random.random() < 0.1)

    async def outcome(self, step: Any, *, cancel: bool) -> None:
        """Every failure is one that somebody caused."""
        task = asyncio.ensure_future(step)
        if cancel:
            asyncio.get_running_loop().call_later(self.random.choice((0, 1, 5, 20)), task.cancel)
        await asyncio.wait({task})
        fault = asyncio.CancelledError() if task.cancelled() else task.exception()
        assert fault is None or isinstance(fault, (RuntimeFault, BodyError, asyncio.CancelledError)), repr(fault)
        self.outcomes.append(str(fault))

    async def use(self, owner: str, name: str, timeout_s: float, body: str, *, nested: bool = False) -> None:
        client, random = self.clients[name], self.random
        kinds = self.some(client.kinds)
        arrival, flag, hold_s = next(self.arrivals), random.choice((None, None, True, False)), random.choice((40, 2000))
        async with self.arbiter.use(
            name, kinds, what=body, timeout_s=timeout_s, hold_s=hold_s, owner=owner, is_offload_states=flag
        ) as lease:
            if not nested:
                self.grants.append(Grant(arrival, client.devices, lease.token))
            for worker, process in zip(self.workers[name], client.processes, strict=True):
                assert not worker.alive or worker.resident >= set(kinds) & set(process.size_bytes), "a lease without its state"
            await self.body(body, owner, name, hold_s)
            if body not in ("deaf", "dies"):
                lease.check()

    async def body(self, body: str, owner: str, name: str, hold_s: float) -> None:
        random, workers = self.random, self.workers[name]
        seconds = hold_s + 10 if body in ("overruns", "deaf") else random.choice((0, 1, 9))
        calls = [
            asyncio.ensure_future(w.call("work", seconds, p.working_bytes, timeout_s=9000))
            for w, p in zip(workers, self.clients[name].processes, strict=True)
        ]
        for call in calls:  # they go on in the worker, whoever waits for them
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
        if body == "dies":
            random.choice(workers).die()
        if body == "raises":
            raise BodyError
        for _ in range(2 if body == "deaf" else 1):
            try:
                await asyncio.wait(calls)
            except asyncio.CancelledError:
                if body != "deaf":
                    raise
        for call in [call for call in calls if call.done()]:
            call.result()
        if body == "nests":
            await self.use(owner, random.choice(sorted(self.clients)), 50, "ok", nested=True)
        if body == "offloads":
            await self.arbiter.offload_states(name, None, timeout_s=2000, owner=owner)

    async def kill(self) -> None:
        """Ends a process at any moment, in the middle of a move too; its watcher says so later, or before any call fails."""
        await asyncio.sleep(self.random.uniform(0, 60))
        workers = [worker for own in self.workers.values() for worker in own]
        worker = self.random.choice(workers)
        worker.die()
        await asyncio.sleep(self.random.choice((0, 0, 5)))
        self.arbiter.lost(WorkerLostError(worker.name, "signal 9", worker.log_file))

    async def run(self) -> None:
        killers = [self.kill() for _ in range(self.random.randint(0, 2))] if self.with_faults else []
        await asyncio.gather(*killers, *(self.act(f"owner-{i}") for i in range(self.random.randint(1, 5))))
        await self.arbiter.settle()
        self.check_books()
        for name in sorted(self.clients):  # nothing is held for ever
            await self.outcome(self.use("last", name, 3000, "ok"), cancel=False)
            assert " waited " not in self.outcomes[-1]
        await self.arbiter.settle()
        self.check_books()
        self.check_fairness()
        assert asyncio.get_running_loop().time() < 40_000

    def check_books(self) -> None:
        """At rest: no lease, nobody waits, and the books say what the workers say."""
        assert self.arbiter.leases() == []
        assert self.arbiter.queue() == []
        assert self.memory.over == []
        by_name = {worker.name: worker for workers in self.workers.values() for worker in workers}
        for device in self.arbiter.residency():
            counted = sum(process.num_bytes for process in device.processes)
            assert counted >= self.memory.used.get(device.device, 0)
            if not any(process.broken for process in device.processes):
                assert counted == self.memory.used.get(device.device, 0)
            for process in device.processes:
                reported = {kind for kind, where in process.states.items() if where is Residence.ON_DEVICE}
                assert reported <= by_name[process.worker].resident
                if not process.broken:
                    assert reported == by_name[process.worker].resident
                    assert set(process.states.values()) <= {Residence.ON_DEVICE, Residence.OFFLOADED}

    def check_fairness(self) -> None:
        """Of two claims that overlap, the earlier one is granted first."""
        self.grants.sort(key=lambda grant: grant.arrival)
        for index, late in enumerate(self.grants):
            for early in self.grants[:index]:
                assert early.devices.isdisjoint(late.devices) or early.token < late.token


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), with_faults=st.booleans())
def test_devices_never_hold_more_than_their_budget_and_every_wait_ends(seed: int, with_faults: bool) -> None:
    play = Play(Random(seed), with_faults)

    async def main() -> None:
        play.build()
        await play.run()

    run_virtual(main())
    assert play.memory.over == []


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), after_s=st.floats(0, 80))
def test_an_arbiter_that_is_closed_at_any_moment_leaves_nobody_waiting_and_nothing_moving(seed: int, after_s: float) -> None:
    play = Play(Random(seed), True)

    async def main() -> None:
        play.build()
        acts = [asyncio.ensure_future(play.act(f"owner-{i}")) for i in range(3)]
        await asyncio.sleep(after_s)
        await play.arbiter.aclose()
        assert play.arbiter.queue() == []
        await asyncio.gather(*acts)
        await play.arbiter.settle()
        assert play.arbiter.leases() == []
        assert play.memory.over == []

    run_virtual(main())


def replay(budget: dict[Device, int], processes: list[ProcessState], switch: Switch, check: Callable[[dict[Device, int]], None]) -> None:
    """All loads of a wave before any of its offloads: the worst order."""
    by_key = {(p.client, p.index): p for p in processes}
    used = {device: sum(p.resident_bytes for p in processes if device in p.devices) for device in budget}
    there = {key: set(p.on_device) for key, p in by_key.items()}
    for wave in switch.waves:
        assert wave.loads or wave.offloads
        for sign, moves in ((1, wave.loads), (-1, wave.offloads)):
            for move in moves:
                process, kinds = by_key[move.client, move.index], there[move.client, move.index]
                assert kinds.isdisjoint(move.kinds) if sign > 0 else kinds.issuperset(move.kinds)
                assert sign > 0 or set(move.kinds).isdisjoint(process.stays)
                kinds ^= set(move.kinds)
                for device in process.devices:
                    used[device] += sign * sum(process.size_bytes[kind] for kind in move.kinds)
            check(used)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_plan_stays_within_the_budget_at_every_moment_and_evicts_nothing_without_need(seed: int) -> None:
    random = Random(seed)
    devices = [Device(0, i) for i in range(random.randint(1, 3))]
    processes = []
    for client in "abcd":
        sizes = {kind: random.randint(0, 9) for kind in KINDS}
        there = frozenset(random.sample(KINDS, random.randint(0, 5)))
        for index, device in enumerate(random.sample(devices, random.randint(1, len(devices)))):
            processes.append(
                ProcessState(
                    client=client,
                    index=index,
                    devices=(device,) if random.random() < 0.8 else tuple(devices),
                    size_bytes=sizes,
                    on_device=there,
                    fixed_bytes=random.randint(0, 2),
                    working_bytes=random.randint(0, 5),
                    stays={kind: "in use" for kind in there if random.random() < 0.1},
                    free_to_drop=frozenset({KV, GRADS}),
                    last_used=random.randint(0, 9),
                )
            )
    load = frozenset(random.sample(KINDS, random.randint(0, 5)))
    request = SwitchRequest(client="a", what="x", load=load, works=True)

    def total(bytes_of: Callable[[ProcessState], int]) -> dict[Device, int]:
        return {device: sum(bytes_of(p) for p in processes if device in p.devices) for device in devices}

    def own(p: ProcessState) -> frozenset[StateKind]:
        return load if p.client == "a" else frozenset()

    used = total(lambda p: p.resident_bytes)
    budget = {device: used[device] + random.randint(0, 12) for device in devices}
    coming = total(lambda p: sum(p.size_bytes[k] for k in own(p) - p.on_device))
    work = total(lambda p: p.working_bytes if p.client == "a" else 0)
    movable = total(lambda p: sum(p.size_bytes[k] for k in p.on_device - p.stays.keys() - own(p)))
    near = {device for p in processes if p.client == "a" for device in p.devices}
    try:
        switch = plan_switch(budget, processes, request)
    except NoRoomError:
        assert any(used[d] - movable[d] + coming[d] + work[d] > budget[d] for d in near)
        return
    assert all(used[d] - movable[d] + coming[d] + work[d] <= budget[d] for d in near)

    def check(now: dict[Device, int]) -> None:
        assert all(now[device] <= budget[device] for device in near)

    final: dict[Device, int] = dict(used)
    replay(budget, processes, switch, lambda now: (check(now), final.update(now))[0])  # type: ignore[func-returns-value]
    assert all(final[device] + work[device] <= budget[device] for device in near)
    if all(used[d] + coming[d] + work[d] <= budget[d] for d in near):
        assert not any(wave.offloads for wave in switch.waves)
