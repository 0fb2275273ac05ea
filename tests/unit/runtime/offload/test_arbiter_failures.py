"""The DeviceArbiter: what is left after every kind of failure, at every point of a switch."""

import asyncio

import pytest

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.errors import DeadlineError, HostBudgetError, LeaseLostError, OffloadError, WorkerFailedError, WorkerLostError
from rljob_runtime.offload.states import Residence
from tests.support.arbiter_fakes import D0, D1, OPTIMIZER, PARAMS
from tests.unit.runtime.offload.arbiter_world import ALWAYS, ENGINE, World, collocated, play


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
        with pytest.raises(OffloadError, match=r"trainer params 8 B \(its component is broken\).* trainer is broken \(.*gone") as caught:
            await world.block("reference")  # where its other rank is there is none
        assert caught.value.retryable, "a machine failed, the spec is right"
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


@pytest.mark.parametrize("policy", [ALWAYS, OffloadPolicy.AUTO])
@pytest.mark.parametrize("how", ["in its lease", "while it was away", "in a switch"])
def test_a_client_whose_worker_was_replaced_leases_again_as_a_new_one(how: str, policy: OffloadPolicy) -> None:
    async def scenario() -> None:
        world = collocated(policy)
        await world.block("trainer")
        worker = world.workers["engine-0"]
        if how == "in its lease":
            await world.arbiter.settle()
            async with world.arbiter.use("engine", what="generation", timeout_s=99):
                worker.die()
        elif how == "while it was away":
            worker.die()
        else:
            worker.faults.append("killed")
            with pytest.raises(WorkerLostError, match="engine-0"):
                await world.block("engine")
        world.arbiter.lost(WorkerLostError("engine-0", "signal 9", "x.log"))
        await world.block("trainer", what="the trainer goes on meanwhile")
        await world.arbiter.offload_states("trainer", timeout_s=99)
        with pytest.raises(OffloadError, match="engine is not to be used"):
            await world.block("engine")
        worker.alive = True
        worker.start_with(ENGINE)
        world.arbiter.revive("engine-0")
        await world.arbiter.settle()
        gone = Residence.OFFLOADED if policy is ALWAYS else Residence.ON_DEVICE
        assert world.states("engine") == dict.fromkeys(ENGINE, gone)
        await world.block("engine")
        await world.block("trainer")
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
                with pytest.raises(OffloadError, match=r"its component is broken.*take the room: trainer is broken \(") as broken:
                    await world.block("engine")
                assert broken.value.retryable, "the trainer's fault, not the spec's"
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


def test_state_stays_where_it_is_when_a_block_raises_and_leaves_as_its_policy_says() -> None:
    async def scenario() -> None:
        world = collocated(ALWAYS, budget=100)
        with pytest.raises(ZeroDivisionError):
            async with world.arbiter.use("trainer", what="train", timeout_s=9):
                raise ZeroDivisionError
        await world.end()
        assert world.workers["trainer-0"].resident == set()

    play(scenario())


def test_workers_that_do_not_become_idle_break_their_client() -> None:
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


def test_a_load_that_is_rolled_back_twice_leaves_its_client_usable_and_off_the_device() -> None:
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


def test_a_host_budget_that_is_too_small_is_not_tried_again_and_is_the_specs_fault() -> None:
    async def scenario() -> None:
        world = collocated()
        world.workers["trainer-0"].faults.append("budget")
        with pytest.raises(HostBudgetError, match="the budget is 1") as caught:
            await world.block("engine")
        assert not caught.value.retryable
        assert world.memory.events() == ["0 trainer-0 offload grads+optimizer"]
        await world.block("trainer")
        await world.end()

    play(scenario())


@pytest.mark.parametrize(("client", "needs"), [("trainer", "trainer"), ("engine", "engine")])
def test_a_worker_killed_in_mid_switch_ends_its_client_and_frees_what_it_had(client: str, needs: str) -> None:
    """The trainer in the middle of its offload, or the engine in the middle of its load, for the same block."""

    async def scenario() -> None:
        world = collocated()
        world.workers[f"{client}-0"].faults.append("killed")
        with pytest.raises(WorkerLostError, match=f"worker {client}-0 is gone"):
            await world.block("engine")
        with pytest.raises(OffloadError, match=f"{needs} is not to be used: worker {client}-0 is gone"):
            await world.block(needs)
        await world.block("trainer" if needs == "engine" else "engine")
        await world.end()

    play(scenario())


def test_a_switch_that_is_cancelled_is_finished_and_nobody_gets_half_of_it() -> None:
    async def scenario() -> None:
        world = collocated()
        waiting = asyncio.ensure_future(world.block("engine"))
        await asyncio.sleep(9)  # the trainer is out, the engine half in
        assert world.states("engine")[PARAMS] is Residence.LOADING
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert world.order == []
        await world.block("trainer", 0, "train")
        assert world.order == ["20 train"], "the load ended at 10, the engine left again in 2, the trainer came in 8"
        await world.end()

    play(scenario())
