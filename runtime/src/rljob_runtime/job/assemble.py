"""Wires the loop's parts over running workers: data, scheduler, publisher, learning rule, validation.

::

    spec ── *_settings ──> settings ─┐
    workers of launch ───────────────┼──> scheduler, publisher, batch builder, validator ──> Parts of the Driver
    state of a checkpoint ───────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.dtypes import engine_dtypes, sync_dtype
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_runtime.data.source import PromptSource, open_rows
from rljob_runtime.errors import WorkerLostError
from rljob_runtime.job import learning_settings, worker_settings
from rljob_runtime.job.launch import load_tokenizer
from rljob_runtime.job.models import LOCAL, ModelSources, with_folders
from rljob_runtime.loop.batch_builder import BatchBuilder
from rljob_runtime.loop.checkpointing import Checkpoints, DriverState
from rljob_runtime.loop.driver import IO_TIMEOUT_S, NO_DEADLINE_S, LoopConfig, Parts
from rljob_runtime.loop.evaluation import Evaluation
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.reward_router import RewardRouter
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.scheduler import RolloutConfig, RolloutScheduler, ScoreResponses
from rljob_runtime.overlap.validation import Validator
from rljob_runtime.records import Prompt
from rljob_runtime.report import Level, Reporter
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits, default_limits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transports import transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_TOKENS = 64
"""Tokens of one probe sequence at most."""

RETRIED = 2
"""A reward that runs past its limit is tried once more."""
REPLACED_S = 10.0
"""Allowed for a fresh scoring process after each."""

Decode = Callable[[list[tuple[int, ...]]], list[str]]


async def assemble(
    spec: RLJobSpec,
    workers: JobWorkers,
    store: Checkpoints,
    state: DriverState | None,
    reporter: Reporter,
    job_folder: Path | None = None,
    sources: ModelSources = LOCAL,
) -> tuple[Parts, LoopConfig]:
    """Wire the loop's parts over running workers; ``state`` is where a resumed run goes on, ``sources`` where the tokenizer comes from.

    Raises:
        DataError: of the data, or of a saved position that is not of this data.
        ModelError: the tokenizer cannot be loaded.
        PluginError: a Custom advantage estimator cannot be imported.
    """
    tokenizer = await asyncio.to_thread(load_tokenizer, with_folders(spec, sources.here))
    source = await asyncio.to_thread(training_source, spec, tokenizer)
    probe = _probe(spec, source.next(spec.weight_sync.probe.sequences))
    source = await asyncio.to_thread(training_source, spec, tokenizer)
    if state is not None:
        source.restore(state.source_state)
    decode: Decode = partial(_decode, tokenizer)
    score = _router(spec, workers).score
    scheduler = RolloutScheduler(
        prompts=source,
        decode=decode,
        engines=workers.engines,
        score=score,
        gate=learning_settings.staleness_gate(spec, state.step if state else 0),
        config=_rollout_config(spec, workers),
        next_group_id=state.next_group_id if state else 0,
        done=state.done if state else (),
        on_lost=partial(_log_loss, workers, reporter),
    )
    publisher = WeightPublisher(
        trainers=workers.trainer.workers,
        engines=workers.engines,
        manifest=plan_buckets(await _weight_specs(spec, workers), spec.weight_sync.bucket_bytes),
        transport=transport(spec.weight_sync.backend),
        timeout_s=spec.weight_sync.timeout_seconds,
        probe=probe,
        on_running="keep" if spec.overlap.update_mode is UpdateMode.IN_FLIGHT else "recompute",
        goes_on_without=partial(goes_on_without, scheduler.fleet),
    )
    parts = Parts(
        workers=workers,
        scheduler=scheduler,
        publisher=publisher,
        batches=_batch_builder(spec, workers, state, job_folder),
        validator=await asyncio.to_thread(_validator, spec, tokenizer, scheduler.fleet, decode, score),
        checkpoints=store,
        reporter=reporter,
    )
    return parts, _loop_config(spec)


async def _weight_specs(spec: RLJobSpec, workers: JobWorkers) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, types and shapes of what the trainer sends."""
    specs = await workers.trainer.workers[0].call("weight_specs", timeout_s=IO_TIMEOUT_S)
    return [(name, sync_dtype(spec).value, shape) for name, _, shape in specs]


async def assemble_evaluation(spec: RLJobSpec, workers: JobWorkers, reporter: Reporter, sources: ModelSources = LOCAL) -> Evaluation:
    """Wire a validation-only run over running workers; ``sources`` is where the tokenizer comes from.

    Raises:
        DataError: of the data.
        ModelError: the tokenizer cannot be loaded.
    """
    tokenizer = await asyncio.to_thread(load_tokenizer, with_folders(spec, sources.here))
    fleet = EngineFleet(workers.engines, config=_rollout_config(spec, workers).fleet, on_lost=partial(_log_loss, workers, reporter))
    validator = Validator(
        fleet=fleet,
        prompts=await asyncio.to_thread(validation_prompts, spec, tokenizer),
        decode=partial(_decode, tokenizer),
        score=_router(spec, workers).score,
        config=learning_settings.validation_config(spec),
    )
    return Evaluation(workers=workers, fleet=fleet, validator=validator, reporter=reporter)


