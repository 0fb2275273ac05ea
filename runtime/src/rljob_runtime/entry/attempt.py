"""One attempt of a job on a cluster: the one way a run goes, on this machine or in pods. Called by ``local_run`` and ``kubernetes``.

::

                                                                 ┌──── a worker was lost (restarting.py) ────┐
    checked job, run folder, store -> Attempt -> Reporter -> launch (cluster, workers) ─┬> Driver -> model ─┬> summary
                                                                                        └> Evaluation ──────┘
                                                                       (training.steps: 0, which starts no trainer)

| exit code | meaning                                                          |
|-----------|------------------------------------------------------------------|
| 0         | all steps trained, or the model validated where there are none   |
| 2         | the spec, or something it names, is invalid; nothing was started |
| 3         | the run failed; the newest checkpoint is kept                    |
| 130       | interrupted or evicted, with a checkpoint of the last step       |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import yaml

from rljob_api.validation import CheckedJob
from rljob_runtime.cluster.host import settle_process
from rljob_runtime.cluster.protocol import Cluster
from rljob_runtime.cluster.replaceable import processes
from rljob_runtime.entry.limits import while_cluster_lives, within_active_deadline
from rljob_runtime.entry.stopping import Stopper
from rljob_runtime.errors import (
    CallDeadlineError,
    Evicted,
    Interrupted,
    RuntimeFault,
    WorkerLostError,
)
from rljob_runtime.job import assemble, launch, models
from rljob_runtime.job.models import LOCAL, ModelSources
from rljob_runtime.job.restarting import Restarts, end_others, start_again
from rljob_runtime.job.worker_settings import devices_in_words, spec_fingerprint
from rljob_runtime.loop.checkpointing import Checkpoints, Chosen
from rljob_runtime.loop.driver import Driver
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.report import Display, Level, Reporter, RunFolder, RunInfo, TrajectorySampling
from rljob_runtime.report.trackers.feed import start_trackers
from rljob_runtime.weightsync.shared_memory import prefix_of, remove

SETTLE_TIMEOUT_S = 60.0
"""Deadline of one garbage collection in every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is run, where its files go, and where it goes on."""

    checked: CheckedJob
    folder: RunFolder
    store: Checkpoints
    model_folder: Path | None
    """Where the trained model is written; None: nowhere that would outlive the run."""
    chosen: Chosen
    """The checkpoint to go on from, if there is one."""
    job_folder: Path | None
    """Searched first for reward functions."""
    sources: ModelSources = LOCAL
    """Where the model comes from."""
    notes: tuple[str, ...] = ()
    """What users should know about this run; shown once, at its start."""
    pod_stops: Callable[[], bool] = lambda: False
    """Whether this process's pod has been asked to end."""
    stopper: Stopper = field(default_factory=Stopper)
    """Ends the run from callbacks and other threads."""

    @property
    def first_step(self) -> int:
        """Steps that were trained before it."""
        return self.chosen.state.step if self.chosen.state else 0


def prepare(
    checked: CheckedJob,
    folder: RunFolder,
    store: Checkpoints,
    *,
    resume: bool,
    job_folder: Path | None,
    model_folder: Path | None,
    sources: ModelSources = LOCAL,
    notes: tuple[str, ...] = (),
    pod_stops: Callable[[], bool] = lambda: False,
) -> Attempt:
    """An attempt that goes on from the newest whole checkpoint of ``store`` when ``resume`` is set and there is one.

    Raises:
        CheckpointError: that checkpoint is another job's, or there are some and none is whole.
    """
    chosen = store.choose(spec_fingerprint(checked.job.spec)) if resume else Chosen()
    store.take(f"pid {os.getpid()} on {socket.gethostname()}, started at {datetime.now(UTC).isoformat(timespec='milliseconds')}")
    return Attempt(
        checked=checked,
        folder=folder,
        store=store,
        model_folder=model_folder,
        chosen=chosen,
        job_folder=job_folder,
        sources=sources,
        notes=(*notes, *chosen.skipped),
        pod_stops=pod_stops,
    )


