"""The DeviceArbiter: what moves around a block, what overlaps, whose turn it is, and what it tells."""

import asyncio

import pytest

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.errors import DeadlineError, LeaseLostError, NoRoomError, OffloadError
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import UNKNOWN_BYTES
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.report.names import require_registered
from tests.support.arbiter_fakes import D0, D1, D2, GRADS, KV, OPTIMIZER, PARAMS, Memory, make_client
from tests.unit.runtime.offload.arbiter_world import ALWAYS, ENGINE, NEVER, TRAINER, World, collocated, play


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
            asyncio.ensure_future(world.block(client, seconds, what, owner=owner))
            for owner, (what, client, seconds) in zip(
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


def test_sizes_that_workers_report_replace_estimates() -> None:
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
        assert [(r.what, r.client, r.waited_s) for r in world.records] == [("engine", "engine", 0), ("trainer", "trainer", 14)]
        assert {m.devices for r in world.records for m in r.moves} == {(D0,)}
        assert world.arbiter.take_metrics() == {"offload/waits_s": 0.0}
        await world.end()

    play(scenario())


def test_who_waits_for_devices_of_unknown_memory_comes_when_the_others_are_gone() -> None:
    """Its switch takes away what is leaving anyway; nothing says that both fit at once, and here they do not."""

    async def scenario() -> None:
        world = World(16)
        world.arbiter = DeviceArbiter({D0: UNKNOWN_BYTES})
        for name, sizes in (("trainer", TRAINER), ("engine", ENGINE)):
            world.add(name, sizes, policies=dict.fromkeys(sizes, ALWAYS), resident=())
        first = asyncio.ensure_future(world.block("engine", 5))
        await asyncio.sleep(1)
        await world.block("trainer")
        await first
        await world.end()  # the memory has 16 bytes: all of the trainer, or the engine
        assert [entry.split()[1] for entry in world.order] == ["engine", "trainer"]

    play(scenario())


def test_clients_are_checked_when_they_are_added_and_named() -> None:
    async def scenario() -> None:
        world = collocated()
        with pytest.raises(ValueError, match="client engine: added already"):
            world.add("engine", ENGINE, resident=())
        with pytest.raises(ValueError, match="client far: no budget is known of node 0 device 2"):
            world.arbiter.add(make_client(Memory({D2: 99}), "far", (D2,), ENGINE)[0])
        with pytest.raises(
            NoRoomError, match=r"second was started where others leave no room: node 0 device 0: 24 B of 16 B; offload them"
        ):
            world.add("second", ENGINE)
        with pytest.raises(ValueError, match="no client is called 'actor'; there are engine, trainer"):
            await world.block("actor")
        with pytest.raises(ValueError, match="engine has no optimizer; it has kv_cache, params"):
            await world.block("engine", kinds={OPTIMIZER})

    play(scenario())
