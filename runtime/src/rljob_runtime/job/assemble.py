"""Wires the loop's parts over running workers: data, scheduler, publisher, learning rule, validation.

::

    spec ── *_settings ──> settings ─┐
    workers of launch ───────────────┼──> scheduler, publisher, batch builder, validator ──> Parts of the Driver
    state of a checkpoint ───────────┘
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.adapters import serves_adapters
from rljob_api.dtypes import engine_dtypes, sync_dtype
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_runtime.cluster.protocol import Pending, Worker, gather_all
from rljob_runtime.data.source import PromptSource
from rljob_runtime.data.tokenizer import decode, tokenizer_files
from rljob_runtime.errors import WorkerLostError
from rljob_runtime.job import episodes, learning_settings, supervision, worker_settings
from rljob_runtime.job.journal import run_journal
from rljob_runtime.job.judge_settings import longest_question_s
from rljob_runtime.job.launch import load_tokenizer
from rljob_runtime.job.models import LOCAL, ModelSources, with_folders
from rljob_runtime.journal.writing import Journal
from rljob_runtime.loop.batch_builder import BatchBuilder
from rljob_runtime.loop.checkpointing import Checkpoints, DriverState
from rljob_runtime.loop.driver import NO_DEADLINE_S, LoopConfig, Parts
from rljob_runtime.loop.evaluation import Evaluation
from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.saving import IO_TIMEOUT_S
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.overlap.episodes import Environments
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.reward_router import RewardRouter
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.scheduler import RolloutConfig, RolloutScheduler, ScoreResponses
from rljob_runtime.overlap.scoring_gate import ScoringGate
from rljob_runtime.overlap.tasks import TaskOrder
from rljob_runtime.overlap.validation import Validator
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import Prompt, RewardResult
from rljob_runtime.report import Level, Reporter
from rljob_runtime.rewards.judging.config import Served
from rljob_runtime.weightsync.packing import plan_buckets, tensor_bytes
from rljob_runtime.weightsync.probe import ProbeLimits, default_limits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.shares import bucket_bytes
from rljob_runtime.weightsync.transport import TransportSettings
from rljob_runtime.weightsync.transports import transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_TOKENS = 64
"""Tokens of one probe sequence at most."""

RUN_DIGITS = 12
"""Of a run's name in what it leaves on a machine."""
RETRIED = 2
"""A reward that runs past its limit is tried once more."""
REPLACED_S = 10.0
"""Allowed for a fresh scoring process after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What training and validation-only runs are both wired from."""

    spec: RLJobSpec
    workers: JobWorkers
    tokenizer: PreTrainedTokenizerBase
    environments: Environments | None
    """Of an agentic job."""
    score: ScoreResponses | None
    """None where environments score."""
    gate: ScoringGate | None
    """In front of what judges on shared devices score."""
    preparing: list[Pending]
    """Calls of reward workers, under way."""
    announce: Callable[[str], None]
    """Shows a line about prompts to the user; any thread."""

    @classmethod
    async def begin(cls, spec: RLJobSpec, workers: JobWorkers, reporter: Reporter, sources: ModelSources) -> _Job:
        """Have reward workers prepare, load the tokenizer, find out about environments."""
        preparing = await _prepare_rewards(spec, workers, sources)
        tokenizer = await asyncio.to_thread(load_tokenizer, with_folders(spec, sources.here))
        environments = await episodes.environments(spec, workers, reporter)
        score = None if environments else _router(spec, workers).score if spec.rewards else unscored
        gate = None
        if score is not None and workers.leased_judges:
            gate = ScoringGate(score)
            score = gate.score
        return cls(
            spec=spec,
            workers=workers,
            tokenizer=tokenizer,
            environments=environments,
            score=score,
            gate=gate,
            preparing=preparing,
            announce=shown_once(partial(reporter.event, level=Level.WARNING)),
        )

    def judging(self, fleet: EngineFleet) -> Judging | None:
        """When judges on shared devices score; None where there are none."""
        return None if self.gate is None else Judging(workers=self.workers, gate=self.gate, fleet=fleet)

    def source(self) -> PromptSource | TaskOrder:
        """Training prompts, from the first one on. Reads files."""
        return episodes.training_tasks(self.spec) if self.environments else training_source(self.spec, self.tokenizer, self.announce)

    def validator(self, fleet: EngineFleet) -> Validator:
        """Asks ``fleet``. Reads files."""
        environments = self.environments
        return Validator(
            fleet=fleet,
            prompts=episodes.validation_tasks(self.spec) if environments else validation_prompts(self.spec, self.tokenizer, self.announce),
            score=self.score,
            environments=self.environments,
            config=learning_settings.validation_config(self.spec),
        )


