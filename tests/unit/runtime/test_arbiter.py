"""The DeviceArbiter: who leaves first, what overlaps, whose turn it is, and what is left after every kind of failure."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from rljob_api.memory.model import Kind, Need, Phase, ProcessNeeds
from rljob_api.v1alpha1.components import ComponentOffload, OffloadPolicy
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.errors import DeadlineError, LeaseLostError, NoRoomError, OffloadError, WorkerFailedError, WorkerLostError
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import Device, ProcessState, Switch, SwitchRequest, plan_switch
from rljob_runtime.offload.records import SwitchRecord
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.offload.tenants import estimated, policies
from rljob_runtime.report.names import require_registered
from tests.unit.runtime.arbiter_fakes import D0, D1, D2, GRADS, KV, OPTIMIZER, OTHER, PARAMS, Memory, MemoryWorker, make_tenant
from tests.unit.runtime.virtual_time import run_virtual

ALWAYS, NEVER = OffloadPolicy.ALWAYS, OffloadPolicy.NEVER
TRAINER = {PARAMS: 4, GRADS: 4, OPTIMIZER: 8}
ENGINE = {PARAMS: 2, KV: 6}


def process(tenant: str, sizes: Mapping[StateKind, int], on: str = "", devices: tuple[Device, ...] = (D0,), **more: Any) -> ProcessState:
    """``on``: kinds on the device by their first letters; KV cache and gradients are free to drop."""
    kinds = frozenset(kind for kind in sizes if kind.value[:2] in on.split())
    free = frozenset({KV, GRADS}) | more.pop("free", frozenset())
    return ProcessState(
        tenant=tenant, index=more.pop("index", 0), devices=devices, size_bytes=sizes, on_device=kinds, free_to_drop=free, **more
    )


def shown(switch: Switch) -> list[str]:
    """``-trainer optimizer +engine params``, one line per wave."""
    return [
        " ".join(
            [f"-{m.tenant}{m.index or ''} {'+'.join(m.kinds)}" for m in wave.offloads]
            + [f"+{m.tenant}{m.index or ''} {'+'.join(m.kinds)}" for m in wave.loads]
        )
        for wave in switch.waves
    ]


FULL = {PARAMS: 4, GRADS: 4, OPTIMIZER: 8, KV: 6, OTHER: 1}


@pytest.mark.parametrize(
    ("needs", "left"),
    [
        (0, []),
        (1, ["-a kv_cache"]),
        (6, ["-a kv_cache"]),
        (7, ["-a kv_cache+grads"]),
        (11, ["-a kv_cache+grads+optimizer"]),
        (19, ["-a kv_cache+grads+optimizer", "-a params"]),
        (23, ["-a kv_cache+grads+optimizer", "-a params", "-a other"]),
    ],
)
def test_what_costs_nothing_leaves_first_then_optimizer_then_params(needs: int, left: list[str]) -> None:
    a = process("a", FULL, "pa gr op kv ot", last_used=1)
    b = process("b", {PARAMS: needs} if needs else {}, "")
    waves = shown(plan_switch({D0: 23}, [a, b], SwitchRequest(tenant="b", what="x", load=frozenset({PARAMS}))))
    assert [offloads for wave in waves if (offloads := wave.partition("+b")[0].strip())] == left
    assert not needs or waves[-1].endswith("+b params")


def test_copies_go_both_ways_at_once_where_room_allows() -> None:
    trainer = process("trainer", {PARAMS: 4, OPTIMIZER: 8}, "pa op")
    engine = process("engine", {PARAMS: 4, KV: 8}, "")
    request = SwitchRequest(tenant="engine", what="x", load=frozenset({PARAMS, KV}))
    assert shown(plan_switch({D0: 16}, [trainer, engine], request)) == ["-trainer optimizer +engine params", "+engine kv_cache"]
    assert shown(plan_switch({D0: 12}, [trainer, engine], request)) == [
        "-trainer optimizer",
        "-trainer params +engine params",
        "+engine kv_cache",
    ]


@pytest.mark.parametrize(
    ("processes", "left"),
    [
        pytest.param(
            [process("old", {PARAMS: 4}, "pa", last_used=1), process("new", {PARAMS: 4}, "pa", last_used=2)], "-old params", id="lru"
        ),
        pytest.param(
            [process("old", {PARAMS: 4}, "pa", last_used=1, queued=True), process("new", {PARAMS: 4}, "pa", last_used=2)],
            "-new params",
            id="who waits is needed soon",
        ),
        pytest.param(
            [process("engine", {PARAMS: 4}, "pa", last_used=9, free=frozenset({PARAMS})), process("new", {OPTIMIZER: 4}, "op")],
            "-engine params",
            id="what a sync writes anyway costs nothing",
        ),
        pytest.param(
            [process("old", {PARAMS: 1}, "pa", last_used=1), process("big", {PARAMS: 7}, "pa", last_used=2)],
            "-big params",
            id="what a larger one makes needless stays",
        ),
        pytest.param(
            [process("old", {PARAMS: 4}, "pa", stays={PARAMS: "in use"}), process("new", {PARAMS: 4}, "pa", last_used=2)],
            "-new params",
            id="what stays stays",
        ),
    ],
)
def test_who_leaves(processes: list[ProcessState], left: str) -> None:
    want = process("want", {PARAMS: 4}, "")
    switch = plan_switch({D0: 8}, [*processes, want], SwitchRequest(tenant="want", what="x", load=frozenset({PARAMS})))
    assert shown(switch) == [left, "+want params"]


def test_only_devices_that_are_full_give_up_something() -> None:
    trainers = [process("trainer", {OPTIMIZER: 6}, "op", (device,), index=i) for i, device in enumerate((D0, D1))]
    engine = process("engine", {PARAMS: 4}, "", (D0,))
    switch = plan_switch({D0: 8, D1: 8}, [*trainers, engine], SwitchRequest(tenant="engine", what="x", load=frozenset({PARAMS})))
    assert shown(switch) == ["-trainer optimizer", "+engine params"]


def test_work_needs_room_too() -> None:
    trainer = process("trainer", {PARAMS: 4}, "pa", working_bytes=5)
    other = process("other", {PARAMS: 4}, "pa")
    assert shown(plan_switch({D0: 13}, [trainer, other], SwitchRequest(tenant="trainer", what="x", works=True))) == []
    assert shown(plan_switch({D0: 12}, [trainer, other], SwitchRequest(tenant="trainer", what="x", works=True))) == ["-other params"]


def test_what_cannot_fit_is_told_with_its_arithmetic() -> None:
    gib = 2**30
    processes = [
        process("trainer", {PARAMS: 4 * gib, OPTIMIZER: 8 * gib}, "pa", working_bytes=gib, fixed_bytes=gib),
        process("engine", {PARAMS: 2 * gib, KV: gib}, "pa kv", stays={PARAMS: "components[].offload.weight is Never"}, fixed_bytes=gib),
    ]
    request = SwitchRequest(tenant="trainer", what="train step 12", load=frozenset({PARAMS, OPTIMIZER}), works=True)
    with pytest.raises(NoRoomError) as caught:
        plan_switch({D0: 16 * gib}, processes, request)
    assert str(caught.value) == (
        "train step 12: trainer has no room. node 0 device 0 has 16.00 GiB, 17.00 GiB are needed: trainer params 4.00 GiB (asked for), "
        "trainer optimizer 8.00 GiB (asked for), trainer work 1.00 GiB, trainer process 1.00 GiB (always there), "
        "engine params 2.00 GiB (components[].offload.weight is Never), engine process 1.00 GiB (always there). "
        "Let more leave (components[].offload), spread the components over more devices, or make them smaller"
    )


class World:
    """An arbiter over workers that keep a model of device memory."""

    def __init__(self, budget: int, devices: tuple[Device, ...] = (D0,), **more: Any) -> None:
        self.memory = Memory(dict.fromkeys(devices, budget))
        self.records: list[SwitchRecord] = []
        self.arbiter = DeviceArbiter(self.memory.budget_bytes, on_switch=self.records.append, **more)
        self.workers: dict[str, MemoryWorker] = {}
        self.order: list[str] = []

    def add(self, name: str, sizes: Mapping[StateKind, int], devices: Any = (D0,), **more: Any) -> MemoryWorker:
        tenant, workers = make_tenant(self.memory, name, devices, sizes, **more)
        self.arbiter.add(tenant, resident=more.get("resident"))
        self.workers |= {worker.name: worker for worker in workers}
        return workers[0]

    async def block(self, tenant: str, seconds: float = 0.0, what: str = "", timeout_s: float = 100.0, **more: Any) -> None:
        async with self.arbiter.use(tenant, what=what or tenant, timeout_s=timeout_s, **more):
            self.order.append(f"{asyncio.get_running_loop().time():g} {what or tenant}")
            await asyncio.sleep(seconds)

    def states(self, tenant: str) -> dict[StateKind, Residence]:
        return next(dict(p.states) for d in self.arbiter.residency() for p in d.processes if p.tenant == tenant)

    async def end(self) -> None:
        """All is at rest, the books agree with the workers, and no device was ever over its budget."""
        await self.arbiter.settle()
        assert self.memory.over == []
        assert self.arbiter.leases() == []
        assert self.arbiter.queue() == []
        for device in self.arbiter.residency():
            for process in device.processes:
                if not process.broken:
                    told = {kind for kind, where in process.states.items() if where is Residence.ON_DEVICE}
                    assert told == self.workers[process.worker].resident
                    assert all(where in (Residence.ON_DEVICE, Residence.OFFLOADED) for where in process.states.values())


def collocated(policy: OffloadPolicy = OffloadPolicy.AUTO, budget: int = 16, **more: Any) -> World:
    world = World(budget, **more)
    world.add("trainer", TRAINER, policies=dict.fromkeys(TRAINER, policy))
    world.add("engine", ENGINE, policies=dict.fromkeys(ENGINE, policy), resident=())
    return world


def play(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


def test_a_step_of_a_collocated_job() -> None:
    async def scenario() -> None:
        world = collocated()
        await world.block("engine", 5, "generate")
        await world.block("trainer", 3, "train")
        await world.end()
        assert world.memory.events() == [
            "0 trainer-0 offload grads+optimizer",
            "8 trainer-0 offloaded grads+optimizer",
            "8 engine-0 load params+kv_cache",
            "10 engine-0 loaded params+kv_cache",
            "15 engine-0 offload kv_cache+params",
            "17 engine-0 offloaded kv_cache+params",
            "17 trainer-0 load optimizer+grads",
            "25 trainer-0 loaded optimizer+grads",
        ]
        assert world.order == ["10 generate", "25 train"]

    play(scenario())


def test_always_leaves_after_the_block_and_overlaps_with_the_load_of_the_next() -> None:
    async def scenario() -> None:
        world = World(24)
        world.add("a", {PARAMS: 8}, policies={PARAMS: ALWAYS}, resident=())
        world.add("b", {PARAMS: 8}, policies={PARAMS: ALWAYS}, resident=())
        await world.block("a")
        await world.block("b")
        await world.end()
        assert world.memory.events() == [
            "0 a-0 load params",
            "8 a-0 loaded params",
            "8 a-0 offload params",
            "8 b-0 load params",
            "16 a-0 offloaded params",
            "16 b-0 loaded params",
            "16 b-0 offload params",
            "24 b-0 offloaded params",
        ]

    play(scenario())


@pytest.mark.parametrize(
    ("policy", "flag", "left"),
    [
        (OffloadPolicy.AUTO, None, set()),
        (OffloadPolicy.AUTO, False, set()),
        (OffloadPolicy.AUTO, True, {PARAMS, KV}),
        (ALWAYS, None, {PARAMS, KV}),
        (ALWAYS, False, set()),
        (NEVER, None, set()),
        (NEVER, True, set()),
    ],
)
def test_is_offload_states_and_policy_say_what_leaves_after_a_block(policy: OffloadPolicy, flag: bool | None, left: set[StateKind]) -> None:
    async def scenario() -> None:
        world = World(100)
        worker = world.add("engine", ENGINE, policies=dict.fromkeys(ENGINE, policy), resident=() if policy is not NEVER else None)
        await world.block("engine", is_offload_states=flag)
        await world.end()
        assert worker.resident == set(ENGINE) - left

    play(scenario())


def test_what_was_kept_leaves_when_others_need_the_room() -> None:
    async def scenario() -> None:
        world = collocated(ALWAYS, budget=16)
        await world.block("trainer", is_offload_states=False)
        await world.end()
        assert world.workers["trainer-0"].resident == set(TRAINER)
        await world.block("engine", is_offload_states=False)
        await world.end()
        assert world.workers["trainer-0"].resident == {PARAMS}
        assert world.workers["engine-0"].resident == set(ENGINE)

    play(scenario())


def test_turns_go_by_arrival_and_other_devices_do_not_wait() -> None:
    async def scenario() -> None:
        world = World(10, (D0, D1, D2))
        for name, devices in {"one": (D0,), "two": (D1,), "both": ((D0, D1),), "three": (D2,)}.items():
            world.add(name, {PARAMS: 0}, devices)
        tasks = [
            asyncio.ensure_future(world.block(tenant, seconds, what, owner=owner))
            for owner, (what, tenant, seconds) in zip(
                "abcde",
                [
                    ("one first", "one", 5),
                    ("both waits for one", "both", 5),
                    ("two waits behind both", "two", 5),
                    ("one waits behind both", "one", 1),
                    ("three does not wait", "three", 1),
                ],
                strict=True,
            )
        ]
        await asyncio.sleep(1)
        assert [(q.what, q.waits_for) for q in world.arbiter.queue()] == [
            ("both waits for one", ("'one first' of a (one) holds it for 1.0 s",)),
            ("two waits behind both", ()),
            ("one waits behind both", ("'one first' of a (one) holds it for 1.0 s",)),
        ]
        await asyncio.gather(*tasks)
        assert world.order == [
            "0 one first",
            "0 three does not wait",
            "5 both waits for one",
            "10 two waits behind both",
            "10 one waits behind both",
        ]
        await world.end()

    play(scenario())


def test_one_owner_does_not_wait_for_itself_not_even_behind_others() -> None:
    """A weight sync: the trainer's weights and the engine's are there at the same time, while another waits for the device."""

    async def scenario() -> None:
        world = World(8)
        world.add("trainer", {PARAMS: 4}, policies={PARAMS: ALWAYS}, resident=())
        world.add("engine", ENGINE, resident=())
        world.add("reference", {PARAMS: 4}, resident=())
        async with world.arbiter.use("trainer", what="train", timeout_s=9):
            other = asyncio.ensure_future(world.block("reference", 1, "score"))
            await asyncio.sleep(0)
            async with world.arbiter.use("engine", {PARAMS}, what="sync", timeout_s=9) as lease:
                assert world.states("trainer")[PARAMS] is world.states("engine")[PARAMS] is Residence.ON_DEVICE
                assert [entry.what for entry in world.arbiter.leases()] == ["train", "sync"]
                lease.check()
            assert world.order == []
            with pytest.raises(LeaseLostError, match=r"sync: the lease of .* on engine is over: it was given back"):
                lease.check()
        await other
        await world.end()

    play(scenario())


def test_optimizer_states_only_around_the_optimizer_step() -> None:
    async def scenario() -> None:
        world = World(100)
        worker = world.add("trainer", TRAINER, policies={OPTIMIZER: ALWAYS}, resident=())
        async with world.arbiter.use("trainer", {PARAMS, GRADS}, what="forward and backward", timeout_s=9):
            assert worker.resident == {PARAMS, GRADS}
            async with world.arbiter.use("trainer", {OPTIMIZER}, what="optimizer step", timeout_s=9):
                assert worker.resident == {PARAMS, GRADS, OPTIMIZER}
            await world.arbiter.settle()
            assert worker.resident == {PARAMS, GRADS}
        await world.end()

    play(scenario())


def test_explicit_offload_and_reload() -> None:
    async def scenario() -> None:
        world = World(100)
        worker = world.add("trainer", TRAINER, policies={PARAMS: NEVER})
        await world.arbiter.offload_states("trainer", timeout_s=9)
        assert worker.resident == {PARAMS}
        await world.arbiter.reload_states("trainer", {OPTIMIZER}, timeout_s=9)
        await world.arbiter.load_states("trainer", timeout_s=9)
        assert worker.resident == set(TRAINER)
        with pytest.raises(OffloadError, match=r"params cannot be offloaded, components\[\].offload.weight is Never; change it"):
            await world.arbiter.offload_states("trainer", {PARAMS}, timeout_s=9)
        async with world.arbiter.use("trainer", what="train", timeout_s=9) as lease:
            await world.arbiter.offload_states("trainer", {GRADS}, timeout_s=9)
            assert worker.resident == lease.kinds == {PARAMS, OPTIMIZER}
        await world.end()

    play(scenario())


def test_a_wait_has_a_deadline_and_says_for_whom_it_waited() -> None:
    async def scenario() -> None:
        world = collocated(budget=32)
        holder = asyncio.ensure_future(world.block("trainer", 30, "train step 12", owner="trainer loop"))
        await asyncio.sleep(1)
        waiter = asyncio.ensure_future(world.block("engine", 0, "sync", timeout_s=20, owner="publisher"))
        await asyncio.sleep(1)
        with pytest.raises(DeadlineError) as caught:
            await world.block("engine", 0, "generate step 13", timeout_s=5, owner="scheduler")
        assert str(caught.value) == (
            "generate step 13: scheduler waited 5.0 s for the devices of engine (node 0 device 0): "
            "'train step 12' of trainer loop (trainer) holds it for 7.0 s; 1 earlier request, first 'sync' of publisher"
        )
        with pytest.raises(DeadlineError, match="sync: publisher waited 20"):
            await waiter
        await holder
        await world.block("engine")
        await world.end()

    play(scenario())


def test_a_switch_goes_on_when_nobody_waits_for_it_any_more() -> None:
    async def scenario() -> None:
        world = collocated()
        with pytest.raises(
            DeadlineError, match=r"its own switch has been under way for 3.0 s; trainer-0 moves state .*optimizer Offloading"
        ):
            await world.block("engine", timeout_s=3)
        assert world.states("trainer")[OPTIMIZER] is Residence.OFFLOADING
        task = asyncio.ensure_future(world.block("engine"))
        await asyncio.sleep(1)
        task.cancel()
        await world.end()
        assert world.workers["engine-0"].resident == set(ENGINE)
        await world.block("trainer")
        await world.end()

    play(scenario())


def test_a_block_that_runs_past_its_deadline_loses_the_devices_but_not_before_its_worker_is_idle() -> None:
    async def scenario() -> None:
        world = World(12)
        worker = world.add("trainer", {PARAMS: 4}, working=4)
        world.add("engine", ENGINE, resident=())

        async def late() -> None:
            async with world.arbiter.use("trainer", what="train step 3", timeout_s=9, hold_s=10, owner="loop"):
                call = asyncio.ensure_future(worker.call("work", 15, 4, timeout_s=100))  # goes on in the worker, whoever waits for it
                await asyncio.shield(call)

        started = asyncio.ensure_future(late())
        await asyncio.sleep(1)
        await world.block("engine", 1, "generate")
        with pytest.raises(LeaseLostError, match=r"train step 3: loop lost trainer: it held the devices for 10.0 s, which was its limit"):
            await started
        assert world.order == ["17 generate"]
        await world.block("trainer")
        await world.end()

    play(scenario())


def test_a_late_holder_that_does_not_notice_is_fenced() -> None:
    async def scenario() -> None:
        world = World(12)
        world.add("trainer", {PARAMS: 4})

        async def deaf() -> None:
            async with world.arbiter.use("trainer", what="train", timeout_s=9, hold_s=5) as lease:
                try:
                    await asyncio.sleep(50)
                except asyncio.CancelledError:
                    await asyncio.sleep(5)
                with pytest.raises(LeaseLostError, match=r"train: .* is over: it held the devices for 5.0 s"):
                    lease.check()
                await asyncio.sleep(5)
                assert [entry.what for entry in world.arbiter.leases()] == ["next"]
                assert world.arbiter.leases()[0].token > lease.token

        late = asyncio.ensure_future(deaf())
        await asyncio.sleep(1)
        following = asyncio.ensure_future(world.block("trainer", 100, "next"))
        with pytest.raises(LeaseLostError, match=r"lost trainer before its end|lost trainer: it held"):
            await late
        assert [entry.what for entry in world.arbiter.leases()] == ["next"]
        await following
        await world.end()

    play(scenario())


def test_a_dead_holder_loses_its_lease_and_is_named() -> None:
    async def scenario() -> None:
        world = World(12, (D0, D1))
        world.add("trainer", {PARAMS: 8}, (D0, D1))
        world.add("engine", {PARAMS: 8}, (D0,), resident=())
        world.add("reference", {PARAMS: 8}, (D1,), resident=())
        waiting = asyncio.ensure_future(world.block("trainer", 0, "next step"))

        async def train() -> None:
            async with world.arbiter.use("trainer", what="train", timeout_s=9, owner="loop"):
                await asyncio.sleep(5)
                world.workers["trainer-0"].die()
                await world.workers["trainer-0"].call("work", 1, 0, timeout_s=9)

        await waiting
        running = asyncio.ensure_future(train())
        await asyncio.sleep(1)
        waiting = asyncio.ensure_future(world.block("trainer", 0, "next step"))
        with pytest.raises(WorkerLostError, match="worker trainer-0 is gone"):
            await running
        with pytest.raises(OffloadError, match="next step: trainer is not to be used: worker trainer-0 is gone"):
            await waiting
        await world.block("engine")  # where the dead worker was there is room
        with pytest.raises(NoRoomError, match=r"trainer params 8 B \(its component is broken\)"):
            await world.block("reference")  # where its other rank is there is none
        await world.end()

    play(scenario())


def test_the_watcher_of_a_worker_can_take_the_lease_away() -> None:
    async def scenario() -> None:
        world = World(12)
        worker = world.add("trainer", {PARAMS: 8})
        world.add("engine", ENGINE, resident=())

        async def train() -> None:
            async with world.arbiter.use("trainer", what="train", timeout_s=9, owner="loop") as lease:
                worker.die()
                world.arbiter.lost(WorkerLostError("trainer-0", "signal 9", "x.log"))
                world.arbiter.lost(WorkerLostError("reward-0", "signal 9", "x.log"))
                await world.block("engine", owner="other")
                with pytest.raises(LeaseLostError, match="is over: worker trainer-0 is gone"):
                    lease.check()

        with pytest.raises(LeaseLostError, match="train: loop lost trainer before its end: worker trainer-0 is gone"):
            await train()
        await world.end()

    play(scenario())


@pytest.mark.parametrize(
    ("fault", "error", "trainer", "seconds"),
    [
        ("broken", OffloadError, Residence.BROKEN, 8),
        ("foreign", WorkerFailedError, Residence.BROKEN, 8),
        ("lost", WorkerLostError, Residence.BROKEN, 8),
        ("stuck", DeadlineError, Residence.BROKEN, 50),
        ("rolled_back rolled_back", OffloadError, Residence.ON_DEVICE, 16),
    ],
)
def test_a_failed_offload_fails_who_needs_the_room_and_leaves_the_truth(
    fault: str, error: type[Exception], trainer: Residence, seconds: float
) -> None:
    async def scenario() -> None:
        world = collocated(switch_timeout_s=50)
        world.workers["trainer-0"].faults.extend(fault.split())
        with pytest.raises(error):
            await world.block("engine", timeout_s=1000)
        assert asyncio.get_running_loop().time() == seconds
        await world.arbiter.settle()
        assert world.states("trainer")[OPTIMIZER] is trainer
        assert world.records[-1].error
        assert set(world.states("engine").values()) == {Residence.OFFLOADED}
        if trainer is Residence.BROKEN:
            with pytest.raises(OffloadError, match=r"y: trainer is not to be used: .*trainer-0"):
                await world.block("trainer", 0, "y")
            if fault == "lost":
                await world.block("engine")
            else:
                with pytest.raises(NoRoomError, match="its component is broken"):
                    await world.block("engine")
        else:
            await world.block("trainer")
            await world.block("engine")
        await world.end()

    play(scenario())


def test_what_was_rolled_back_is_tried_once_more() -> None:
    async def scenario() -> None:
        world = collocated()
        world.workers["trainer-0"].faults.append("rolled_back")
        world.workers["engine-0"].faults.append("rolled_back")
        await world.block("engine")
        await world.end()
        [record] = world.records
        assert [bool(move.error) for move in record.moves] == [True, False] * 2 + [False] * (len(record.moves) - 4)
        assert record.error == ""

    play(scenario())


@pytest.mark.parametrize("fault", ["broken", "foreign", "lost"])
def test_never_is_half_loaded_state_used(fault: str) -> None:
    async def scenario() -> None:
        world = collocated()
        world.workers["engine-0"].faults.append(fault)
        with pytest.raises((OffloadError, WorkerFailedError, WorkerLostError)):
            await world.block("engine")
        with pytest.raises(OffloadError, match="generate: engine is not to be used: "):
            await world.block("engine", 0, "generate")
        assert world.states("engine")[PARAMS] is Residence.BROKEN
        assert world.order == []
        if fault == "lost":
            await world.block("trainer")
        await world.end()

    play(scenario())


def test_weights_without_content_are_not_used_before_somebody_wrote_them() -> None:
    async def scenario() -> None:
        world = World(100)
        worker = world.add("engine", ENGINE, resident=(), rederivable={PARAMS})
        worker.undefined_on_load = frozenset({PARAMS, KV})
        with pytest.raises(OffloadError, match=r"generate: params of engine came back without content.*writes=\{params\}"):
            await world.block("engine", 0, "generate")

        async def failing_sync() -> None:
            async with world.arbiter.use("engine", {PARAMS}, what="sync", timeout_s=9, writes={PARAMS}) as lease:
                assert lease.undefined == {PARAMS}
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await failing_sync()
        with pytest.raises(OffloadError, match="without content"):
            await world.block("engine", 0, "generate")
        await world.block("engine", writes={PARAMS})
        await world.block("engine", 0, "generate")
        await world.end()

    play(scenario())


def test_state_stays_where_it_is_when_a_block_raises_and_leaves_as_its_policy_says() -> None:
    async def scenario() -> None:
        world = collocated(ALWAYS, budget=100)
        with pytest.raises(ZeroDivisionError):
            async with world.arbiter.use("trainer", what="train", timeout_s=9):
                raise ZeroDivisionError
        await world.end()
        assert world.workers["trainer-0"].resident == set()

    play(scenario())


def test_workers_that_do_not_become_idle_break_their_tenant() -> None:
    async def scenario() -> None:
        world = collocated(budget=100, switch_timeout_s=20)
        world.workers["trainer-0"].faults.append("stuck")
        with pytest.raises(ZeroDivisionError):
            async with world.arbiter.use("trainer", what="train", timeout_s=9):
                raise ZeroDivisionError
        with pytest.raises(OffloadError, match=r"trainer-0 did not become idle after a block that ended early: .* within 20 s"):
            await world.block("trainer")
        await world.block("engine")
        await world.end()

    play(scenario())


def test_sizes_that_workers_tell_replace_estimates() -> None:
    async def scenario() -> None:
        world = World(12)
        world.add("trainer", {OPTIMIZER: 4}, estimate=lambda size: 2 * size)
        world.add("engine", {PARAMS: 8}, resident=())
        await world.block("engine")
        await world.block("trainer")
        await world.block("engine")
        await world.end()
        assert sum("trainer-0 offload " in event for event in world.memory.events()) == 1

    play(scenario())


def test_metrics_and_records() -> None:
    async def scenario() -> None:
        world = collocated()
        assert world.arbiter.take_metrics() == {"offload/waits_s": 0.0}
        first = asyncio.ensure_future(world.block("engine", 5))
        await asyncio.sleep(1)
        await world.block("trainer")
        await first
        metrics = world.arbiter.take_metrics()
        require_registered(metrics)
        assert metrics["offload/waits_s"] == 14
        assert metrics["time/offload_s"] >= 8
        assert metrics["time/load_s"] >= 10
        assert metrics["offload/bytes"] == sum(sum(m.report.copied_bytes.values()) for r in world.records for m in r.moves if m.report)
        assert metrics["offload/gb_per_s"] == pytest.approx(
            metrics["offload/bytes"] / 1e9 / sum(r.ended_s - r.started_s for r in world.records)
        )
        assert metrics["memory/pinned_bytes"] == 5
        assert [(r.what, r.tenant, r.waited_s) for r in world.records] == [("engine", "engine", 0), ("trainer", "trainer", 14)]
        assert {m.devices for r in world.records for m in r.moves} == {(D0,)}
        assert world.arbiter.take_metrics() == {"offload/waits_s": 0.0}
        await world.end()

    play(scenario())


def test_tenants_are_checked_when_they_are_added_and_named() -> None:
    async def scenario() -> None:
        world = collocated()
        with pytest.raises(ValueError, match="tenant engine: added already"):
            world.add("engine", ENGINE, resident=())
        with pytest.raises(ValueError, match="tenant far: no budget is known of node 0 device 2"):
            world.arbiter.add(make_tenant(Memory({D2: 99}), "far", (D2,), ENGINE)[0])
        with pytest.raises(
            NoRoomError, match=r"second was started where others leave no room: node 0 device 0: 24 B of 16 B; offload them"
        ):
            world.add("second", ENGINE)
        with pytest.raises(ValueError, match="no tenant is called 'actor'; there are engine, trainer"):
            await world.block("actor")
        with pytest.raises(ValueError, match="engine has no optimizer; it has kv_cache, params"):
            await world.block("engine", kinds={OPTIMIZER})

    play(scenario())


def test_a_closed_arbiter_refuses_and_gives_up() -> None:
    async def scenario() -> None:
        world = collocated()
        first = asyncio.ensure_future(world.block("engine"))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(world.block("engine"))
        await asyncio.sleep(0)
        await world.arbiter.aclose()
        for task in (first, second):
            with pytest.raises(OffloadError, match=r"the arbiter is closed|given up"):
                await task
        assert world.states("trainer")[OPTIMIZER] is Residence.BROKEN

    play(scenario())


def test_sizes_and_policies_come_from_the_estimate_and_the_spec() -> None:
    def need(kind: Kind, size: int) -> Need:
        return Need(kind=kind, name="x", formula="x", num_bytes=size)

    needs = ProcessNeeds(
        active=frozenset({Phase.TRAIN}),
        states=(need(Kind.PROCESS, 1), need(Kind.WEIGHT, 4), need(Kind.OPTIMIZER, 8)),
        starting=(),
        working={
            Phase.TRAIN: (need(Kind.WORKSPACE, 5), need(Kind.GRAD, 6), need(Kind.WORKSPACE, 2)),
            Phase.OPTIMIZER_STEP: (need(Kind.GRAD, 4),),
        },
    )
    assert estimated(needs) == ({PARAMS: 4, OPTIMIZER: 8, GRADS: 6}, 1, 7)
    assert policies(ComponentOffload(grad=ALWAYS), Residency.SWITCHING)[GRADS] is ALWAYS
    assert set(policies(ComponentOffload(grad=ALWAYS), Residency.RESIDENT).values()) == {NEVER}


def test_who_gave_up_in_mid_switch_is_not_preferred_to_those_who_wait() -> None:
    async def scenario() -> None:
        world = World(20, (D0, D1))
        world.add("one", {PARAMS: 9}, (D0,), resident=())
        world.add("both", {PARAMS: 0}, ((D0, D1),))
        world.add("two", {PARAMS: 0}, (D1,))
        with pytest.raises(DeadlineError):
            await world.block("one", timeout_s=3, owner="impatient")
        patient = asyncio.ensure_future(world.block("both", 1))
        await asyncio.sleep(0)
        await world.block("two", owner="impatient")
        await patient
        assert world.order == ["9 both", "10 two"]
        await world.end()

    play(scenario())


def test_a_load_that_is_rolled_back_twice_leaves_its_tenant_usable_and_off_the_device() -> None:
    async def scenario() -> None:
        world = collocated()
        world.workers["engine-0"].faults.extend(["rolled_back", "rolled_back"])
        with pytest.raises(OffloadError, match=r"engine-0: load of params.* failed: no memory"):
            await world.block("engine")
        assert set(world.states("engine").values()) == {Residence.OFFLOADED}
        await world.end()
        await world.block("engine")
        await world.end()

    play(scenario())
