"""Turns of episodes in virtual time: they go to the engine that has their history cached, while it has and others are not idle."""

import asyncio

import pytest

from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, Environments
from rljob_runtime.overlap.fleet import FleetCounts
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.tasks import TRAINING, TaskOrder
from rljob_runtime.records import Sampling
from tests.support.episode_fakes import STOP_TOKEN, ActingEngine, Script, ScriptedEnvironments, number
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.virtual_time import run_virtual

TURNS, GROUPS, SAMPLES = 12, 8, 4


def make(engines: list[ActingEngine], slots: int, delay_s: float) -> RolloutScheduler:
    script = Script(turns=lambda task: TURNS, delay_s=lambda task, turn: number(task, turn) % 10 * delay_s / 5)
    return make_scheduler(
        engines,
        make_gate(GROUPS, 0, 2),
        rollout={"samples_per_prompt": SAMPLES, "sampling": Sampling(max_tokens=3)},
        fleet={"capacities": (Capacity(slots=slots, queued=1),) * len(engines)},
        prompts=TaskOrder({"lake": 1.0}, seed=1, purpose=TRAINING),
        environments=Environments(
            router=EnvironmentRouter([ScriptedEnvironments("games-0", script)], timeouts_s={"lake": 600.0}),  # type: ignore[list-item]
            rules={"lake": EnvironmentRules(stop_token_ids=(STOP_TOKEN,))},
        ),
    )


async def batch(scheduler: RolloutScheduler, *, weights_after_s: float | None = None) -> FleetCounts:
    """What became of histories until a batch was there; new weights may come meanwhile."""
    running = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    scheduler.open()
    loop = asyncio.get_running_loop()
    if weights_after_s is not None:
        loop.call_later(weights_after_s, scheduler.fleet.forget_prefixes)
    await scheduler.buffer.take(GROUPS, version=0, timeout_s=10_000.0, what="a batch")
    counts = scheduler.fleet.take_counts()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return counts


def play(*, slots: int, delay_s: float = 1.0, weights_after_s: float | None = None) -> tuple[FleetCounts, list[ActingEngine]]:
    engines = [ActingEngine(f"engine-{i}", slots=slots, token_s=0.1) for i in range(2)]
    return run_virtual(batch(make(engines, slots, delay_s), weights_after_s=weights_after_s)), engines


@pytest.mark.parametrize(("slots", "delay_s"), [(4, 0.1), (8, 0.5), (32, 0.5)])
def test_turns_stay_with_their_history_while_engines_are_evenly_loaded(slots: int, delay_s: float) -> None:
    """With fewer slots than episodes, a few more, and enough for all."""
    counts, engines = play(slots=slots, delay_s=delay_s)
    assert counts.history_tokens_kept > 8 * counts.history_tokens_moved
    loads = [len(engine.seen) for engine in engines]
    assert min(loads) >= 0.7 * max(loads)


def test_new_weights_end_what_is_cached() -> None:
    before, _ = play(slots=8)
    after, _ = play(slots=8, weights_after_s=6.0)
    assert after.history_tokens_kept + after.history_tokens_moved < before.history_tokens_kept + before.history_tokens_moved


def test_an_engine_with_nothing_to_do_takes_turns_whose_own_engine_is_full() -> None:
    """The second engine stood still while all episodes began; without taking over it would stay idle to their end."""
    engines = [ActingEngine(f"engine-{i}", slots=2, token_s=0.1) for i in range(2)]
    scheduler = make(engines, 2, 0.01)

    async def body() -> None:
        await scheduler.pause([1], "it begins late")
        asyncio.get_running_loop().call_later(5.0, scheduler.resume, [1])
        await batch(scheduler)

    run_virtual(body())
    late = len(engines[1].seen)
    assert late >= 0.3 * (late + len(engines[0].seen))
