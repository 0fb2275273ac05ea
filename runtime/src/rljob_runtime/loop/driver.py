"""The loop of a job: wires workers, buffer and publisher, computes nothing itself.

::

    launch.py ── workers ──┐
                           v
      PromptSource -> RolloutScheduler -> engines ----- completions -----> reward workers
                          ^                                                     |
                 advance(version)                                               v
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
| workers' watch           | the end of a worker            | the whole run                        | a dead process          |

Synchronous training is staleness 0: the gate admits the next batch only after ``advance``. With more, engines go on while the trainer
works, but for those on its own devices (partial-device mode). A checkpoint remembers which prompts were not trained yet, and counts
once the step's metrics are on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_runtime.cluster.protocol import gather_all
from rljob_runtime.errors import Interrupted, WorkerLostError
from rljob_runtime.loop.batch_builder import BatchBuilder, Prepared
from rljob_runtime.loop.checkpointing import Checkpoints, DriverState
from rljob_runtime.loop.step_metrics import group_metrics, rollout_metrics
from rljob_runtime.loop.watching import run_beside, watch_workers
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.offload.worker_group import lease_owner
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.validation import Validator
from rljob_runtime.records import StepRecord
from rljob_runtime.report import Level, Reporter
from rljob_runtime.weightsync.probe import ProbeReport
from rljob_runtime.weightsync.publisher import SyncReport, WeightPublisher

IO_TIMEOUT_S = 1800.0
"""Deadline of writing or reading a checkpoint or a model on the trainer's side."""
NO_DEADLINE_S = 366 * 24 * 3600.0
"""Stands for no ``activeDeadlineSeconds``."""


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
    spec_fingerprint: str
    critic_warmup_steps: int = 0
    """Steps at the beginning in which the policy is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the loop drives."""

    workers: JobWorkers
    scheduler: RolloutScheduler
    publisher: WeightPublisher
    batches: BatchBuilder
    validator: Validator | None = None
    checkpoints: Checkpoints
    reporter: Reporter


