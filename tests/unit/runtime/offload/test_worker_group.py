"""WorkerGroup: loads before a call and offloads after it, all the ways to say otherwise, and what a failure leaves."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.errors import DeadlineError, LeaseLostError, NoRoomError, OffloadError, WorkerFailedError, WorkerLostError
from rljob_runtime.offload.states import StateKind
from rljob_runtime.offload.worker_group import WorkerGroup
from tests.support.arbiter_fakes import D0, D1, GRADS, KV, OPTIMIZER, PARAMS, Memory, make_client
from tests.unit.runtime.offload.arbiter_world import ALWAYS, ENGINE, NEVER, TRAINER, World, play


class Loop:
    """A world with worker groups."""

    def __init__(self, budget: int = 16, devices: Any = (D0,)) -> None:
        self.world = World(budget, devices)

    def group(self, name: str, sizes: Mapping[StateKind, int], devices: Any = (D0,), timeout_s: float = 100.0, **more: Any) -> WorkerGroup:
        self.world.add(name, sizes, devices, resident=more.pop("resident", ()), **more)
        workers = [worker for key, worker in self.world.workers.items() if key.startswith(f"{name}-")]
        return WorkerGroup(name, workers, timeout_s=timeout_s, arbiter=self.world.arbiter)

    def there(self, name: str) -> set[StateKind]:
        return self.world.workers[f"{name}-0"].resident


def test_a_call_loads_first_and_others_make_room() -> None:
    async def scenario() -> None:
        loop = Loop()
        trainer, engine = loop.group("trainer", TRAINER), loop.group("engine", ENGINE)
        assert await trainer.call("score", 3) == ["params+grads+optimizer"]
        assert loop.there("trainer") == set(TRAINER), "Auto: it stays until others need the room"
        assert await engine.call("score", 1) == ["params+kv_cache"]
        assert loop.there("trainer") == {PARAMS}
        await loop.world.end()

    play(scenario())


@pytest.mark.parametrize(
    ("policy", "flag", "left"),
    [
        (OffloadPolicy.AUTO, None, set(ENGINE)),
        (OffloadPolicy.AUTO, True, set()),
        (ALWAYS, None, set()),
        (ALWAYS, False, set(ENGINE)),
        (NEVER, True, set(ENGINE)),
    ],
)
def test_the_flag_of_a_call_goes_before_the_policy(policy: OffloadPolicy, flag: bool | None, left: set[StateKind]) -> None:
    async def scenario() -> None:
        loop = Loop()
        engine = loop.group("engine", ENGINE, policies=dict.fromkeys(ENGINE, policy))
        await engine.call("score", 1, is_offload_states=flag)
        await loop.world.end()
        assert loop.there("engine") == left

    play(scenario())


def test_what_is_not_included_is_not_copied() -> None:
    async def scenario() -> None:
        loop = Loop()
        trainer = loop.group("trainer", TRAINER)
        assert await trainer.call("score", 1, include=[PARAMS]) == ["params"]
        assert loop.world.memory.events() == ["0 trainer-0 load params", "4 trainer-0 loaded params"]
        with pytest.raises(ValueError, match="trainer has no kv_cache; it has"):
            await trainer.call("score", 1, include=[KV])
        await loop.world.end()

    play(scenario())


def test_arguments_for_all_or_for_each() -> None:
    async def scenario() -> None:
        loop = Loop(devices=(D0, D1))
        trainer = loop.group("trainer", {PARAMS: 1}, (D0, D1))
        assert await trainer.call("score", 1, "all ") == ["all params"] * 2
        assert await trainer.call("score", each=[(1, "a "), (2, "b ")]) == ["a params", "b params"]
        for wrong in ({"each": [(1,)]}, {"each": [(1,), (2,)], "args": (1,)}):
            with pytest.raises(ValueError, match=r"trainer.score: each has arguments for \d workers, there are 2"):
                await trainer.call("score", *wrong.get("args", ()), each=wrong["each"])
        await loop.world.end()

    play(scenario())


def test_by_hand() -> None:
    async def scenario() -> None:
        loop = Loop()
        trainer = loop.group("trainer", TRAINER, policies={PARAMS: NEVER}, resident=(PARAMS,))
        await trainer.reload_states([OPTIMIZER])
        assert loop.there("trainer") == {PARAMS, OPTIMIZER}
        await trainer.load_states()
        assert loop.there("trainer") == set(TRAINER)
        await trainer.offload_states([GRADS])
        await trainer.offload_states()
        assert loop.there("trainer") == {PARAMS}
        with pytest.raises(OffloadError, match=r"params cannot be offloaded, components\[\].offload.weight is Never"):
            await trainer.offload_states([PARAMS])
        await loop.world.end()

    play(scenario())


def test_a_block_of_several_calls_switches_once_and_is_not_interrupted() -> None:
    async def scenario() -> None:
        loop = Loop()
        reference = loop.group("reference", {PARAMS: 4}, policies={PARAMS: ALWAYS})
        engine = loop.group("engine", ENGINE, policies=dict.fromkeys(ENGINE, ALWAYS))
        async with reference.resident():
            other = asyncio.ensure_future(asyncio.wait_for(engine_call(engine), 60))
            await reference.call("score", 1)
            await asyncio.gather(reference.call("score", 2), reference.call("score", 2))
            assert loop.there("reference") == {PARAMS}
            assert not other.done()
        assert await other == ["params+kv_cache"]
        await loop.world.end()
        loads = [event for event in loop.world.memory.events() if " load " in event]
        assert [event.split(" ", 1)[1] for event in loads] == ["reference-0 load params", "engine-0 load params+kv_cache"]

    async def engine_call(engine: WorkerGroup) -> list[Any]:
        """Of somebody who was there before the block."""
        return await asyncio.get_running_loop().create_task(engine.call("score", 1), context=outside)

    import contextvars

    outside = contextvars.copy_context()
    play(scenario())


def test_tasks_that_outlive_their_block_have_no_part_in_later_ones() -> None:
    async def scenario() -> None:
        loop = Loop()
        engine, reference = loop.group("engine", ENGINE), loop.group("reference", {PARAMS: 4})

        async def later() -> list[Any]:
            await asyncio.sleep(50)
            return await engine.call("score", 1)

        async with reference.resident():
            left = asyncio.ensure_future(later())
        async with reference.resident():
            await asyncio.sleep(60)
            assert not left.done(), "it waits in the queue like everybody else"
        assert await left == ["params+kv_cache"]
        await loop.world.end()

    play(scenario())


def test_groups_are_nested_where_there_is_room_and_refused_where_there_is_none() -> None:
    async def scenario() -> None:
        loop = Loop(budget=8)
        trainer, engine = loop.group("trainer", {PARAMS: 4, OPTIMIZER: 4}), loop.group("engine", ENGINE)
        async with trainer.resident([PARAMS]), engine.resident([PARAMS]):
            await engine.call("score", 1, include=[PARAMS])
            with pytest.raises(NoRoomError, match=r"trainer params 4 B \(in use\)"):
                await engine.call("score", 1)
        await loop.world.end()

    play(scenario())


def test_engines_load_at_the_same_time() -> None:
    async def scenario() -> None:
        memory_world = Loop(devices=(D0, D1))
        for index, device in enumerate((D0, D1)):
            memory_world.group(f"engine{index}", {PARAMS: 6}, (device,))
        engines = WorkerGroup(
            "rollout",
            list(memory_world.world.workers.values()),
            timeout_s=100,
            arbiter=memory_world.world.arbiter,
            clients=("engine0", "engine1"),
        )
        assert await engines.call("score", 1, is_offload_states=True) == ["params"] * 2
        assert asyncio.get_running_loop().time() == 7, "6 s of both copies, 1 s of the call"
        await engines.load_states()
        await engines.offload_states()
        assert asyncio.get_running_loop().time() == 25, "out, in and out again"
        await memory_world.world.end()

    play(scenario())


def test_deadlines_name_what_was_waited_for() -> None:
    async def scenario() -> None:
        loop = Loop()
        trainer, engine = loop.group("trainer", {PARAMS: 4}), loop.group("engine", ENGINE, timeout_s=5)
        with pytest.raises(DeadlineError, match=r"trainer-0.score did not answer within 3 s"):
            await trainer.call("score", 9, timeout_s=3, include=[])
        busy = asyncio.ensure_future(trainer.call("score", 50))
        await asyncio.sleep(12)
        with pytest.raises(DeadlineError, match=r"engine.score: .* waited 5.0 s for the devices of engine .*: 'trainer.score' of"):
            await engine.call("score", 1)
        await busy
        with pytest.raises(LeaseLostError, match=r"trainer.block: .* it held the devices for 2.0 s"):
            async with trainer.resident(hold_s=2):
                await asyncio.sleep(3)
        await engine.call("score", 1, timeout_s=20)
        await loop.world.end()

    play(scenario())


def test_a_call_that_fails_leaves_the_role_usable_and_a_lost_worker_does_not() -> None:
    async def scenario() -> None:
        loop = Loop()
        trainer, engine = loop.group("trainer", TRAINER), loop.group("engine", ENGINE)
        with pytest.raises(WorkerFailedError, match="ValueError: x"):
            await trainer.call("fail")
        await trainer.call("score", 1)
        loop.world.workers["trainer-0"].die()
        with pytest.raises(WorkerLostError, match="trainer-0 is gone"):
            await trainer.call("score", 1)
        with pytest.raises(OffloadError, match=r"trainer.score: trainer is not to be used: worker trainer-0 is gone"):
            await trainer.call("score", 1)
        await engine.call("score", 1)
        await loop.world.end()

    play(scenario())


@pytest.mark.parametrize("when_s", [1, 4.5, 12.5, 14])
def test_a_cancelled_call_gives_its_devices_back_once_its_workers_are_idle(when_s: float) -> None:
    async def scenario() -> None:
        loop = Loop(budget=12)
        trainer, engine = loop.group("trainer", {PARAMS: 4, OPTIMIZER: 8}), loop.group("engine", {PARAMS: 12})
        call = asyncio.ensure_future(trainer.call("score", 5))
        await asyncio.sleep(when_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await engine.call("score", 1) == ["params"]
        assert loop.world.memory.over == []
        await loop.world.end()

    play(scenario())


def test_a_role_with_devices_of_its_own_passes_calls_through() -> None:
    async def scenario() -> None:
        _, workers = make_client(Memory({D0: 99}), "trainer", (D0,), TRAINER)
        trainer = WorkerGroup("trainer", workers, timeout_s=9)
        async with trainer.resident():
            assert await trainer.call("score", 1, include=[PARAMS], is_offload_states=True) == ["params+grads+optimizer"]
        await trainer.offload_states()
        await trainer.reload_states()
        assert workers[0].resident == set(TRAINER)
        with pytest.raises(DeadlineError):
            await trainer.call("score", 10)

    play(scenario())
