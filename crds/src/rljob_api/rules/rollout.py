"""Rules about generation: groups, overlap with training, validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import PlacementChoice, Role
from rljob_api.v1alpha1.learning import DEFAULT_TOP_K, MAX_TOP_K
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_api.v1alpha1.rljob import Pipeline, RLJobSpec
from rljob_api.vocabulary import GroupRouting, StandbyProcesses

MAX_GROUP = 4096
"""Samples of one prompt, redundant ones included."""


def default_max_staleness(async_generation_ratio: float) -> int:
    """The bound where none is given: at least the ratio, so that nothing has to be dropped for it."""
    return math.ceil(async_generation_ratio)


def max_staleness(spec: RLJobSpec) -> int:
    """Versions by which a trained token may be behind: what the spec says, or what its ratio comes to."""
    given = spec.overlap.max_staleness
    return default_max_staleness(spec.overlap.async_generation_ratio) if given is None else given


def _groups(spec: RLJobSpec) -> Iterator[FieldError]:
    samples, redundant, path = spec.rollout.samples_per_prompt, spec.rollout.redundant_samples, "spec.rollout"
    if samples + redundant > MAX_GROUP:
        problem = f"makes with samplesPerPrompt {samples} more than {MAX_GROUP} responses to one prompt"
        yield _error(f"{path}.redundantSamples", redundant, problem, f"use at most {MAX_GROUP - samples}")
    if spec.rollout.group_routing is GroupRouting.TOGETHER and samples + redundant == 1:
        problem = "has no effect, samplesPerPrompt is 1, so a group is a single response"
        yield _error(f"{path}.groupRouting", GroupRouting.TOGETHER, problem, "remove it, or sample several responses per prompt")


def _sampling(spec: RLJobSpec) -> Iterator[FieldError]:
    """What topP and minP leave must have a bound: it travels to the trainer."""
    rollout = spec.rollout
    if rollout.top_k == 0 and rollout.leaves_out_tokens:
        field, value = ("topP", rollout.top_p) if rollout.top_p < 1 else ("minP", rollout.min_p)
        problem = f"leaves no bound to the tokens that {field} ({value:g}) keeps, whose ids the trainer needs for the policy's log-probs"
        yield _error("spec.rollout.topK", 0, problem, f"remove it for {DEFAULT_TOP_K}, or write 2 to {MAX_TOP_K}")
    greedy = "keeps only the most likely token: the samples of a prompt are equal, and nothing is learned from them"
    if rollout.top_k == 1 and not spec.validates_only:
        yield _error("spec.rollout.topK", 1, greedy, f"write 2 to {MAX_TOP_K}, or remove it")
    if rollout.min_p == 1 and not spec.validates_only:
        yield _error("spec.rollout.minP", 1, greedy, "write less, for example 0.05, or 0 to switch it off")


def _group_filter(spec: RLJobSpec) -> Iterator[FieldError]:
    chosen, path, samples = spec.rollout.group_filter, "spec.rollout.groupFilter", spec.rollout.samples_per_prompt
    if chosen is None:
        return
    if chosen.min_mean is None and chosen.max_mean is None and chosen.min_std is None:
        yield _error(path, None, "has no bound and leaves no group out", "give minMean, maxMean or minStd, or remove it")
    if chosen.min_mean is not None and chosen.max_mean is not None and chosen.min_mean >= chosen.max_mean:
        problem = f"is not below maxMean, {chosen.max_mean:g}, so that no group is trained"
        yield _error(f"{path}.minMean", chosen.min_mean, problem, "write a smaller one, or a larger maxMean")
    if chosen.min_std is not None and samples == 1:
        problem = "leaves out every group: with samplesPerPrompt 1 the scores of a group do not deviate"
        yield _error(f"{path}.minStd", chosen.min_std, problem, "remove it, or sample 2 or more responses per prompt")


def _routing(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Where there is one engine, everything goes there; how many the planner chooses may change."""
    if spec.rollout.group_routing is not GroupRouting.TOGETHER:
        return
    rollouts = plan.with_role(Role.ROLLOUT)
    chosen = any(component.placement.mode is PlacementChoice.AUTO for _, component in spec.with_role(Role.ROLLOUT))
    if not chosen and sum(component.world_size for component in rollouts) == 1:
        problem = f"has no effect, {rollouts[0].name} is a single engine"
        yield _error("spec.rollout.groupRouting", GroupRouting.TOGETHER, problem, "remove it, or add engines")