def run(attempt: Attempt, cluster: Cluster, display: Display) -> None:
    """Run it to its end; files and the display report the rest.

    Raises:
        Interrupted: stopped by SIGINT or SIGTERM; Evicted where a pod was asked to end.
        RuntimeFault: the run failed.
    """
    job = attempt.checked.job
    spec = job.spec
    info = RunInfo(
        job_name=job.metadata.name,
        model=spec.model.path,
        algorithm="validation only"
        if spec.validates_only
        else f"{spec.algorithm.advantage.estimator} {spec.algorithm.policy_loss.variant}",
        devices=devices_in_words(attempt.checked.plan),
        total_steps=spec.training.steps,
        seed=spec.seed,
        model_commit=attempt.sources.commits.get(spec.model.path),
        spec_yaml=yaml.safe_dump(job.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False),
    )
    every = spec.report.trajectories_every_steps
    sampling = TrajectorySampling(per_step=spec.report.trajectories_per_step if every else 0, every_steps=max(every, 1))
    try:
        trackers = start_trackers(spec.report.trackers, attempt.folder, info.job_name, yaml.safe_load(info.spec_yaml))
        reporter = Reporter(attempt.folder, info, display, resumed_step=attempt.first_step or None, sampling=sampling, trackers=trackers)
    except RuntimeFault as error:
        error.add_note("nothing was started: the report of the run cannot be written")
        raise
    with reporter:
        models.record(attempt.folder.path, spec, attempt.sources)
        for note in attempt.notes:
            reporter.event(note, Level.WARNING)
        asyncio.run(_run(attempt, cluster, reporter))


async def _run(attempt: Attempt, cluster: Cluster, reporter: Reporter) -> None:
    job, plan = attempt.checked.job, attempt.checked.plan
    interrupt = Interruption(asyncio.current_task(), reporter, checkpoint=attempt.store.kept, pod_stops=attempt.pod_stops)
    workers: JobWorkers | None = None
    with interrupt.handling_signals():
        try:
            attempt.stopper.bind(interrupt)
            async with within_active_deadline(job.spec.active_deadline_seconds), while_cluster_lives(cluster):
                cluster.on_call = reporter.called
                log_dir = attempt.folder.logs.resolve()
                start = partial(launch.launch, job, plan, cluster, reporter, attempt.job_folder, log_dir, attempt.sources)
                restarts = Restarts(job.spec.failure_policy.max_worker_restarts, partial(reporter.event, level=Level.WARNING))
                workers = await start()
                attempt = await undamaged(attempt, workers, reporter)
                while (lost := await _train_or_lose(attempt, cluster, workers, reporter, interrupt, restarts)) is not None:
                    with reporter.phase("ending workers"):
                        kept = await end_others(workers, cluster, lost)
                    attempt = _choose_again(attempt, reporter)
                    workers = await start_again(start(kept=kept), cluster, lost)
                    attempt = await undamaged(attempt, workers, reporter)
        except asyncio.CancelledError:
            if interrupt.stop.is_set():
                raise interrupt.error("stopped at once, without a checkpoint of the step under way") from None
            raise
        except Interrupted as error:
            raise interrupt.error(str(error)) if type(error) is Interrupted else error from None
        finally:
            interrupt.ending = True
            attempt.stopper.bind(None)
            with reporter.phase("stopping"):
                await launch.shut_down(cluster, workers)
                remove(prefix_of(assemble.run_name(attempt.folder.path)))  # of a trainer on this machine that did not get to do it


def _choose_again(attempt: Attempt, reporter: Reporter, without: Collection[Path] = ()) -> Attempt:
    """The attempt, and the report, as they go on from the newest checkpoint that is none of ``without``.

    Raises:
        CheckpointError: none is whole.
    """
    chosen = attempt.store.choose(spec_fingerprint(attempt.checked.job.spec), without)
    chosen_again = replace(attempt, chosen=chosen)
    reporter.rewind(chosen_again.first_step)  # before what is said: rows of steps that are trained again go
    for skipped in chosen.skipped:
        reporter.event(skipped, Level.WARNING)
    return chosen_again