def _rollout_config(spec: RLJobSpec, workers: JobWorkers) -> RolloutConfig:
    num_engines = {component.group.name: len(component.workers) for component in workers.with_role(Role.ROLLOUT)}
    return learning_settings.rollout_config(spec, num_engines, survives_engine_loss=not workers.leased_engines)


def _router(spec: RLJobSpec, workers: JobWorkers) -> RewardRouter:
    return RewardRouter(workers.rewards, RETRIED * sum(r.timeout_seconds + REPLACED_S for r in spec.rewards))


def _log_loss(workers: JobWorkers, reporter: Reporter, index: int, error: WorkerLostError) -> None:
    reporter.event(f"{workers.engines[index].name} is gone, the other engines go on with its responses: {error}", Level.WARNING)


def training_source(spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """The training prompts."""
    return PromptSource(
        [worker_settings.source_config(s) for s in spec.data.train],
        tokenizer,
        seed=spec.seed,
        max_prompt_tokens=spec.rollout.max_prompt_tokens,
        prompt_format=worker_settings.prompt_format(spec),
    )


def validation_prompts(spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The validation prompts: the first ``maxPrompts`` of a seeded order, each at most once."""
    sources = [worker_settings.source_config(s) for s in spec.data.validation]
    available = sum(len(open_rows(source, spec.seed)) for source in sources)
    source = PromptSource(
        sources,
        tokenizer,
        seed=spec.seed,
        max_prompt_tokens=spec.rollout.max_prompt_tokens,
        prompt_format=worker_settings.prompt_format(spec),
    )
    prompts = source.next(min(spec.validation.max_prompts, available))
    seen: dict[tuple[str, str], Prompt] = {}
    for prompt in prompts:  # where some were too long the order begins again
        seen.setdefault((prompt.source, prompt.text), prompt)
    return list(seen.values())


def _validator(
    spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase, fleet: EngineFleet, decode: Decode, score: ScoreResponses
) -> Validator | None:
    if not spec.validation.every_steps:
        return None
    config = learning_settings.validation_config(spec)
    return Validator(fleet=fleet, prompts=validation_prompts(spec, tokenizer), decode=decode, score=score, config=config)


def _batch_builder(spec: RLJobSpec, workers: JobWorkers, state: DriverState | None, job_folder: Path | None) -> BatchBuilder:
    rule = Rule(learning_settings.rule_config(spec, job_folder))
    if state is not None:
        rule.restore(state.rule_state)
    trainer = workers.trainer
    return BatchBuilder(
        rule=rule,
        workers=workers,
        batching=learning_settings.batching_config(spec, len(trainer.workers) // trainer.ranks_per_share),
        timeout_s=spec.training.step_timeout_seconds,
    )


def _loop_config(spec: RLJobSpec) -> LoopConfig:
    return LoopConfig(
        total_steps=spec.training.steps,
        groups_per_step=spec.rollout.prompts_per_step,
        step_timeout_s=spec.training.step_timeout_seconds,
        take_timeout_s=spec.active_deadline_seconds or NO_DEADLINE_S,
        checkpoint_every_steps=spec.checkpoint.every_steps,
        critic_warmup_steps=learning_settings.critic_warmup_steps(spec),
        spec_fingerprint=worker_settings.spec_fingerprint(spec),
    )


def _probe(spec: RLJobSpec, prompts: Sequence[Prompt]) -> ProbeConfig:
    """Probes are the first prompts of the data, cut to a length that costs nothing."""
    wanted = spec.weight_sync.probe
    mean, tail = default_limits({dtype.value for dtype in (spec.model.dtype, *engine_dtypes(spec))})
    return ProbeConfig(
        every_syncs=wanted.every_syncs,
        limits=ProbeLimits(
            mean=wanted.mean_difference or mean,
            tail=wanted.tail_difference or tail,
            fail_factor=wanted.fail_factor,
            fail_after=wanted.fail_after,
        ),
        sequences=tuple(p.token_ids[:PROBE_TOKENS] for p in prompts if len(p.token_ids) > 1),
    )


def goes_on_without(fleet: EngineFleet, index: int, error: WorkerLostError) -> bool:
    """Have the fleet go on without an engine that is gone; False where there is no other."""
    try:
        fleet.lose(index, error)
    except WorkerLostError:
        return False
    return True


def _decode(tokenizer: PreTrainedTokenizerBase, responses: list[tuple[int, ...]]) -> list[str]:
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))