def _standby(spec: RLJobSpec) -> Iterator[FieldError]:
    rollout = spec.rollout
    if rollout.standby_processes is StandbyProcesses.PER_NODE and rollout.max_engine_restarts == 0:
        problem = "has no effect: maxEngineRestarts is 0, and no engine is replaced"
        yield _error("spec.rollout.standbyProcesses", rollout.standby_processes, problem, "remove it, or allow restarts")


def _update_mode(spec: RLJobSpec) -> Iterator[FieldError]:
    """What happens to running responses matters only where some are running."""
    mode, ratio = spec.overlap.update_mode, spec.overlap.async_generation_ratio
    validates = spec.validation.every_steps > 0 and not spec.validation.pause_generation
    if ratio == 0 and not spec.rollout.extra_prompts and not validates and mode is not UpdateMode.DRAIN:
        problem = "has no effect: with asyncGenerationRatio 0 no response is running when weights change"
        yield _error("spec.overlap.updateMode", mode, problem, "remove it, or write asyncGenerationRatio: 1")


def _staleness(spec: RLJobSpec) -> Iterator[FieldError]:
    """A bound must leave something to train, and have something to bound."""
    bound, ratio, path = spec.overlap.max_staleness, spec.overlap.async_generation_ratio, "spec.overlap.maxStaleness"
    if bound == 0 and ratio > 0:
        problem = f"drops all that asyncGenerationRatio ({ratio:g}) generates ahead"
        yield _error(path, bound, problem, f"write {default_max_staleness(ratio)} or more, or asyncGenerationRatio: 0")
    if bound is not None and bound > 0 and ratio == 0 and not spec.rollout.extra_prompts:
        problem = "has no effect: with asyncGenerationRatio 0 nothing is generated ahead"
        yield _error(path, bound, problem, "remove it, or write asyncGenerationRatio: 1")


def _validation(spec: RLJobSpec) -> Iterator[FieldError]:
    """Settings and prompts of validation need each other."""
    validation, path = spec.validation, "spec.validation"
    is_agentic = spec.pipeline is Pipeline.AGENTIC
    if validation.every_steps == 0 and not spec.validates_only:
        if spec.data.validation and not is_agentic:
            problem = "is never asked, validation.everySteps is 0"
            yield _error("spec.data.validation", None, problem, "set validation.everySteps, or remove it")
        for field, value in validation.changed().items():
            yield _error(f"{path}.{field}", value, "has no effect, validation.everySteps is 0", "remove it, or set everySteps")
        return
    if not spec.data.validation and not spec.validates_only and not is_agentic:
        problem = "has nothing to ask, data.validation is empty"
        yield _error(f"{path}.everySteps", validation.every_steps, problem, "add data.validation, or write 0")
    if validation.temperature == 0 and validation.samples_per_prompt > 1:
        problem = "samples equal responses: temperature 0 is greedy"
        yield _error(f"{path}.samplesPerPrompt", validation.samples_per_prompt, problem, "write 1, or set validation.temperature")
    for field, value, plain in (("topP", validation.top_p, 1), ("topK", validation.top_k, 0)):
        if validation.temperature == 0 and value != plain:
            problem = "has no effect: temperature 0 is greedy"
            yield _error(f"{path}.{field}", value, problem, "remove it, or set validation.temperature")
    limit = spec.rollout.max_response_tokens
    if validation.max_response_tokens is not None and validation.max_response_tokens > limit:
        problem = f"is more than rollout.maxResponseTokens ({limit}), for which engines have room"
        yield _error(f"{path}.maxResponseTokens", validation.max_response_tokens, problem, f"use at most {limit}")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _groups,
    _sampling,
    _group_filter,
    _standby,
    _update_mode,
    _staleness,
    _validation,
)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_routing,)
"""Rules that need to know how many processes there are."""
