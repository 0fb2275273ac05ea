"""The world of a job from a run that was measured: its seconds in place of arithmetic.

From the run's metrics.jsonl, medians over its second half: ``time/train_s`` with score and checkpoint, ``time/sync_s`` with what of it
stalls, ``time/reward_s`` by sample, lengths of responses. What a token takes follows from ``time/generate_s``: a simulated generation of
one batch with equal lengths, slots and engines takes so many tokens one after another. So the run has to be synchronous, as for
``rljob_runtime.commands.measured``. Training and generation scale with devices.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_api.rules.rollout import default_max_staleness
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_runtime.errors import SetupError
from rljob_runtime.report.metrics import MetricsTable, load_metrics
from rljob_runtime.simulation.costs import SEED, STEPS, WARMUP_STEPS, Simulated
from rljob_runtime.simulation.layout import Layout
from rljob_runtime.simulation.lengths import Lengths, log_normal, sigma_of
from rljob_runtime.simulation.running import simulate
from rljob_runtime.simulation.world import DecodeStep, World

LONG_RUN_STEPS = 12
"""Steps that are simulated at least: a measured job is small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Typical seconds and lengths of a step of a run."""

    step_s: float
    generate_s: float
    reward_s: float
    train_s: float
    """Scores, training and checkpoint."""
    sync_s: float
    stall_s: float
    """The part of a sync in which engines do not generate."""
    mean_tokens: float
    longest_tokens: float
    sequences: float


def read(metrics: Path) -> Measurement:
    """Of a run's metrics.jsonl.

    Raises:
        RuntimeFault: it cannot be read, or lacks a metric.
    """
    table = load_metrics(metrics)
    sync_s = _typical(table, "time/sync_s", metrics)
    beside_s = sum(_typical(table, f"time/{name}_s", metrics, 0.0) for name in ("score", "checkpoint"))
    return Measurement(
        step_s=_typical(table, "time/step_s", metrics),
        generate_s=_typical(table, "time/generate_s", metrics),
        reward_s=_typical(table, "time/reward_s", metrics),
        train_s=_typical(table, "time/train_s", metrics) + beside_s,
        sync_s=sync_s,
        stall_s=min(_typical(table, "sync/stall_s", metrics, sync_s), sync_s),
        mean_tokens=_typical(table, "response/mean_tokens", metrics),
        longest_tokens=_typical(table, "response/max_tokens", metrics),
        sequences=_typical(table, "rollout/sequences", metrics),
    )


def _typical(table: MetricsTable, name: str, path: Path, otherwise: float | None = None) -> float:
    """Median over the second half of the steps."""
    values = [value for value in table.column(name) if math.isfinite(value)]
    if not values:
        if otherwise is None:
            raise SetupError(f"{path}: no step has {name}; give the folder of a run that finished at least one step")
        return otherwise
    return statistics.median(values[len(values) // 2 :])


def simulated(spec: RLJobSpec, layout: Layout, found: Measurement, ran_on: Layout) -> Simulated:
    """The world of a job by the seconds of a run.

    Args:
        spec: of the job.
        layout: of its plan.
        found: what the run took.
        ran_on: the layout of the run.

    Raises:
        SetupError: the run did not generate before it trained, so that what a token takes is unknown.
    """
    rollout = spec.rollout
    if found.generate_s <= 0:
        raise SetupError("--measured: time/generate_s is 0 in most steps; give a run with overlap.asyncGenerationRatio 0")
    lengths = _lengths(spec, found)
    per_sample_s = found.reward_s / found.sequences
    world = World(
        groups_per_step=rollout.prompts_per_step,
        samples_per_group=rollout.samples_per_prompt,
        num_engines=layout.engines,
        slots=layout.slots,
        max_tokens=rollout.max_response_tokens,
        decode=DecodeStep(fixed_s=1.0),
        train_s=0.0,
        sync_s=found.stall_s,
        sync_hidden_s=found.sync_s - found.stall_s,
        recompute_token_s=0.0,
        reward_s=0.0,
        ratio=spec.overlap.async_generation_ratio,
        mode="Drain" if spec.overlap.update_mode is None else spec.overlap.update_mode.value,
        steps=WARMUP_STEPS + max(STEPS, LONG_RUN_STEPS),
        warmup_steps=WARMUP_STEPS,
        max_staleness=spec.overlap.max_staleness,
        reward_sample_s=per_sample_s,
        shares_devices=layout.shares_devices,
    )
    token_s = _token_s(world, lengths, found, ran_on)
    train_s = found.train_s * ran_on.trainer_devices / layout.trainer_devices
    world = replace(world, train_s=train_s, decode=DecodeStep(fixed_s=token_s, cache_s=0.0))
    basis = f"seconds of a measured run (step {found.step_s:.3g} s); responses {lengths.text}"
    return Simulated(world=world, lengths=lengths, unit_tokens=1, layout=layout, basis=basis)


def _lengths(spec: RLJobSpec, found: Measurement) -> Lengths:
    rollout = spec.rollout
    steps = WARMUP_STEPS + max(STEPS, LONG_RUN_STEPS) + default_max_staleness(spec.overlap.async_generation_ratio) + 2
    longest = max(round(found.longest_tokens), 1)
    sigma = sigma_of(mean=found.mean_tokens, longest=longest, count=round(found.sequences))
    return log_normal(
        mean=min(found.mean_tokens, longest),
        longest=longest,
        prompts=steps * rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        seed=SEED,
        sigma=sigma,
    )


def _token_s(world: World, lengths: Lengths, found: Measurement, ran_on: Layout) -> float:
    """What one token takes, so that a batch's generation alone takes ``generate_s`` on the engines of the run."""
    alone = replace(
        world,
        num_engines=ran_on.engines,
        slots=ran_on.slots,
        ratio=0.0,
        max_staleness=0,
        mode="Drain",
        sync_s=0.0,
        sync_hidden_s=0.0,
        reward_sample_s=0.0,
        shares_devices=False,
    )
    return found.generate_s / simulate(alone, lengths).step_s
