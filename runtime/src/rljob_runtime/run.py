"""One attempt of a job on this machine, from the manifest's text to an exit code. Called by ``rljob run``.

::

    text -> rljob_api (validate, plan) -> RunFolder, Reporter -> launch (cluster, workers) -> Driver -> model, summary

| exit code | meaning                                                          |
|-----------|------------------------------------------------------------------|
| 0         | all steps trained                                                |
| 2         | the spec, or something it names, is invalid; nothing was started |
| 3         | the run failed; the newest checkpoint is kept                    |
| 130       | interrupted; a checkpoint of the last finished step was written  |
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from rljob_api.errors import SpecInvalidError
from rljob_api.plan import Plan
from rljob_api.v1alpha1 import RLJob
from rljob_api.validation import check
from rljob_runtime import launch
from rljob_runtime.checkpointing import CheckpointStore, DriverState
from rljob_runtime.driver import Driver
from rljob_runtime.errors import DeadlineError, Interrupted, RuntimeFault
from rljob_runtime.report import FolderMode, Level, Reporter, RunFolder, RunInfo, TrajectorySampling, make_display
from rljob_runtime.resolve import devices_in_words, spec_fingerprint

EXIT_OK = 0
EXIT_INVALID = 2
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130
NO_SAMPLING_STEPS = 10**9
"""A step number that no run reaches: trajectory sampling switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    job: RLJob
    plan: Plan
    folder: RunFolder
    store: CheckpointStore
    resume_folder: Path | None
    state: DriverState | None
    job_folder: Path


def run_job(text: str, path: Path, run_dir: Path | None, overwrite: bool, resume: bool) -> int:
    """Run the job; returns the exit code and has told the user why.

    Args:
        text: the manifest.
        path: where it came from; reward functions are imported from its folder.
        run_dir: run folder; ``runs/<name>`` when None.
        overwrite: replace an earlier run in that folder.
        resume: go on from its newest complete checkpoint.
    """
    try:
        checked = check(text)
        launch.preflight(checked.job.spec, path.resolve().parent)
    except (SpecInvalidError, RuntimeFault) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_INVALID
    try:
        attempt = _prepare(checked.job, checked.plan, path, run_dir, overwrite, resume)
    except RuntimeFault as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    return _run(attempt)


def _prepare(job: RLJob, plan: Plan, path: Path, run_dir: Path | None, overwrite: bool, resume: bool) -> _Attempt:
    mode = FolderMode.RESUME if resume else FolderMode.OVERWRITE if overwrite else FolderMode.NEW
    folder = RunFolder.open(run_dir or Path("runs") / job.metadata.name, mode)
    root = Path(job.spec.checkpoint.path) if job.spec.checkpoint.path else folder.checkpoints
    store = CheckpointStore(root, job.spec.checkpoint.keep)
    newest = store.newest() if resume else None
    state = store.load(newest, spec_fingerprint(job.spec)) if newest else None
    return _Attempt(job=job, plan=plan, folder=folder, store=store, resume_folder=newest, state=state, job_folder=path.resolve().parent)


def _run(attempt: _Attempt) -> int:
    spec = attempt.job.spec
    info = RunInfo(
        job_name=attempt.job.metadata.name,
        model=spec.model.path,
        algorithm=f"{spec.algorithm.advantage.estimator} {spec.algorithm.policy_loss.variant}",
        devices=devices_in_words(attempt.plan),
        total_steps=spec.training.steps,
        seed=spec.seed,
        spec_yaml=yaml.safe_dump(attempt.job.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False),
    )
    sampling = TrajectorySampling(
        per_step=spec.report.trajectories_per_step, every_steps=spec.report.trajectories_every_steps or NO_SAMPLING_STEPS
    )
    reporter = Reporter(
        attempt.folder,
        info,
        make_display(sys.stdout, clock=time.monotonic),
        resumed_step=attempt.state.step if attempt.state else None,
        sampling=sampling,
    )
    try:
        with reporter:
            asyncio.run(_attempt(attempt, reporter))
    except (Interrupted, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except RuntimeFault as error:
        for note in getattr(error, "__notes__", []):
            sys.stderr.write(f"{error}\n{note}\n")
        return EXIT_FAILED
    return EXIT_OK


async def _attempt(attempt: _Attempt, reporter: Reporter) -> None:
    spec = attempt.job.spec
    interrupt = _Interrupt(asyncio.current_task(), reporter)
    cluster = launch.make_cluster(spec, attempt.folder.logs)
    workers: launch.Workers | None = None
    with interrupt.handling_signals():
        try:
            async with _deadline(spec.active_deadline_seconds):
                workers = await launch.launch(
                    attempt.job, attempt.plan, cluster, reporter, attempt.job_folder, attempt.folder.logs.resolve()
                )
                if attempt.resume_folder is not None:
                    with reporter.phase("loading the checkpoint"):
                        await launch.load_policy(workers, attempt.resume_folder)
                parts, config = await launch.assemble(spec, workers, attempt.store, attempt.state, reporter)
                start_step = attempt.state.step if attempt.state else 0
                interrupt.orderly = True
                await Driver(parts, config, start_step=start_step, stop=interrupt.stop).run()
                interrupt.orderly = False
                with reporter.phase("writing the model"):
                    await launch.export(spec, workers, attempt.folder.model)
        except asyncio.CancelledError:
            if interrupt.stop.is_set():
                raise Interrupted("stopped at once, without a checkpoint of the step under way") from None
            raise
        finally:
            interrupt.ending = True
            with reporter.phase("stopping"):
                await launch.shut_down(cluster, workers)


@contextlib.asynccontextmanager
async def _deadline(active_deadline_s: int | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(active_deadline_s):
            yield
    except TimeoutError as error:
        if isinstance(error, RuntimeFault):
            raise
        raise DeadlineError(f"the run did not end within {active_deadline_s} s (spec.activeDeadlineSeconds)") from error


class _Interrupt:
    """SIGINT and SIGTERM: the first ends the run in order while it trains, at once before and after; a second ends it at once."""

    def __init__(self, main: asyncio.Task[None] | None, reporter: Reporter) -> None:
        self.stop = asyncio.Event()
        self.orderly = False
        self.ending = False
        """The run is over and its processes are being ended: nothing is left to interrupt."""
        self._main = main
        self._reporter = reporter

    def _interrupted(self) -> None:
        if self.ending:
            return
        at_once = self.stop.is_set() or not self.orderly
        self.stop.set()
        if at_once and self._main is not None:
            self._reporter.event("stopping at once", Level.WARNING)
            self._main.cancel()
        else:
            self._reporter.event("stopping after this step, with a checkpoint; interrupt again to stop at once", Level.WARNING)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle both signals inside the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