async def assemble(
    spec: RLJobSpec,
    workers: JobWorkers,
    store: Checkpoints,
    state: DriverState | None,
    reporter: Reporter,
    job_folder: Path | None = None,
    sources: ModelSources = LOCAL,
    journal_folder: Path | None = None,
    run_folder: Path | None = None,
) -> tuple[Parts, LoopConfig]:
    """Wire the loop's parts over running workers.

    Args:
        spec: of the job.
        workers: running, with the checkpoint's weights.
        store: of checkpoints.
        state: where a resumed run goes on.
        reporter: for what users should know.
        job_folder: searched first for functions of the user's.
        sources: where the tokenizer comes from.
        journal_folder: where finished groups are kept between checkpoints; None: nowhere.
        run_folder: what tells this run from others on the same machines; None: this process.

    Raises:
        DataError: of the data, or of a saved position that is not of this data.
        ModelError: the tokenizer cannot be loaded, here or by a reward worker.
        PluginError: a Custom advantage estimator cannot be imported.
    """
    job = await _Job.begin(spec, workers, reporter, sources)
    source = await asyncio.to_thread(job.source)
    if state is not None:
        source.restore(state.source_state)
    supervisor = supervision.supervisor(spec, workers, reporter)
    journal, recovered = await asyncio.to_thread(run_journal, spec, journal_folder, source.fingerprint, state, reporter)
    scheduler = _scheduler(job, source, state, journal, supervisor)
    scheduler.restore(recovered)
    publisher = await _publisher(job, scheduler.fleet, reporter, run_folder)
    supervisor.connect(scheduler.fleet, publisher)
    parts = Parts(
        workers=workers,
        scheduler=scheduler,
        publisher=publisher,
        supervisor=supervisor,
        batches=_batch_builder(spec, workers, state, job_folder),
        decode=partial(decode, job.tokenizer),
        validator=await asyncio.to_thread(job.validator, scheduler.fleet) if spec.validation.every_steps else None,
        checkpoints=store,
        journal=journal,
        judging=job.judging(scheduler.fleet),
        reporter=reporter,
    )
    await gather_all(job.preparing, IO_TIMEOUT_S)
    return parts, _loop_config(spec)


async def assemble_evaluation(spec: RLJobSpec, workers: JobWorkers, reporter: Reporter, sources: ModelSources = LOCAL) -> Evaluation:
    """Wire a validation-only run over running workers; ``sources`` is where the tokenizer comes from.

    Raises:
        DataError: of the data.
        ModelError: the tokenizer cannot be loaded.
    """
    job = await _Job.begin(spec, workers, reporter, sources)
    supervisor = supervision.supervisor(spec, workers, reporter)
    fleet = EngineFleet(workers.engines, config=_rollout_config(spec, workers).fleet, on_lost=supervisor.lost)
    supervisor.connect(fleet, None)
    validator = await asyncio.to_thread(job.validator, fleet)
    await gather_all(job.preparing, IO_TIMEOUT_S)
    return Evaluation(
        workers=workers,
        fleet=fleet,
        supervisor=supervisor,
        validator=validator,
        reporter=reporter,
        decode=partial(decode, job.tokenizer),
        judging=job.judging(fleet),
        router=None if job.environments is None else job.environments.router,
    )


def _scheduler(
    job: _Job, source: PromptSource | TaskOrder, state: DriverState | None, journal: Journal, supervisor: EngineSupervisor
) -> RolloutScheduler:
    return RolloutScheduler(
        prompts=source,
        engines=job.workers.engines,
        score=job.score,
        environments=job.environments,
        gate=learning_settings.staleness_gate(job.spec, state.step if state else 0),
        config=_rollout_config(job.spec, job.workers),
        first_prompt=state.first_prompt if state else 0,
        done=state.done if state else (),
        log=journal,
        on_lost=supervisor.lost,
    )


async def _publisher(job: _Job, fleet: EngineFleet, reporter: Reporter, run_folder: Path | None) -> WeightPublisher:
    """Of the trainer's weights; its probes are the first training prompts."""
    spec, trainers = job.spec, job.workers.trainer.workers
    prompts = (await asyncio.to_thread(job.source)).next(spec.weight_sync.probe.sequences)
    if job.environments:
        prompts = await episodes.first_prompts(job.workers, prompts)
    described = "adapter_specs" if serves_adapters(spec) else "weight_specs"
    parameters = await trainers[0].call(described, timeout_s=IO_TIMEOUT_S)
    sent = [(name, sync_dtype(spec).value, shape) for name, _, shape in parameters]
    total_bytes = sum(tensor_bytes(*tensor) for tensor in sent)
    return WeightPublisher(
        trainers=trainers,
        engines=job.workers.engines,
        manifest=plan_buckets(sent, bucket_bytes(total_bytes, spec.weight_sync.bucket_bytes, len(job.workers.sync_senders))),
        transport=transport(job.workers.sync_backend, transport_settings(spec, job.workers, run_folder)),
        timeout_s=spec.weight_sync.timeout_seconds,
        probe=_probe(spec, prompts),
        on_running="keep" if spec.overlap.update_mode is UpdateMode.IN_FLIGHT else "recompute",
        goes_on_without=partial(goes_on_without, fleet),
        while_generating=spec.overlap.update_mode is not UpdateMode.DRAIN,
        warn=lambda text: reporter.event(text, Level.WARNING),
    )


