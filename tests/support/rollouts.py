"""A real rollout scheduler over engines that a test makes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import Any

from rljob_runtime.overlap.fleet import FleetConfig
from rljob_runtime.overlap.prompt_order import Prompts
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.scheduler import RolloutConfig, RolloutScheduler
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult, Sampling
from tests.support.fake_workers import CountingPrompts, ScriptedRewards

Score = Callable[[RewardBatch], Awaitable[list[RewardResult]]]
ROLLOUT = MappingProxyType({"samples_per_prompt": 2, "sampling": Sampling(max_tokens=8), "seed": 5})


def make_gate(groups_per_step: int, ratio: float, steps: int, **changes: Any) -> StalenessGate:
    """The staleness bound that follows from the ratio, and as many groups as the steps train."""
    settings = {
        "groups_per_step": groups_per_step,
        "async_generation_ratio": ratio,
        "max_staleness": ceil(ratio),
        "total_groups": groups_per_step * steps,
    }
    return StalenessGate(**settings | changes)


def make_scheduler(
    engines: Sequence[Any],
    gate: StalenessGate,
    *,
    rollout: Mapping[str, Any] = MappingProxyType({}),
    fleet: Mapping[str, Any] = MappingProxyType({}),
    prompts: Prompts | None = None,
    score: Score | None = None,
    **options: Any,
) -> RolloutScheduler:
    """Prompts 0, 1, 2, ... to these engines, two samples each; every second sample is right.

    Args:
        engines: fakes; each takes more requests than any test has, if ``fleet`` does not say otherwise.
        gate: see :func:`make_gate`.
        rollout: fields of ``RolloutConfig``.
        fleet: fields of ``FleetConfig``.
        prompts: to look at afterwards.
        score: of responses; environments, where there are some, score themselves.
        options: further arguments of ``RolloutScheduler``.
    """
    capacities = (Capacity(slots=256),) * len(engines)
    fleet_config = FleetConfig(**{"capacities": capacities, "stall_timeout_s": 60.0, **fleet})
    return RolloutScheduler(
        prompts=prompts or CountingPrompts(),
        engines=engines,
        score=score or (None if options.get("environments") else ScriptedRewards().score),
        gate=gate,
        config=RolloutConfig(**{**ROLLOUT, "fleet": fleet_config, **rollout}),
        **options,
    )
