"""ONCE, BOUND and EXACT over several turns: for any order, speed, failure, age, and loss of engines and environment workers."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rljob_runtime.loop.environment_replacer import EnvironmentReplacer
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, Environments
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.tasks import TRAINING, TaskOrder
from rljob_runtime.records import Sampling
from tests.support.episode_fakes import FIRST_GIVEN_TOKEN, STOP_TOKEN, ActingEngine, Script, ScriptedEnvironments, check_exact, number
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.virtual_time import run_virtual

SAMPLES = 3
OWN_PROMPTS = frozenset({"rooms"})
RULES = {name: EnvironmentRules(stop_token_ids=(STOP_TOKEN,), own_prompts=name in OWN_PROMPTS) for name in ("lake", "rooms")}


def make(engines: list[Any], hosts: list[Any], batch: int, steps: int, lag: int, redundant: int = 0, restarts: int = 0) -> RolloutScheduler:
    """With ``restarts`` lost workers come back, some seconds later."""

    async def start(index: int, timeout_s: float) -> None:
        await asyncio.sleep(2.0 + index)
        hosts[index].restart()

    async def end(index: int) -> None:
        await asyncio.sleep(0.5)

    limits = ReplacementLimits(max_restarts=restarts, start_timeout_s=60.0)
    names = [host.name for host in hosts]
    replacer = EnvironmentReplacer(names, start=start, end=end, limits=limits, notify=lambda line: None)
    router = EnvironmentRouter(hosts, timeouts_s=dict.fromkeys(RULES, 600.0), replace=replacer.replace)
    return make_scheduler(
        engines,
        make_gate(batch, lag, steps),
        rollout={"samples_per_prompt": SAMPLES, "redundant_samples": redundant, "sampling": Sampling(max_tokens=8)},
        prompts=TaskOrder({"lake": 2.0, "rooms": 1.0}, seed=3, purpose=TRAINING),
        environments=Environments(router=router, rules=RULES),
    )


async def train(scheduler: RolloutScheduler, engines: list[ActingEngine], batch: int, steps: int, pauses: bool) -> list[list[Group]]:
    """The trainer's side; with ``pauses`` every engine gives its requests back between steps."""
    running = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    scheduler.open()
    taken = []
    for step in range(steps):
        groups = await scheduler.buffer.take(batch, version=step, timeout_s=10_000.0, what=f"batch of step {step + 1}")
        taken.append(groups)
        scheduler.trained(groups)
        async with scheduler.updating(f"weights v{step + 1}"):
            if pauses:
                await scheduler.pause(range(len(engines)), "a switch", at_once=True)
            for engine in engines:
                engine.version = step + 1
            scheduler.resume(range(len(engines)))
        scheduler.advance(step + 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return taken


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a long run shrinks for minutes
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    steps=st.integers(1, 5),
    lag=st.integers(0, 2),
    engines=st.integers(1, 3),
    hosts=st.integers(1, 3),
    redundant=st.integers(0, 2),
    pauses=st.booleans(),
    engine_dies_s=st.one_of(st.none(), st.floats(1.0, 30.0)),
    host_lost_s=st.one_of(st.none(), st.floats(0.5, 30.0)),
    how_lost=st.sampled_from(["dies_at_s", "hangs_at_s", "stops_at_s"]),
    comes_back=st.booleans(),
    failing=st.integers(0, 6),
)
def test_any_run_trains_what_was_sampled_once_and_in_time(
    seed: int,
    batch: int,
    steps: int,
    lag: int,
    engines: int,
    hosts: int,
    redundant: int,
    pauses: bool,
    engine_dies_s: float | None,
    host_lost_s: float | None,
    how_lost: str,
    comes_back: bool,
    failing: int,
) -> None:
    script = Script(
        turns=lambda task: 1 + number(seed, task) % 4,
        delay_s=lambda task, turn: number(seed, task, turn) % 40 / 10,
        fails_at=lambda task: 1 + task % 2 if failing and number(task) % (2 + failing) == 0 else None,
        own_prompts=OWN_PROMPTS,
    )
    policies = [
        ActingEngine(
            f"engine-{i}",
            slots=1 + number(seed, i) % 4,
            token_s=0.5 + number(i, seed) % 3,
            dies_at_s=engine_dies_s if engine_dies_s and i == 1 else float("inf"),
        )
        for i in range(engines)
    ]
    loss: dict[str, Any] = {how_lost: host_lost_s} if host_lost_s else {}
    worlds = [ScriptedEnvironments(f"games-{i}", script, **(loss if i == 1 - comes_back else {})) for i in range(hosts)]
    scheduler = make(policies, worlds, batch, steps, lag, redundant, restarts=int(comes_back))
    taken = run_virtual(train(scheduler, policies, batch, steps, pauses))

    trained = Counter(group.trajectories[0].prompt.index for groups in taken for group in groups)
    assert set(trained.values()) == {1}
    assert len(trained) == batch * steps
    for step, groups in enumerate(taken):
        for group in groups:
            assert 0 <= step - group.oldest_version <= lag
            assert 2 <= len(group.trajectories) <= SAMPLES
            assert len({(t.prompt.source, t.prompt.metadata["seed"]) for t in group.trajectories}) == 1
            for trajectory in group.trajectories:
                check_exact(trajectory)
                assert trajectory.episode is not None
                own = trajectory.prompt.source in OWN_PROMPTS
                assert all(segment.is_prompt is (own and not segment.sampled) for segment in trajectory.segments)
                assert trajectory.reward.score == sum(turn.reward for turn in trajectory.episode.turns)
        arrays = arrange(groups, step)
        trained_tokens = arrays.token_ids[arrays.response_mask > 0]
        assert (trained_tokens < FIRST_GIVEN_TOKEN).all()
        assert np.count_nonzero(arrays.token_ids < FIRST_GIVEN_TOKEN) == trained_tokens.size