async def undamaged(attempt: Attempt, workers: JobWorkers, reporter: Reporter) -> Attempt:
    """The attempt as it goes on from the newest checkpoint whose files have the contents that were written.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    damaged: list[Path] = []
    while (folder := attempt.chosen.folder) is not None:
        with reporter.phase("checking the checkpoint"):
            problems = await launch.find_damage(workers, folder, attempt.chosen.files)
        if not problems:
            break
        damaged.append(folder)
        attempt = _choose_again(attempt, reporter, damaged)
        reporter.event(f"checkpoint {folder.name} is damaged and skipped: {'; '.join(problems)}", Level.WARNING)
    return attempt


async def _train_or_lose(
    attempt: Attempt, cluster: Cluster, workers: JobWorkers, reporter: Reporter, interrupt: Interruption, restarts: Restarts
) -> WorkerLostError | None:
    """Train to the end, or to the loss of a worker that may start again, which is returned; one that hangs is lost."""
    try:
        await _train(attempt, cluster, workers, reporter, interrupt)
    except (WorkerLostError, CallDeadlineError) as error:
        lost = error.stuck if isinstance(error, CallDeadlineError) else error
        if interrupt.stop.is_set() or attempt.checked.job.spec.validates_only or not restarts.take(lost, workers):
            raise
        return lost
    finally:
        interrupt.orderly = False
    return None


async def _train(attempt: Attempt, cluster: Cluster, workers: JobWorkers, reporter: Reporter, interrupt: Interruption) -> None:
    spec = attempt.checked.job.spec
    if spec.validates_only:
        evaluation = await assemble.assemble_evaluation(spec, workers, reporter, attempt.sources)
        await evaluation.run()
        return
    if attempt.chosen.folder is not None:
        with reporter.phase("loading the checkpoint"):
            await launch.load_checkpoint(workers, attempt.chosen.folder, attempt.first_step)
    parts, config = await assemble.assemble(
        spec,
        workers,
        attempt.store,
        attempt.chosen.state,
        reporter,
        attempt.job_folder,
        attempt.sources,
        attempt.folder.journal if attempt.store.kept else None,
        attempt.folder.path,
    )
    settle_process()
    await cluster.settle(processes(w for component in workers.components for w in component.workers), SETTLE_TIMEOUT_S)
    interrupt.orderly = True
    try:
        await Driver(parts, config, start_step=attempt.first_step, stop=interrupt.stop).run()
    except Interrupted as error:
        if not interrupt.only_asked or isinstance(error, Evicted):
            raise
    interrupt.orderly = False  # what follows is ended at once
    await parts.publisher.close()
    if attempt.model_folder is None:
        reporter.event("the trained model is not written: no storage outlives the pods; set spec.storage", Level.WARNING)
        return
    with reporter.phase("writing the model"):
        await launch.export(spec, workers, attempt.model_folder, attempt.sources)


class Announcer(Protocol):
    """Takes lines for users; a :class:`Reporter`."""

    def event(self, text: str, level: Level = Level.INFO) -> None:
        """Show one line."""


class Interruption:
    """SIGINT and SIGTERM: the first ends the run in order while it trains, at once before and after; a second SIGINT ends it at once.

    A second SIGTERM changes nothing: Ray's job stop, the pod's stop hook and the kubelet each send one.
    """

    def __init__(
        self, main: asyncio.Task[None] | None, reporter: Announcer, *, checkpoint: bool, pod_stops: Callable[[], bool] = lambda: False
    ) -> None:
        """``main`` is cancelled to end at once; ``checkpoint``: whether an orderly end leaves one; ``pod_stops``: whether the pod ends."""
        self.stop = asyncio.Event()
        self.orderly = False
        self.ending = False
        """The run is over and its processes are being ended: nothing is left to interrupt."""
        self._main = main
        self._reporter = reporter
        self._checkpoint = checkpoint
        self._pod_stops = pod_stops
        self._evicted = False
        self.only_asked = False
        """Whether the run stops because it was asked to and for no other reason; it then ends as a finished one does."""

    def ask(self, why: str) -> None:
        """See :class:`~.stopping.Stoppable`."""
        if self.ending or self.stop.is_set():
            return
        self.only_asked = True
        self.stop.set()
        self._reporter.event(f"stopping after this step: {why}")

    def interrupt(self) -> None:
        """See :class:`~.stopping.Stoppable`."""
        self._interrupted(signal.SIGINT)

    def error(self, message: str) -> Interrupted:
        """What the run ends with: who sent the first signal decides, since pods also end after a run that somebody stopped."""
        return Evicted(message) if self._evicted else Interrupted(message)

    def _interrupted(self, number: signal.Signals) -> None:
        repeated = self.stop.is_set()
        if self.ending or (repeated and number is signal.SIGTERM):
            return
        self._evicted = self._evicted or (not repeated and self._pod_stops())
        self.only_asked = False
        self.stop.set()
        if (repeated or not self.orderly) and self._main is not None:
            self._reporter.event("stopping at once", Level.WARNING)
            self._main.cancel()
            return
        what = "with a checkpoint" if self._checkpoint else "without a checkpoint, for none are kept"
        self._reporter.event(f"{number.name}: stopping after this step, {what}; interrupt again (Ctrl-C) to stop at once", Level.WARNING)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle both signals inside the block; after it SIGTERM has nothing left to end but the report, which is soon written.

        In another than the process's first thread, where Python hands out no signals, whoever started it passes them on (``Stopper``).
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