@dataclass(slots=True)
class _Times:
    """Readings of the clock in one step, each phase's end."""

    started_s: float
    generated_s: float = 0.0
    taken_s: float = 0.0
    ready_s: float = 0.0
    """Engines that share devices have released them."""
    scored_s: float = 0.0
    trained_s: float = 0.0
    saved_s: float = 0.0
    validated_s: float = 0.0
    synced_s: float = 0.0

    def phases(self) -> list[tuple[str, str, float, float]]:
        """Lane, phase, start and end of each."""
        return [
            ("rollout", "generate", self.started_s, self.generated_s),
            ("rewards", "reward", self.generated_s, self.taken_s),
            ("trainer", "score", self.ready_s, self.scored_s),
            ("trainer", "train", self.scored_s, self.trained_s),
            ("trainer", "checkpoint", self.trained_s, self.saved_s),
            ("rollout", "validate", self.saved_s, self.validated_s),
            ("weights", "sync", self.validated_s, self.synced_s),
        ]

    def metrics(self) -> dict[str, float]:
        """Seconds of the step and of each phase; a validation reports its own time, most of which runs beside the training."""
        seconds = {f"time/{phase}_s": end - start for _, phase, start, end in self.phases() if phase != "validate"}
        return {"time/step_s": self.synced_s - self.started_s} | seconds


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
        self._start_step = start_step
        self._stop = stop
        self._step = start_step
        self._saved_step = start_step if start_step else -1
        self._step_ended_s = 0.0
        self._validating: asyncio.Task[dict[str, float]] | None = None

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: ``stop`` was set; a checkpoint of the last finished step is on disk, if checkpoints are kept.
            RuntimeFault: something broke; the newest checkpoint is untouched.
        """
        try:
            with lease_owner("driver"):  # phases follow each other, and the leases of one phase belong together
                watching = watch_workers(self._parts.workers, self._lose_engine)
                await run_beside(self._train(), [self._parts.scheduler.run(), watching])
        finally:
            if self._validating is not None:
                self._validating.cancel()

    async def _train(self) -> None:
        await self._publish_first()
        self._step_ended_s = time.monotonic()
        while self._step < self._config.total_steps:
            outcome = _Outcome()
            async with self._generating():
                self._begin_validation()
                groups = await self._take()
                outcome.taken_s = time.monotonic()
                if groups is not None and self._leased_engines:
                    outcome.probe = await self._probe(self._step)
                    outcome.validated = await self._end_validation()
            if groups is None:
                await self._save()
                raise Interrupted(f"stopped after step {self._step} of {self._config.total_steps}")
            await self._train_on(groups, outcome)
        async with self._generating():
            await self._probe(self._step)
        await self._save()

    @property
    def _leased_engines(self) -> tuple[int, ...]:
        """Engines that cannot compute while the trainer does."""
        return self._parts.workers.leased_engines

    @asynccontextmanager
    async def _generating(self) -> AsyncIterator[None]:
        """All engines can answer inside the block; afterwards those that share devices with others run nothing."""
        scheduler = self._parts.scheduler
        async with self._parts.workers.generating(self._step + 1):
            scheduler.resume(self._leased_engines)
            yield
            await scheduler.pause(self._leased_engines, f"training of step {self._step + 1}", at_once=self._stop.is_set())

    async def _publish_first(self) -> None:
        """Serve the starting weights, so that a resumed run samples from what it resumed."""
        with self._parts.reporter.phase("first weight sync"):
            await self._publish(self._step)
        self._parts.scheduler.open()

    async def _publish(self, version: int) -> SyncReport:
        """Serve the trainer's weights, and have the trainer score the probes under them."""
        async with self._parts.workers.syncing(version), self._parts.scheduler.updating(f"weights v{version}"):
            report = await self._parts.publisher.publish(version)
            self._parts.publisher.expect()
            if self._leased_engines:
                await self._parts.publisher.expected()
        return report

    async def _probe(self, version: int) -> ProbeReport | None:
        """What the probe of ``version`` found, when it is due; suspect engines are reported."""
        report = await self._parts.publisher.probe(version)
        for warning in report.warnings if report is not None else ():
            self._parts.reporter.event(warning, Level.WARNING)
        return report

    async def _take(self) -> list[Group] | None:
        """The next batch, or None when the run is to stop."""
        take = asyncio.ensure_future(
            self._parts.scheduler.buffer.take(
                self._config.groups_per_step,
                version=self._step,
                timeout_s=self._config.take_timeout_s,
                what=f"batch of step {self._step + 1}",
            )
        )
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({take, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return None
            return take.result()
        finally:
            take.cancel()
            stopped.cancel()

    async def _train_on(self, groups: list[Group], outcome: _Outcome) -> None:
        """One step: score, train, checkpoint when due, publish, let the next batch begin, report.

        ``outcome`` has what was found while the engines had the devices.
        """
        version = self._step
        times = _Times(self._step_ended_s, taken_s=outcome.taken_s, ready_s=time.monotonic())
        probing = None  # must pass before anything is kept
        if not self._leased_engines:
            probing = asyncio.ensure_future(self._probe(version))
        prepared = await self._parts.batches.build(groups, version)
        times.scored_s = time.monotonic()
        critic = await self._train_critic(prepared, version)
        async with self._parts.workers.trainer.leased(version + 1):
            outcome.trained = await self._update(prepared, critic, version)
            if probing is not None:
                outcome.probe = await probing
            times.trained_s = time.monotonic()
            self._step = version + 1
            self._parts.scheduler.trained(groups)
        every = self._config.checkpoint_every_steps
        due = every and self._step % every == 0 and self._step < self._config.total_steps
        checkpoint = await self._write_checkpoint() if due else None
        times.saved_s = time.monotonic()
        outcome.validated |= await self._end_validation()  # each version is validated whole
        times.validated_s = time.monotonic()
        outcome.sync = await self._publish(self._step)
        times.synced_s = self._step_ended_s = time.monotonic()
        self._parts.scheduler.advance(self._step)
        if self._step == self._config.total_steps and (last := await self._validate_last()):
            if outcome.validated:  # a row has one version
                values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(outcome.validated.items()))
                self._parts.reporter.event(f"validation before the last step: {values}")
            outcome.validated = last
        self._report(groups, outcome, prepared, times)
        await self._complete(checkpoint)

    async def _train_critic(self, prepared: Prepared, version: int) -> asyncio.Future[list[Any]] | None:
        """Begin the critic's update; ended already where it computes on devices that the trainer uses, too."""
        critic = self._parts.workers.critic
        if critic is None or not prepared.critic[0]:
            return None
        async with critic.leased(version + 1):
            calls = [w.start("train_step", share, version) for w, share in zip(critic.workers, prepared.critic, strict=True)]
            update = asyncio.ensure_future(gather_all(calls, self._config.step_timeout_s))
            if critic.group.shares_devices:
                await update
        return update

    async def _update(self, prepared: Prepared, critic: asyncio.Future[list[Any]] | None, version: int) -> dict[str, float]:
        """Train the policy beside the critic; metrics of both. Nothing is trained where everything was left out."""
        metrics: dict[str, float] = {}
        policy = prepared.policy
        done = version - self._config.critic_warmup_steps  # the policy's own steps: its learning rate warms up from its first update on
        if policy[0] and done >= 0:
            trainer = self._parts.workers.trainer
            calls = [w.start("train_step", policy[i // trainer.ranks_per_share], done) for i, w in enumerate(trainer.workers)]
            metrics |= (await gather_all(calls, self._config.step_timeout_s))[0]
        if critic is not None:
            metrics |= (await critic)[0]
        return metrics

    def _begin_validation(self) -> None:
        """Validate the weights just published, when due, beside whatever follows."""
        if self._parts.validator is not None and self._validation_due:
            self._validating = asyncio.ensure_future(self._parts.validator.run(self._step))

    @property
    def _validation_due(self) -> bool:
        validator = self._parts.validator
        return validator is not None and validator.config.due(self._step, last=self._config.total_steps)

    async def _end_validation(self) -> dict[str, float]:
        """Metrics of the validation under way; empty when there is none."""
        if self._validating is None:
            return {}
        validating, self._validating = self._validating, None
        return await validating

    async def _validate_last(self) -> dict[str, float]:
        """Metrics of the last weights, for the record of the last step."""
        if not self._validation_due:
            return {}
        async with self._generating():
            self._begin_validation()
            return await self._end_validation()

    def _report(self, groups: list[Group], outcome: _Outcome, prepared: Prepared, times: _Times) -> None:
        reporter, counters = self._parts.reporter, self._parts.scheduler.take_counters()
        times.generated_s = min(max(counters.last_completion_s, times.started_s), times.taken_s)
        metrics = group_metrics(groups, trainer_version=self._step - 1) | outcome.trained | prepared.metrics | outcome.validated
        metrics |= times.metrics() | rollout_metrics(groups, counters) | self._parts.workers.take_metrics()
        metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(metrics["time/step_s"], 1e-9)
        metrics["overlap/trainer_idle_fraction"] = (times.taken_s - times.started_s) / max(metrics["time/step_s"], 1e-9)
        metrics["overlap/engine_busy_fraction"] = self._parts.scheduler.fleet.take_busy_fraction()
        if outcome.sync is not None:
            metrics |= {"sync/version": float(outcome.sync.version), "sync/bytes": float(outcome.sync.size_bytes)}
        if self._leased_engines:
            metrics["time/engine_pause_s"] = counters.engine_pause_s
        if (probe := outcome.probe) is not None:
            metrics |= {"sync/probe_mean_abs_diff": probe.mean, "sync/probe_p95_abs_diff": probe.tail}
            metrics["sync/probe_max_abs_diff"] = probe.largest
        for message in sorted(set(counters.reward_messages))[:3]:
            reporter.event(f"step {self._step}: {message}")
        for lane, phase, start_s, end_s in times.phases():
            if end_s > start_s:
                reporter.span(lane, phase, start_s, end_s, self._step)
        reporter.record(StepRecord(step=self._step, version=self._step, metrics=metrics))
        reporter.trajectories(self._step, [t for g in groups for t in g.trajectories])

    async def _save(self) -> None:
        """Checkpoint the last finished step, once; nothing where none are kept."""
        await self._complete(await self._write_checkpoint())

    async def _write_checkpoint(self) -> tuple[Path, DriverState] | None:
        """Write the policy of the last finished step; the checkpoint counts only once it is completed. None: nothing to write."""
        store = self._parts.checkpoints
        if self._saved_step == self._step or not store.kept:
            return None
        folder = await asyncio.to_thread(store.begin, self._step)
        for component in self._parts.workers.components:
            if component.checkpoint_folder is not None:
                async with component.leased(self._step):
                    path = str(folder / component.checkpoint_folder)
                    await gather_all([w.start("save_checkpoint", path) for w in component.workers], IO_TIMEOUT_S)
        scheduler = self._parts.scheduler
        point = scheduler.resume_point()
        state = DriverState(
            step=self._step,
            next_group_id=scheduler.next_group_id,
            source_state=point.source_state,
            done=point.done,
            rule_state=self._parts.batches.rule_state(),
            spec_fingerprint=self._config.spec_fingerprint,
        )
        return folder, state

    async def _complete(self, checkpoint: tuple[Path, DriverState] | None) -> None:
        """Make a written checkpoint count; the report up to its step is on disk before, so that no resumed run lacks a step."""
        if checkpoint is None:
            return
        folder, state = checkpoint
        self._parts.reporter.flush()
        await asyncio.to_thread(self._parts.checkpoints.complete, folder, state)
        self._saved_step = state.step

    def _lose_engine(self, index: int, error: WorkerLostError) -> None:
        """Go on with the others; fails if none can take over."""
        self._parts.scheduler.fleet.lose(index, error)
        self._parts.publisher.leave_out(index)