def run_name(folder: Path | None) -> str:
    """What a run calls what it leaves on a machine; every attempt of it the same."""
    run = str(folder.resolve()) if folder is not None else f"process {os.getpid()}"
    return hashlib.sha256(run.encode()).hexdigest()[:RUN_DIGITS]


def transport_settings(spec: RLJobSpec, workers: JobWorkers, run_folder: Path | None) -> TransportSettings:
    """What a weight transport may want to know of the job."""
    delta = spec.weight_sync.delta
    return TransportSettings(
        run=run_name(run_folder),
        while_generating=spec.overlap.update_mode is not UpdateMode.DRAIN,
        senders=workers.sync_senders,
        neighbors=workers.sync_neighbors,
        engine_nodes=workers.sync_engine_nodes,
        sender_nodes=workers.sync_sender_nodes,
        dense_above=delta.dense_above if delta is not None else None,
    )


def _rollout_config(spec: RLJobSpec, workers: JobWorkers) -> RolloutConfig:
    num_engines = {component.group.name: len(component.workers) for component in workers.with_role(Role.ROLLOUT)}
    return learning_settings.rollout_config(spec, num_engines, survives_engine_loss=not workers.leased_engines)


async def unscored(batch: RewardBatch) -> list[RewardResult]:
    """Results of a job without rewards, whose policy follows a teacher alone."""
    return [RewardResult(sample_id=sample_id, score=0.0) for sample_id in batch.sample_ids]


def _router(spec: RLJobSpec, workers: JobWorkers) -> RewardRouter:
    shown_tokens = 2 * spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    judged = partial(longest_question_s, processes=len(workers.rewards), shown_tokens=shown_tokens)
    return RewardRouter(workers.rewards, sum(RETRIED * (r.timeout_seconds + REPLACED_S) + judged(r) for r in spec.rewards))


async def _prepare_rewards(spec: RLJobSpec, workers: JobWorkers, sources: ModelSources) -> list[Pending]:
    """Give every reward worker the judges of the job, and the driver's own tokenizer files: its node may have no folder of the model.

    Raises:
        ModelError: a file cannot be read.
    """
    model = with_folders(spec, sources.here).model
    code = model.trust_remote_code
    files = await asyncio.to_thread(tokenizer_files, Path(model.tokenizer_path or model.path), code=code)
    served = {component.group.name: await _served(component.workers) for component in workers.with_role(Role.JUDGE)}
    return [worker.start("prepare", files, code, served) for worker in workers.rewards]


async def _served(workers: Sequence[Worker]) -> Served:
    """The engines of a component that serves."""
    places = await gather_all([worker.start("served") for worker in workers], IO_TIMEOUT_S)
    return Served(urls=tuple(url for url, _ in places), api_key=places[0][1])


def shown_once(show: Callable[[str], None]) -> Callable[[str], None]:
    """Show each text once: prompts are also read a second time, to find those of a journal."""
    said: set[str] = set()

    def announce(text: str) -> None:
        if text not in said:
            said.add(text)
            show(text)

    return announce


def training_source(spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase, announce: Callable[[str], None]) -> PromptSource:
    """The training prompts."""
    source = PromptSource(
        [worker_settings.source_config(s, spec) for s in spec.data.train],
        tokenizer,
        seed=spec.seed,
        max_prompt_tokens=spec.rollout.max_prompt_tokens,
        prompt_format=worker_settings.prompt_format(spec),
        announce=announce,
    )
    if (few := source.num_prompts) < (wanted := spec.rollout.prompts_per_step):
        announce(f"spec.data.train has {few} prompts, spec.rollout.promptsPerStep is {wanted}: prompts occur several times in a step")
    return source


def validation_prompts(spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase, announce: Callable[[str], None]) -> list[Prompt]:
    """The validation prompts: the first ``maxPrompts`` of a seeded order, each at most once."""
    sources = [worker_settings.source_config(s, spec) for s in spec.data.validation]
    source = PromptSource(
        sources,
        tokenizer,
        seed=spec.seed,
        max_prompt_tokens=spec.rollout.max_prompt_tokens,
        prompt_format=worker_settings.prompt_format(spec),
        announce=announce,
    )
    return source.once(spec.validation.max_prompts)


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
        asynchronous_checkpoints=spec.checkpoint.asynchronous,
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
        sequences=tuple(tuple(p.token_ids[:PROBE_TOKENS].tolist()) for p in prompts if len(p.token_ids) > 1),
    )


def goes_on_without(fleet: EngineFleet, index: int, error: WorkerLostError) -> bool:
    """Have the fleet go on without an engine that is gone; False where there is no other."""
    try:
        fleet.lose(index, error)
    except WorkerLostError:
        return False
    return True
