"""The loop of a job: wires workers, buffer and publisher, computes nothing itself.

::

    launch.py ── workers ──┐
                           v
      PromptSource -> RolloutScheduler -> engines ----- completions -----> reward workers
                          ^                                                     |
                 advance(version)        (agentic jobs: environment workers)    v
                          |                                             TrajectoryBuffer
      engines <- WeightPublisher <- trainer, critic <- BatchBuilder <- take(B) -+
                          |
                 CheckpointStore, Reporter

| wait                     | for                            | bounded by                           | unblocked by            |
|--------------------------|--------------------------------|--------------------------------------|-------------------------|
| buffer.take              | B scored groups                | stallTimeoutSeconds without progress | the B-th group          |
| scheduler.pause          | engines that release devices   | an abort's answer, 2 minutes         | the last response back  |
| scheduler.updating       | running responses, with Drain  | training.stepTimeoutSeconds          | the last one's end      |
| batches.build            | reference, proximal, critic    | training.stepTimeoutSeconds, each    | the slowest rank        |
| validation under way     | its responses and rewards      | training.stepTimeoutSeconds          | the last one scored     |
| train_step               | all trainer and critic ranks   | training.stepTimeoutSeconds          | the slowest rank        |
| publisher.publish        | every engine's new version     | weightSync.timeoutSeconds            | the slowest engine      |
| judging                  | scores under way               | of each question, times its retries  | the last one's answer   |
| previous checkpoint      | every rank's files on disk     | IO_TIMEOUT_S, of saving.py           | the slowest rank        |
| workers' watch           | the end of a worker            | the whole run                        | a dead process          |

Synchronous training is staleness 0: the gate admits the next batch only after ``advance``. With more, engines go on while the trainer
works, but for those on its own devices (partial-device mode). A checkpoint remembers which prompts were not trained yet, and counts
once the step's metrics are on disk. What was finished since is in the journal: a restarted driver trains the same batches again, then
what waited, and has only the rest generated.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rljob_runtime.cluster.host import collect_settled
from rljob_runtime.errors import Evicted, Interrupted, RuntimeFault, SupersededError, WorkerLostError
from rljob_runtime.journal.writing import Journal, NoJournal
from rljob_runtime.loop.batch_builder import BatchBuilder, Prepared
from rljob_runtime.loop.checkpointing import Checkpoints, DriverState
from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.saving import Saver
from rljob_runtime.loop.step_metrics import generated_tokens, group_metrics, rollout_metrics
from rljob_runtime.loop.step_times import StepTimes
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.loop.updates import Updates
from rljob_runtime.loop.validating import Validating, report_problems
from rljob_runtime.loop.watching import beside, run_beside, watch_workers
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.offload.worker_group import lease_owner
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.scheduler import RolloutCounters, RolloutScheduler
from rljob_runtime.overlap.validation import Validator
from rljob_runtime.records import StepRecord, Trajectory
from rljob_runtime.report import Decode, Level, Reporter
from rljob_runtime.weightsync.probe import ProbeReport
from rljob_runtime.weightsync.publisher import SyncReport, WeightPublisher

READY_S = 0.05
"""For a batch that is whole to be taken."""
NO_DEADLINE_S = 366 * 24 * 3600.0
"""Stands for no ``activeDeadlineSeconds``."""

HAND_OUT_PASSES = 2
"""Passes of the event loop from ``advance`` to the first engines' calls: admission, the outbox of an engine. Sending follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """What the loop needs of the spec."""

    total_steps: int
    groups_per_step: int
    step_timeout_s: float
    take_timeout_s: float
    """Outer bound of waiting for a batch; a stall is found earlier by the scheduler."""
    checkpoint_every_steps: int
    """0: only at the end and on an interruption."""
    asynchronous_checkpoints: bool = True
    """Steps wait for the copy to host memory only."""
    spec_fingerprint: Mapping[str, str]
    critic_warmup_steps: int = 0
    """Steps at the beginning in which the policy is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the loop drives."""

    workers: JobWorkers
    scheduler: RolloutScheduler
    publisher: WeightPublisher
    supervisor: EngineSupervisor
    batches: BatchBuilder
    decode: Decode
    """For the few responses that the report shows."""
    validator: Validator | None = None
    checkpoints: Checkpoints
    journal: Journal = field(default_factory=NoJournal)
    judging: Judging | None = None
    """None: no judge shares devices."""
    reporter: Reporter


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What one step brought, for its record."""

    taken_s: float = 0.0
    """When the batch was there; engines that share devices release them after it."""
    trained: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    probe: ProbeReport | None = None
    sync: SyncReport | None = None


class Driver:
    """Trains from ``start_step`` to the end; one per attempt."""

    def __init__(self, parts: Parts, config: LoopConfig, *, start_step: int, stop: asyncio.Event) -> None:
        """``stop`` asks for an orderly end: the step under way is finished or dropped, then a checkpoint is written."""
        self._parts = parts
        self._config = config
        self._updates = Updates(workers=parts.workers, step_timeout_s=config.step_timeout_s, critic_warmup_steps=config.critic_warmup_steps)
        self._start_step = start_step
        self._stop = stop
        self._draining = ""
        """A worker whose pod is asked to end."""
        self._step = start_step
        self._reported_step = start_step
        self._saver = Saver(
            parts.workers,
            parts.checkpoints,
            parts.journal,
            parts.reporter,
            asynchronous=config.asynchronous_checkpoints,
            saved_step=start_step or None,
        )
        self._step_ended_s = 0.0
        self._validating = Validating(
            validator=parts.validator,
            total_steps=config.total_steps,
            fleet=parts.scheduler.fleet,
            supervisor=parts.supervisor,
            judging=parts.judging,
            publisher=parts.publisher,
            reporter=parts.reporter,
            stop=self._stop,
        )
        self._displaced = False
        """Whether judges have been on the engines' devices since the last sync."""

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: ``stop`` was set, or (Evicted) the pod of a worker ends; a checkpoint of the last finished step is on disk, if
                checkpoints are kept.
            RuntimeFault: something broke; the newest checkpoint is untouched.
        """
        try:
            with lease_owner("driver"):  # phases follow each other, and the leases of one phase belong together
                watching = watch_workers(self._parts.workers.indispensable, self._drained)
                await run_beside(self._train(), [self._parts.scheduler.run(), self._parts.supervisor.run(), watching])
        except SupersededError:
            raise
        except RuntimeFault:
            await self._saver.rescue(self._reported_step)
            raise
        finally:
            await self._validating.close()
            await asyncio.to_thread(self._parts.journal.close)

    async def _train(self) -> None:
        await self._publish_first()
        self._step_ended_s = time.monotonic()
        while self._step < self._config.total_steps:
            outcome = _Outcome()
            groups = await self._generate(outcome)
            if groups is None:
                await self._save()
                self._interrupt()
            await self._train_on(groups, outcome)
        async with self._generating():
            await self._probe(self._step)
        await self._save()

    def _drained(self, worker: str) -> None:
        """Stop in order while all workers still run: the grace period of the worker's pod has begun."""
        if not self._draining:
            self._parts.reporter.event(f"the pod of {worker} is asked to end: stopping after this step, with a checkpoint", Level.WARNING)
        self._draining = self._draining or worker
        self._stop.set()

    def _interrupt(self) -> NoReturn:
        """End the run; its state is saved."""
        done = f"stopped after step {self._step} of {self._config.total_steps}"
        if self._draining:
            raise Evicted(f"{done}, because the pod of {self._draining} was asked to end")
        raise Interrupted(done)

    async def _generate(self, outcome: _Outcome) -> list[Group] | None:
        """The next batch, or None when the run is to stop.

        Engines give up their devices half-way, with what they have sampled, when one of them has to be replaced on devices that it shares,
        and for judges.
        """
        groups: list[Group] | None = None
        while True:
            async with self._generating():
                self._validating.begin(self._step)
                if groups is None:
                    groups = await self._take()
                    outcome.taken_s = time.monotonic()
                if groups is None and self._stop.is_set():
                    return None
                if groups is not None and not self._leased_engines:
                    return groups
                if groups is not None or self._awaits_scores:  # the engines leave
                    outcome.probe = outcome.probe or await self._probe(self._step)
                validated = await self._validating.end() if groups is not None else None
            if groups is None and self._displaced:
                groups = await self._take(READY_S)
                outcome.taken_s = time.monotonic()
            if groups is not None and validated is None and self._validating.can_be_taken:
                validated = await self._validating.end()
            if groups is not None and validated is not None:
                outcome.validated = validated
                return groups

    @property
    def _awaits_scores(self) -> bool:
        """Whether the engines leave their devices for judges."""
        judging = self._parts.judging
        return judging is not None and judging.awaited and not self._parts.supervisor.wanted.is_set()

    @property
    def _leased_engines(self) -> tuple[int, ...]:
        """Engines that cannot compute while the trainer does."""
        return self._parts.workers.leased_engines

    @asynccontextmanager
    async def _generating(self) -> AsyncIterator[None]:
        """All engines can answer inside the block; afterwards those that share devices with others run nothing.

        Judges score in the block, or, on devices of engines, after it.
        """
        scheduler, judging = self._parts.scheduler, self._parts.judging
        async with AsyncExitStack() as leases:
            while True:
                if self._displaced or self._parts.supervisor.wanted.is_set():
                    await self._publish(self._step, again=True)  # they dropped their weights when they left the devices
                try:
                    await leases.enter_async_context(self._parts.workers.generating(self._step + 1))
                    break
                except WorkerLostError as error:
                    if not self._parts.supervisor.replaces(error):
                        raise
            if judging is not None:
                await leases.enter_async_context(judging.beside(self._step + 1))
            scheduler.resume(self._leased_engines)
            yield
            await scheduler.pause(self._leased_engines, f"training of step {self._step + 1}", at_once=self._stop.is_set())
        await self._parts.supervisor.free_devices()
        if judging is not None and not self._stop.is_set() and (self._step < self._config.total_steps or self._validating.runs):
            self._displaced |= await judging.phase(self._step + 1)

    async def _publish_first(self) -> None:
        """Serve the starting weights, so that a resumed run samples from what it resumed."""
        with self._parts.reporter.phase("first weight sync"):
            await self._publish(self._step)
        self._parts.scheduler.open()
        await self._begin_generating()

    async def _publish(self, version: int, *, again: bool = False) -> SyncReport:
        """Serve the trainer's weights; where it shares devices, with engines or others, have it score the probes while it holds them.

        ``again``: they are not new.

        Engines on shared devices that were lost come back before it, for only then nobody uses these devices.
        """
        parts = self._parts
        while True:
            await parts.supervisor.restore()
            updating = nullcontext() if again else parts.scheduler.updating(f"weights v{version}")
            try:
                async with parts.workers.syncing(version), updating:
                    report = await parts.publisher.publish(version)
                    if self._leased_engines or parts.workers.trainer.group.shares_devices:
                        parts.publisher.expect()
                        await parts.publisher.expected()
            except WorkerLostError as error:
                if not parts.supervisor.replaces(error):
                    raise
            else:
                self._displaced = False
                return report

    async def _begin_generating(self) -> None:
        """Let admitted prompts reach the engines; only then the trainer scores the probes, and whatever follows takes this process's time.

        Engines that share devices are still paused: nothing is handed out before they can take their share.
        """
        if self._leased_engines:
            return
        for _ in range(HAND_OUT_PASSES + self._parts.scheduler.fleet.send_passes):
            await asyncio.sleep(0)
        if not self._parts.workers.trainer.group.shares_devices:
            self._parts.publisher.expect()

    async def _probe(self, version: int) -> ProbeReport | None:
        """What the probe of ``version`` found, when it is due; suspect engines are reported."""
        report = await self._parts.publisher.probe(version)
        for warning in report.warnings if report is not None else ():
            self._parts.reporter.event(warning, Level.WARNING)
        return report

    def _probing(self, version: int) -> AbstractAsyncContextManager[asyncio.Task[ProbeReport | None] | None]:
        """The probe of ``version``, beside the update in the block, which waits for nothing of it to begin; None where it was made before.

        It ends with the block: a probe that goes on would meet the next sync, and its error would be nobody's.
        """
        if self._leased_engines:
            return nullcontext()
        reporter = self._parts.reporter
        return beside(
            self._probe(version), lambda error: reporter.event(f"the probe of weights v{version} failed as well: {error}", Level.WARNING)
        )

    async def _take(self, at_most_s: float | None = None) -> list[Group] | None:
        """The next batch, or None: the run is to stop, an engine or judges need shared devices, or ``at_most_s`` have passed."""
        take = asyncio.ensure_future(
            self._parts.scheduler.buffer.take(
                self._config.groups_per_step,
                version=self._step,
                timeout_s=self._config.take_timeout_s,
                what=f"batch of step {self._step + 1}",
            )
        )
        breaks: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in (self._stop, self._parts.supervisor.wanted)]
        if (judging := self._parts.judging) is not None:
            breaks.append(asyncio.ensure_future(judging.wanted(self._is_generated)))
        try:
            await self._saver.until({take, *breaks}, at_most_s)
            if self._stop.is_set() or not take.done():
                return None
            return take.result()
        finally:
            for task in (take, *breaks):
                task.cancel()

    def _is_generated(self) -> bool:
        """Whether a batch lacks nothing but scores."""
        return self._parts.scheduler.is_generated(self._config.groups_per_step, self._step)

    async def _train_on(self, groups: list[Group], outcome: _Outcome) -> None:
        """One step: score, train, checkpoint when due, publish, let the next batch begin, report.

        ``outcome`` has what was found while the engines had the devices.
        """
        version = self._step
        times = StepTimes(self._step_ended_s, taken_s=outcome.taken_s, ready_s=time.monotonic())
        prepared = await self._parts.batches.build(groups, version)
        times.scored_s = time.monotonic()
        async with self._probing(version) as probing:
            critic = await self._updates.begin_critic(prepared, version)
            async with self._parts.workers.trainer.leased(version + 1):
                await self._parts.publisher.retire()
                outcome.trained = await self._updates.train(prepared, critic, version)
                if probing is not None:  # must pass before anything is kept
                    outcome.probe = await probing
                times.trained_s = time.monotonic()
                self._step = version + 1
                self._parts.scheduler.trained(groups)
        every = self._config.checkpoint_every_steps
        due = every and self._step % every == 0 and self._step < self._config.total_steps
        if due:
            await self._saver.begin(self._step, self._state)
        times.saved_s = time.monotonic()
        async with self._judged():
            outcome.validated |= await self._validating.end() or {}  # each version is validated whole
        times.validated_s = time.monotonic()
        outcome.sync = await self._publish(self._step)
        times.synced_s = self._step_ended_s = time.monotonic()
        self._parts.scheduler.advance(self._step)
        await self._begin_generating()
        if self._step == self._config.total_steps and (last := await self._validate_last()):
            if outcome.validated:  # a row has one version
                values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(outcome.validated.items()))
                self._parts.reporter.event(f"validation before the last step: {values}")
            outcome.validated = last
        await self._report(groups, outcome, prepared, times)
        await asyncio.to_thread(_let_go, groups, prepared, self._parts.scheduler.num_samples)
        await self._saver.poll()

    def _judged(self) -> AbstractAsyncContextManager[None]:
        """The validation under way can be scored inside the block, where judges share devices with others than engines."""
        judging = self._parts.judging
        return nullcontext() if judging is None or not self._validating.runs else judging.beside(self._step)

    async def _validate_last(self) -> dict[str, float]:
        """Metrics of the last weights, for the record of the last step."""
        if not self._validating.is_due(self._step):
            return {}
        while True:
            async with self._generating():
                self._validating.begin(self._step)
                metrics = await self._validating.end()
            if metrics is None and self._validating.runs and self._validating.can_be_taken:
                metrics = await self._validating.end()
            if metrics is not None:
                return metrics

    async def _report(self, groups: list[Group], outcome: _Outcome, prepared: Prepared, times: StepTimes) -> None:
        reporter, counters = self._parts.reporter, self._parts.scheduler.take_counters()
        self._parts.journal.reported(self._step)
        if problem := self._parts.journal.take_problem():
            reporter.event(problem, Level.WARNING)
        times.generated_s = min(max(counters.last_completion_s, times.started_s), times.taken_s)
        found, became, tokens = await asyncio.to_thread(_look_at, groups, counters, self._step - 1)
        metrics = found | outcome.trained | prepared.metrics | outcome.validated
        metrics |= times.metrics() | became | self._parts.workers.take_metrics()
        metrics |= self._parts.supervisor.take_metrics()
        if (environments := self._parts.scheduler.environments) is not None:
            metrics |= environments.take_metrics()
            for worker, spans in environments.router.take_busy_spans().items():
                reporter.worked(worker, "environment", spans)
        metrics["rollout/tokens_per_s"] = tokens / max(metrics["time/step_s"], 1e-9)
        metrics["overlap/trainer_idle_fraction"] = (times.taken_s - times.started_s) / max(metrics["time/step_s"], 1e-9)
        metrics |= (fleet := self._parts.scheduler.fleet).queue_metrics()
        for engine, spans in fleet.take_busy_spans().items():
            reporter.worked(engine, "generate", spans)
        metrics["overlap/engine_busy_fraction"] = fleet.take_busy_fraction()
        if outcome.sync is not None:
            metrics |= await self._parts.publisher.measured(outcome.sync)
        if self._leased_engines:
            metrics["time/engine_pause_s"] = counters.engine_pause_s
        if (probe := outcome.probe) is not None:
            metrics |= {"sync/probe_mean_abs_diff": probe.mean, "sync/probe_p95_abs_diff": probe.tail}
            metrics["sync/probe_max_abs_diff"] = probe.largest
        report_problems(reporter, f"step {self._step}", Counter(counters.reward_messages))
        for lane, phase, start_s, end_s in times.phases():
            if end_s > start_s:
                reporter.span(lane, phase, start_s, end_s, self._step)
        await asyncio.to_thread(
            self._parts.checkpoints.check_owner
        )  # a driver that was given up must not write into the history of the next
        reporter.record(StepRecord(step=self._step, version=self._step, metrics=metrics))
        self._reported_step = self._step
        await asyncio.to_thread(lambda: reporter.trajectories(self._step, _trajectories(groups), self._parts.decode, counters.failed))

    async def _save(self) -> None:
        """Checkpoint the last finished step, once, and wait for it; nothing where none are kept."""
        await self._saver.begin(self._step, self._state)
        await self._saver.finish()

    def _state(self) -> DriverState:
        """The loop's part of a checkpoint of the last finished step."""
        scheduler = self._parts.scheduler
        point = scheduler.resume_point()
        self._parts.journal.cut(self._step, scheduler.unfinished)
        return DriverState(
            step=self._step,
            source_state=point.source_state,
            first_prompt=point.first_prompt,
            done=point.done,
            rule_state=self._parts.batches.rule_state(),
            spec_fingerprint=self._config.spec_fingerprint,
        )


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _look_at(groups: Sequence[Group], counters: RolloutCounters, trainer_version: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Metrics of a step's groups and of what became of others, and how many tokens were generated for these; looks at every sample."""
    return group_metrics(groups, trainer_version=trainer_version), rollout_metrics(groups, counters), generated_tokens(groups)


def _let_go(groups: list[Group], prepared: Prepared, samples_held: int) -> None:
    """Free a trained step in pieces: at once it would hold the interpreter's lock, and so the event loop, for all of it."""
    while groups:
        groups.pop()
    prepared.clear()
    collect_settled(samples_held)
