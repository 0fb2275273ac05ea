"""What a weight sync costs the responses that run meanwhile, for ``rljob plan``."""

from __future__ import annotations

import math

from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import Engine, Role
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_api.v1alpha1.rljob import RLJobSpec


def running_responses(spec: RLJobSpec, plan: Plan) -> int:
    """Most responses that are running when weights change: those of the groups generated ahead, as far as engines have places for them."""
    rollout = spec.rollout
    groups = math.ceil(spec.overlap.async_generation_ratio * rollout.prompts_per_step) + rollout.extra_prompts
    sizes = {component.name: component.world_size for component in plan.components}
    places = sum((c.engine or Engine()).max_running_requests * sizes[c.name] for _, c in spec.with_role(Role.ROLLOUT))
    return min(groups * (rollout.samples_per_prompt + rollout.redundant_samples), places)


def overlap_cost(spec: RLJobSpec, plan: Plan) -> str | None:
    """One line; None where nothing is generated ahead."""
    if spec.overlap.async_generation_ratio == 0:
        return None
    rollout, mode = spec.rollout, spec.overlap.update_mode
    running = running_responses(spec, plan)
    tokens = running * (rollout.max_prompt_tokens + rollout.max_response_tokens)
    costs = {
        UpdateMode.DRAIN: f"waits for the longest response, up to {rollout.max_response_tokens:,} tokens one after another, while other "
        "slots are idle; Interrupt does not wait",
        UpdateMode.INTERRUPT: f"recomputes the KV cache of up to {tokens:,} tokens ({running:,} responses); InFlight recomputes none, "
        "but mixes caches of several versions",
        UpdateMode.IN_FLIGHT: f"costs running responses nothing; up to {running:,} of them continue with the cache of older weights",
    }
    return f"updateMode {mode}: each weight sync {costs[mode or UpdateMode.DRAIN]}."
