"""One simulated run: ``RolloutScheduler``, ``StalenessGate`` and ``TrajectoryBuffer`` as in a job, over engines that only take time.

:func:`simulate` is the loop of ``rljob_runtime.loop.driver`` with sleeps for the trainer's work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rljob_api.rules.rollout import default_max_staleness
from rljob_runtime.job.learning_settings import engine_capacity
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.fleet import FleetConfig
from rljob_runtime.overlap.scheduler import RolloutConfig, RolloutScheduler
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import IntArray, Prompt, RewardResult, Sampling
from rljob_runtime.simulation.engine import SimulatedEngine
from rljob_runtime.simulation.lengths import Lengths
from rljob_runtime.simulation.virtual_time import run_virtual
from rljob_runtime.simulation.world import Outcome, World

DEADLINE_S = 1e9
"""Virtual; no wait of a sound simulation comes near."""
PROMPT: IntArray = np.array([1, 2, 3], dtype=np.int32)
MORE_THAN_ANY = 1 << 40
"""Groups: at the end of a real run the engines run empty, which is not the steady state asked for."""


class _Prompts:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, count: int) -> list[Prompt]:
        first, self._next = self._next, self._next + count
        return [Prompt(index=i, text="", token_ids=PROMPT, answer="", source="simulated") for i in range(first, first + count)]

    def state(self) -> dict[str, object]:
        return {"next": self._next}


def simulate(world: World, lengths: Lengths) -> Outcome:
    """One run, in virtual time.

    Raises:
        AssertionError: the scheduler would hang.
        RuntimeFault: it failed.
    """
    began_s = time.process_time()
    outcome, engine_cpu_s = run_virtual(_run(world, lengths))
    outcome.scheduler_cpu_s = time.process_time() - began_s - engine_cpu_s
    return outcome


@dataclass(slots=True)
class _Log:
    """What the trainer's loop saw, by step."""

    ended_s: list[float] = field(default_factory=list)
    taken: list[list[Group]] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    stale: list[list[int]] = field(default_factory=list)
    dropped: int = 0
    used_before: list[tuple[float, float]] = field(default_factory=list)
    """Of each engine when the warm-up was over: busy seconds, slot seconds."""


async def _run(world: World, lengths: Lengths) -> tuple[Outcome, float]:
    scoring = asyncio.Lock()

    async def score(batch: RewardBatch) -> list[RewardResult]:
        if world.reward_sample_s:
            async with scoring:
                await asyncio.sleep(world.reward_sample_s * len(batch.sample_ids))
        if world.reward_s:
            await asyncio.sleep(world.reward_s)
        return [RewardResult(sample_id=name, score=1.0) for name in batch.sample_ids]

    engines = [SimulatedEngine(index, world, lengths) for index in range(world.num_engines)]
    staleness = default_max_staleness(world.ratio) if world.max_staleness is None else world.max_staleness
    scheduler = RolloutScheduler(
        prompts=_Prompts(),
        engines=engines,  # type: ignore[arg-type]
        score=score,
        gate=StalenessGate(
            groups_per_step=world.groups_per_step,
            async_generation_ratio=world.ratio,
            max_staleness=staleness,
            total_groups=MORE_THAN_ANY,
        ),
        config=RolloutConfig(
            samples_per_prompt=world.samples_per_group,
            sampling=Sampling(max_tokens=world.max_tokens),
            seed=0,
            fleet=fleet_config(world.slots, world.num_engines),
            drains=world.mode == "Drain",
            drain_timeout_s=DEADLINE_S,
        ),
    )
    running = asyncio.create_task(scheduler.run())
    log = _Log()
    scheduler.open()
    for step in range(world.steps):
        if step == world.warmup_steps:
            log.used_before = _used(engines)
        await _step(scheduler, engines, world, step, log)
    used = _used(engines)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return _outcome(world, log, used), sum(engine.cpu_s for engine in engines)


def fleet_config(slots: int, num_engines: int) -> FleetConfig:
    """The fleet settings that ``learning_settings.rollout_config`` makes."""
    return FleetConfig(capacities=(engine_capacity(slots),) * num_engines, stall_timeout_s=DEADLINE_S)


async def _step(scheduler: RolloutScheduler, engines: Sequence[SimulatedEngine], world: World, step: int, log: _Log) -> None:
    """Take, train, publish, advance: ``Driver._train_on`` without what takes no time."""
    loop = asyncio.get_running_loop()
    everyone = range(len(engines))
    began_s = loop.time()
    groups = await scheduler.buffer.take(world.groups_per_step, version=step, timeout_s=DEADLINE_S, what=f"batch of step {step + 1}")
    if world.shares_devices:
        await scheduler.pause(everyone, f"training of step {step + 1}")
        await asyncio.sleep(world.switch_s)
    log.waited_s.append(loop.time() - began_s)
    log.taken.append(groups)
    log.stale.append([step - group.oldest_version for group in groups])
    train_s = world.train_s + world.train_token_s * sum(trajectory.num_sampled for group in groups for trajectory in group.trajectories)
    log.trained_s.append(train_s)
    await asyncio.sleep(train_s)
    scheduler.trained(groups)
    await asyncio.sleep(world.sync_hidden_s)
    async with scheduler.updating(f"weights v{step + 1}"):
        await asyncio.sleep(max(engine.update(step + 1) for engine in engines))
    scheduler.advance(step + 1)
    if world.shares_devices:
        await asyncio.sleep(world.switch_s)
        scheduler.resume(everyone)
    log.dropped += scheduler.take_counters().groups_dropped
    log.ended_s.append(loop.time())


def _used(engines: Sequence[SimulatedEngine]) -> list[tuple[float, float]]:
    for engine in engines:
        engine.read_clock()
    return [(engine.busy_s, engine.slot_s) for engine in engines]


def _outcome(world: World, log: _Log, used: Sequence[tuple[float, float]]) -> Outcome:
    first = world.warmup_steps
    count = world.steps - first
    window_s = log.ended_s[-1] - log.ended_s[first - 1]
    trained = [(step, t) for step in range(first, world.steps) for group in log.taken[step] for t in group.trajectories]
    spans = [(step, span) for step, trajectory in trained for span in trajectory.version_spans]
    tokens = sum(span.end - span.start for _, span in spans)
    longest = [max(t.num_sampled for group in groups for t in group.trajectories) for groups in log.taken[first:]]
    busy_s, slot_s = (sum(after[i] - before[i] for before, after in zip(log.used_before, used, strict=True)) for i in (0, 1))
    return Outcome(
        step_s=window_s / count,
        step_times_s=[log.ended_s[i] - log.ended_s[i - 1] for i in range(first, world.steps)],
        staleness=[lag for lags in log.stale[first:] for lag in lags],
        token_staleness_mean=sum((step - span.version) * (span.end - span.start) for step, span in spans) / tokens,
        trained_groups=[group.group_id for groups in log.taken for group in groups],
        trainer_idle_share=sum(log.waited_s[first:]) / window_s,
        engine_idle_share=1 - busy_s / (world.num_engines * window_s),
        slot_use_share=tokens * world.token_s / (world.total_slots * window_s),
        running_mean=slot_s / busy_s if busy_s else 0.0,
        train_s=sum(log.trained_s[first:]) / count,
        tokens_per_step=tokens / count,
        longest_tokens=sum(longest) / count,
        dropped_groups=log.dropped,
        requests=sum(len(group.trajectories) for groups in log.taken for group in groups),
        scheduler_cpu_s=0.0,
    )
