"""The loop of a job: wires workers, buffer and publisher, computes nothing itself.

::

    launch.py ── workers ──┐
                           v
      PromptSource -> RolloutScheduler -> engines ----- completions -----> reward workers
                          ^                                                     |
                 advance(version)                                               v
                          |                                             TrajectoryBuffer
      engines <- WeightPublisher <- trainer ranks <- batching <- take(B) -------+
                          |
                 CheckpointStore, Reporter

| wait                     | for                            | bounded by                           | unblocked by            |
|--------------------------|--------------------------------|--------------------------------------|-------------------------|
| buffer.take              | B judged groups                | stallTimeoutSeconds without progress | the B-th group          |
| scheduler.shrink         | engines that step aside        | an abort's answer, 2 minutes         | the last response back  |
| scheduler.updating       | running responses, with Drain  | training.stepTimeoutSeconds          | the last one's end      |
| train_step               | all trainer ranks              | training.stepTimeoutSeconds          | the slowest rank        |
| publisher.publish        | every engine's new version     | weightSync.timeoutSeconds            | the slowest engine      |
| workers' watch           | the end of any worker          | the whole run                        | a dead process          |

Synchronous training is staleness 0: the gate admits the next batch only after ``advance``. With more, engines go on while the trainer
works, but for those on its own devices (partial-device mode). A checkpoint remembers which prompts were not trained yet, and counts
once the step's metrics are on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rljob_runtime.checkpointing import POLICY_FOLDER, Checkpoints, DriverState
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.errors import Interrupted
from rljob_runtime.offload.turns import Turns
from rljob_runtime.overlap.batching import AdvantageFunction, BatchingConfig, make_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.records import StepRecord, TrainBatch
from rljob_runtime.report import Reporter
from rljob_runtime.step_metrics import group_metrics
from rljob_runtime.weightsync.publisher import SyncReport, WeightPublisher

IO_TIMEOUT_S = 1800.0
"""Deadline of writing or reading a checkpoint or a model on the trainer's side."""


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
    batching: BatchingConfig
    spec_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the loop drives."""

    trainers: Sequence[Worker]
    references: Sequence[Worker]
    workers: Sequence[Worker]
    """All workers of the job, for watching."""
    scheduler: RolloutScheduler
    publisher: WeightPublisher
    advantage: AdvantageFunction
    checkpoints: Checkpoints
    turns: Turns
    reporter: Reporter


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

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: ``stop`` was set; a checkpoint of the last finished step is on disk, if checkpoints are kept.
            RuntimeFault: something broke; the newest checkpoint is untouched.
        """
        await _run_beside(self._train(), [self._parts.scheduler.run(), self._watch_workers()])

    async def _train(self) -> None:
        await self._publish_first()
        self._step_ended_s = time.monotonic()
        while self._step < self._config.total_steps:
            async with self._generating():
                groups = await self._take()
                difference = await self._parts.publisher.probe(self._step) if groups is not None and self._taking_turns else None
            if groups is None:
                await self._save()
                raise Interrupted(f"stopped after step {self._step} of {self._config.total_steps}")
            await self._train_on(groups, difference)
        async with self._generating():
            await self._parts.publisher.probe(self._step)
        await self._save()

    @property
    def _taking_turns(self) -> bool:
        """Whether some engine cannot compute while the trainer does."""
        return bool(self._parts.turns.engines)

    @asynccontextmanager
    async def _generating(self) -> AsyncIterator[None]:
        """All engines can answer inside the block; afterwards those that share devices with others run nothing."""
        turns, scheduler = self._parts.turns, self._parts.scheduler
        async with turns.generating(self._step + 1):
            scheduler.expand(turns.engines)
            yield
            await scheduler.shrink(turns.engines, f"training of step {self._step + 1}")

    async def _publish_first(self) -> None:
        """Serve the starting weights, so that a resumed run samples from what it resumed."""
        with self._parts.reporter.phase("first weight sync"):
            await self._publish(self._step)
        self._parts.scheduler.open()

    async def _publish(self, version: int) -> SyncReport:
        """Serve the trainer's weights, and have the trainer score the probes under them."""
        async with self._parts.turns.syncing(version), self._parts.scheduler.updating(f"weights v{version}"):
            report = await self._parts.publisher.publish(version)
            self._parts.publisher.expect()
            if self._taking_turns:
                await self._parts.publisher.expected()
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

    async def _train_on(self, groups: list[Group], difference: float | None) -> None:
        """One step: train, checkpoint when due, publish, let the next batch begin, report.

        ``difference``: of the probe where it was made while the engines had the devices.
        """
        version = self._step
        started_s = self._step_ended_s
        taken_s = time.monotonic()
        probing = None  # must pass before anything is kept
        if not self._taking_turns:
            probing = asyncio.ensure_future(self._parts.publisher.probe(version))
        batches = await self._batches(groups, version)
        async with self._parts.turns.training(version + 1):
            training = gather_all(
                [w.start("train_step", share, version) for w, share in zip(self._parts.trainers, batches, strict=True)],
                self._config.step_timeout_s,
            )
            if probing is not None:
                trained, difference = await asyncio.gather(training, probing)
            else:
                trained = await training
            trained_s = time.monotonic()
            self._step = version + 1
            self._parts.scheduler.trained(groups)
            every = self._config.checkpoint_every_steps
            due = every and self._step % every == 0 and self._step < self._config.total_steps
            checkpoint = await self._write_checkpoint() if due else None
            saved_s = time.monotonic()
        sync = await self._publish(self._step)
        synced_s = time.monotonic()
        self._parts.scheduler.advance(self._step)
        counters = self._parts.scheduler.take_counters()
        self._step_ended_s = synced_s
        generated_s = min(max(counters.last_completion_s, started_s), taken_s)
        metrics = group_metrics(groups, trainer_version=version) | trained[0]
        metrics |= {
            "reward/errors": float(counters.reward_errors),
            "reward/timeouts": float(counters.reward_timeouts),
            "rollout/groups_accepted": float(len(groups)),
            "rollout/groups_dropped": float(counters.groups_dropped),
            "rollout/tokens_per_s": metrics["rollout/tokens"] / max(synced_s - started_s, 1e-9),
            "sync/version": float(sync.version),
            "sync/bytes": float(sync.size_bytes),
            "time/step_s": synced_s - started_s,
            "time/generate_s": generated_s - started_s,
            "time/reward_s": taken_s - generated_s,
            "time/train_s": trained_s - taken_s,
            "time/sync_s": synced_s - saved_s,
            "time/checkpoint_s": saved_s - trained_s,
        }
        if self._taking_turns:
            metrics |= {
                "time/shrink_s": counters.shrink_s,
                "rollout/requests_moved": float(counters.requests_moved),
                "rollout/tokens_kept": float(counters.tokens_kept),
            }
        metrics |= self._parts.turns.take_metrics()
        if difference is not None:
            metrics["sync/probe_max_abs_diff"] = difference
        for message in sorted(set(counters.reward_messages))[:3]:
            self._parts.reporter.event(f"step {self._step}: {message}")
        self._report(groups, metrics, [started_s, generated_s, taken_s, trained_s, saved_s, synced_s])
        await self._complete(checkpoint)

    async def _batches(self, groups: list[Group], version: int) -> list[list[TrainBatch]]:
        batches = make_batches(groups, advantage=self._parts.advantage, config=self._config.batching, version=version)
        if not self._parts.references:
            return batches
        async with self._parts.turns.scoring(version + 1):
            return await add_reference_logprobs(batches, self._parts.references, self._config.step_timeout_s)

    def _report(self, groups: list[Group], metrics: dict[str, float], times_s: list[float]) -> None:
        reporter = self._parts.reporter
        spans = [("rollout", "generate"), ("rewards", "reward"), ("trainer", "train"), ("trainer", "checkpoint"), ("weights", "sync")]
        for (lane, phase), start_s, end_s in zip(spans, times_s[:-1], times_s[1:], strict=True):
            if end_s > start_s:
                reporter.span(lane, phase, start_s, end_s, self._step)
        reporter.record(StepRecord(step=self._step, version=self._step, metrics=metrics))
        reporter.trajectories(self._step, [t for g in groups for t in g.trajectories])

    async def _save(self) -> None:
        """Checkpoint the last finished step, once; nothing where none are kept."""
        async with self._parts.turns.training(self._step):
            checkpoint = await self._write_checkpoint()
        await self._complete(checkpoint)

    async def _write_checkpoint(self) -> tuple[Path, DriverState] | None:
        """Write the policy of the last finished step; the checkpoint counts only once it is completed. None: nothing to write."""
        store = self._parts.checkpoints
        if self._saved_step == self._step or not store.kept:
            return None
        folder = await asyncio.to_thread(store.begin, self._step)
        await gather_all([w.start("save_checkpoint", str(folder / POLICY_FOLDER)) for w in self._parts.trainers], IO_TIMEOUT_S)
        scheduler = self._parts.scheduler
        point = scheduler.resume_point()
        state = DriverState(
            step=self._step,
            next_group_id=scheduler.next_group_id,
            source_state=point.source_state,
            done=point.done,
            spec_fingerprint=self._config.spec_fingerprint,
        )
        return folder, state

    async def _complete(self, checkpoint: tuple[Path, DriverState] | None) -> None:
        """Make a written checkpoint count; what the report says up to its step is on disk before, so that no resumed run lacks a step."""
        if checkpoint is None:
            return
        folder, state = checkpoint
        self._parts.reporter.flush()
        await asyncio.to_thread(self._parts.checkpoints.complete, folder, state)
        self._saved_step = state.step

    async def _watch_workers(self) -> None:
        """Fails with WorkerLostError as soon as any worker's process ends."""
        tasks = [asyncio.ensure_future(w.watch()) for w in self._parts.workers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def add_reference_logprobs(batches: list[list[TrainBatch]], references: Sequence[Worker], timeout_s: float) -> list[list[TrainBatch]]:
    """The same batches with the reference policy's log-probs; epochs repeat batches, each is computed once.

    Raises:
        DeadlineError: the reference workers took longer than ``timeout_s``.
    """
    distinct = list({id(batch): batch for share in batches for batch in share}.values())
    answers: dict[int, np.ndarray] = {}
    for first in range(0, len(distinct), len(references)):
        wave = distinct[first : first + len(references)]
        padded = wave + [wave[-1]] * (len(references) - len(wave))  # every reference rank takes part in every collective
        calls = [w.start("compute_logprobs", b.token_ids, b.lengths, b.temperature) for w, b in zip(references, padded, strict=True)]
        for batch, answer in zip(wave, await gather_all(calls, timeout_s), strict=False):
            answers[id(batch)] = answer
    return [[replace(b, reference_logprobs=answers[id(b)]) for b in share] for share in batches]


async def _run_beside(main: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` to its end; a background task that ends first can only have failed, and its error ends everything.

    A dead worker also makes calls fail elsewhere; the error that names the dead process is preferred.
    """
    main_task = asyncio.ensure_future(main)
    others = [asyncio.ensure_future(b) for b in background]
    try:
        await asyncio.wait({main_task, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            if task.done():
                task.result()
        await main_task
    finally:
        for task in (main_task, *others):
            task.cancel()
        await asyncio.gather(main_task, *others, return_exceptions=True)
