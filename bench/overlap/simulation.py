"""The simulation's questions, each a list of rows: throughput and staleness over the ratio, the speed-up over one set of devices, what
becomes of running responses, and the scheduler's own cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.overlap import lengths as lengths_module
from bench.overlap.bounds import Workload, expected_staleness, exponent, least_step_s, loop_s, promised_step_s, workload
from bench.overlap.lengths import DISTRIBUTIONS, MAX_TOKENS, MEAN_TOKENS
from rljob_runtime.simulation.lengths import Lengths
from rljob_runtime.simulation.running import simulate
from rljob_runtime.simulation.world import DecodeStep, Outcome, UpdateMode, World

Say = Callable[[str], None]

GROUPS, SAMPLES, ENGINES, SLOTS = 32, 8, 4, 16
TOKEN_S = 0.04
SYNC_S = 0.5
RECOMPUTE_TOKEN_S = TOKEN_S / 200
"""A prefill makes about so many tokens in the time of one decoding step."""
GENERATE_S = GROUPS * SAMPLES * MEAN_TOKENS * TOKEN_S / (ENGINES * SLOTS)
RATIOS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
BALANCES = {"engines bound": 2 / 3, "balanced": 1.0, "trainer bound": 1.5}
"""Seconds of training over seconds of generation."""
STEPS = 80
"""Measured ones."""
WARMUP_STEPS = 30
"""Until the gate's room is filled where the trainer binds: 8 steps ahead at half a step per step."""
SEED = 11
IN_FLIGHT = (1_000, 3_000, 10_000, 30_000)
COST_SLOTS = 256
"""Of an engine, where the number of engines grows."""
COST_ENGINES = 8
"""Where the slots grow."""
COST_STEPS = 8


def world(*, ratio: float, balance: float = 1.0, steps: int = STEPS, mode: UpdateMode = "InFlight") -> World:
    """The configuration of every figure; ``balance`` is training over generation."""
    return World(
        groups_per_step=GROUPS,
        samples_per_group=SAMPLES,
        num_engines=ENGINES,
        slots=SLOTS,
        max_tokens=MAX_TOKENS,
        decode=DecodeStep(fixed_s=TOKEN_S),
        train_s=balance * GENERATE_S,
        sync_s=SYNC_S,
        recompute_token_s=RECOMPUTE_TOKEN_S,
        reward_s=0.0,
        ratio=ratio,
        mode=mode,
        steps=WARMUP_STEPS + steps,
        warmup_steps=WARMUP_STEPS,
    )


def tables(steps: int) -> dict[str, Lengths]:
    """Lengths by distribution: more prompts than any run asks for."""
    prompts = (WARMUP_STEPS + steps + math.ceil(max(RATIOS)) + 2) * GROUPS
    return {name: lengths_module.make(name, prompts=prompts, samples=SAMPLES, seed=SEED) for name in DISTRIBUTIONS}


def row(setting: World, lengths: Lengths) -> dict[str, Any]:
    """One run beside its bounds."""
    load = workload(setting, lengths)
    outcome = simulate(setting, lengths)
    least = least_step_s(setting, load)
    bound_s = max(least.values())
    mean = sum(outcome.staleness) / len(outcome.staleness)
    unlimited_s = max(load.generate_s + setting.sync_s, loop_s(setting))
    return {
        "lengths": lengths.name,
        "ratio": setting.ratio,
        "mode": setting.mode,
        "samples_per_s": setting.samples_per_step / outcome.step_s,
        "step_s": outcome.step_s,
        "bound_s": bound_s,
        "binds": max(least, key=lambda name: least[name]),
        "promised_s": promised_step_s(setting, load),
        "unlimited_s": unlimited_s,
        "share_of_bound": bound_s / outcome.step_s,
        "share_of_unlimited": unlimited_s / outcome.step_s,
        "staleness_mean": mean,
        "staleness_max": max(outcome.staleness),
        "staleness_expected": expected_staleness(setting, load),
        "token_staleness_mean": outcome.token_staleness_mean,
        "trainer_idle_share": outcome.trainer_idle_share,
        "slot_use_share": outcome.slot_use_share,
        "dropped_groups": outcome.dropped_groups,
    }


def ratios(steps: int, say: Say) -> list[dict[str, Any]]:
    """Every distribution, balance and ratio."""
    found = []
    for balance, factor in BALANCES.items():
        for lengths in tables(steps).values():
            say(f"{balance}, {lengths.name}")
            found += [{"balance": balance, **row(world(ratio=ratio, balance=factor, steps=steps), lengths)} for ratio in RATIOS]
    return found


def speed_up(steps: int, say: Say) -> list[dict[str, Any]]:
    """One set of devices: all of it for each phase in turn, against a half for each.

    Both phases weigh the same, so that halves are the best division (beta* = 1/2), and doubling the engines halves the time of
    training too.
    """
    found = []
    for lengths in tables(steps).values():
        say(f"one set of devices, {lengths.name}")
        apart = world(ratio=0.0, steps=steps)
        whole = replace(apart, num_engines=2 * ENGINES, train_s=apart.train_s / 2)
        load, halves = workload(whole, lengths), workload(apart, lengths)
        turns_s = simulate(whole, lengths).step_s
        limit_s = load.generate_s + whole.train_s
        found.append(
            {
                "lengths": lengths.name,
                "generate_s": load.generate_s,
                "train_s": whole.train_s,
                "longest_s": load.longest_s,
                "turns_s": turns_s,
                "turns_bound_s": load.generate_s + load.longest_s + loop_s(whole),
                "turns_dealt_s": load.dealt_s + loop_s(whole),
                "limit_s": limit_s,
                "s_max": 1 + (load.longest_s + whole.sync_s) / limit_s,
                "overlapped": [
                    {"ratio": ratio, "step_s": step_s, "speed_up": turns_s / step_s, "share_of_limit": _limit_s(apart, halves) / step_s}
                    for ratio in RATIOS[2:]
                    for step_s in [simulate(replace(apart, ratio=ratio), lengths).step_s]
                ],
            }
        )
    return found


def _limit_s(setting: World, load: Workload) -> float:
    """No step is shorter with any ratio: the devices' work, dealt out evenly."""
    return (load.generate_s + setting.train_s) / 2


def modes(steps: int, say: Say) -> list[dict[str, Any]]:
    """What becomes of running responses when weights change."""
    lengths = tables(steps)["log-normal"]
    say("update modes")
    names: tuple[UpdateMode, ...] = ("Drain", "Interrupt", "InFlight")
    return [row(world(ratio=ratio, steps=steps, mode=mode), lengths) for mode in names for ratio in (1.0, 2.0, 4.0)]


def cost(sizes: Sequence[int], say: Say) -> dict[str, Any]:
    """Processor time per request of scheduler and event loop, over requests in flight."""
    kinds: dict[str, Callable[[int], tuple[int, int]]] = {
        f"engines of {COST_SLOTS} slots": lambda size: (max(size // COST_SLOTS, 1), COST_SLOTS),
        f"{COST_ENGINES} engines": lambda size: (COST_ENGINES, size // COST_ENGINES),
    }
    found: dict[str, Any] = {}
    for kind, shape in kinds.items():
        points = []
        for size in sizes:
            say(f"cost: {size} requests in flight, {kind}")
            engines, slots = shape(size)
            setting = _cost_world(size, engines, slots)
            lengths = lengths_module.make("log-normal", prompts=4096, samples=SAMPLES, seed=SEED)
            best = min((simulate(setting, lengths) for _ in range(2)), key=lambda outcome: outcome.scheduler_cpu_s)
            points.append(_cost_point(size, engines, best))
        values = [point["us_per_request"] for point in points]
        found[kind] = {"points": points, "exponent": exponent(sizes, values) if len(sizes) > 1 else None}
    return found


def _cost_world(in_flight: int, engines: int, slots: int) -> World:
    groups = in_flight // (2 * SAMPLES)
    generate_s = groups * SAMPLES * MEAN_TOKENS * TOKEN_S / (engines * slots)
    return replace(
        world(ratio=1.0),
        groups_per_step=groups,
        num_engines=engines,
        slots=slots,
        train_s=generate_s / 2,
        steps=COST_STEPS + 1,
        warmup_steps=1,
    )


def _cost_point(in_flight: int, engines: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "in_flight": in_flight,
        "engines": engines,
        "requests": outcome.requests,
        "us_per_request": outcome.scheduler_cpu_s / outcome.requests * 1e6,
    }


def measure(steps: int, sizes: Sequence[int], say: Say) -> dict[str, Any]:
    """Everything."""
    return {
        "configuration": asdict(world(ratio=0.0, steps=steps)) | {"ratio": list(RATIOS), "mode": "InFlight", "token_s": TOKEN_S},
        "lengths": [
            {
                "name": table.name,
                "text": table.text,
                "mean_tokens": float(table.table.mean()),
                "variation": lengths_module.spread(table.table),
                "group_longest_tokens": table.group_mean_max_tokens(),
            }
            for table in tables(steps).values()
        ],
        "ratios": ratios(steps, say),
        "speed_up": speed_up(steps, say),
        "modes": modes(steps, say),
        "cost": cost(sizes, say),
    }
