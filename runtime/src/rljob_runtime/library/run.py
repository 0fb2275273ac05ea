"""``rljob.run``: a job on this machine from Python, with reward functions and callbacks of the caller's own.

::

    spec, rewards ──> manifest ── check ──> preflight ──> run folder ──> attempt, in a thread of its own ──> RunResult
                                                                            |    ^
                                                                   callbacks     Stopper <── Ctrl-C, RunControl.stop

The attempt has a thread and an event loop of its own, because a notebook's main thread runs one already; Ray's processes are started in
the caller's, where they can install signal handlers. What the driver changes in its process (garbage collector, thread switches) is
undone at the end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rljob_api.validation import CheckedJob, check
from rljob_runtime.entry import attempt, local_checks, run_place
from rljob_runtime.entry.local_run import make_cluster
from rljob_runtime.errors import SetupError
from rljob_runtime.job import launch, models
from rljob_runtime.job.model_shape import read_config, read_shape
from rljob_runtime.library import rewards as given_rewards
from rljob_runtime.library.callbacks import Callback, CallbackDisplay, ReportedCheckpoints, RunControl
from rljob_runtime.library.manifests import Given, Spec, read
from rljob_runtime.library.rewards import RewardFunction, Rewards
from rljob_runtime.report import Displays, RunSummary, load_metrics, load_summary, make_display


class Outcome(StrEnum):
    """How a run ended that did not fail."""

    SUCCEEDED = "succeeded"
    """All steps are done."""
    STOPPED = "stopped"
    """A callback stopped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run left."""

    outcome: Outcome
    stop_reason: str | None
    """What the callback said; None unless it was stopped."""
    folder: Path
    """Run folder, as of ``rljob run``: report.html, logs, checkpoints."""
    model: Path | None
    """Folder of the trained model in Hugging Face layout; None after a validation without training."""
    steps: tuple[int, ...]
    """Numbers of the steps that were done, those before a resume included."""
    metrics: Mapping[str, tuple[float, ...]]
    """Every metric by its name in docs/reference/metrics.md, one value for each of ``steps``; NaN where a step has none."""
    summary: RunSummary
    """The same as summary.json."""


def run(
    spec: Spec,
    *,
    rewards: Rewards | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> RunResult:
    """Run a job on this machine and wait for its end. Ctrl-C ends it after the step under way, with a checkpoint.

    Call it in the process's main thread, in a script under ``if __name__ == "__main__":`` or not, in a notebook's cell or in a test.

    Args:
        spec: path of a manifest, the manifest as a dict, or an ``RLJob``. Modules that it names are looked for beside the file first, else
            in the working folder.
        rewards: functions ``(prompt, response, answer, metadata) -> float``, called with keywords in processes of their own: a dict by the
            reward's name, or several, or one, with the functions' own names. One adds a reward of type Function to the spec, or gives the
            entry of that name its function.
        callbacks: called at steps, validations and checkpoints.
        run_dir: run folder; ``runs/<name>`` when None.
        overwrite: replace an earlier run in that folder.
        resume: go on from its newest complete checkpoint.
        progress: show the run on standard output.

    Raises:
        SpecInvalidError: the job is invalid; holds every problem.
        RuntimeFault: the run failed, or something that it names is missing; see the tree in docs/python-api.md.
        Interrupted: Ctrl-C; a checkpoint of the last finished step is kept.
    """
    if overwrite and resume:
        raise SetupError("overwrite and resume contradict each other; give one of them")
    if threading.current_thread() is not threading.main_thread():
        raise SetupError("rljob.run starts Ray, which needs the process's main thread; call it there")
    given, functions = read(spec), given_rewards.named(rewards)
    with tempfile.TemporaryDirectory() as place:
        checked = _checked(given, functions, Path(place))
        local_checks.check(checked.job.spec, os.environ, resume=resume)
        path = Path(run_dir) if run_dir is not None else Path("runs") / checked.job.metadata.name
        given_rewards.write(functions, Path(place))
        known = models.recorded(path, checked.job.spec) if resume else {}
        sources = launch.preflight(checked.job.spec, given.folder, known)
    with run_place.taken(checked, path, overwrite=overwrite, resume=resume) as (folder, store):
        own = path / given_rewards.FOLDER
        given_rewards.write(functions, own)
        checked = _checked(given, functions, own)
        notes = local_checks.notes(checked.job.spec)
        prepared = attempt.prepare(
            checked, folder, store, resume=resume, job_folder=given.folder, model_folder=folder.model, sources=sources, notes=notes
        )
        _run(prepared, callbacks, progress=progress)
    return _result(prepared)


def _checked(given: Given, functions: Mapping[str, RewardFunction], folder: Path) -> CheckedJob:
    """The job with its reward functions read from ``folder``."""
    source = given_rewards.with_functions(given.data, functions, folder) if functions or given.text is None else given.text
    return check(source, shape_of=read_shape, config_of=read_config)


def _run(prepared: attempt.Attempt, callbacks: Sequence[Callback], *, progress: bool) -> None:
    """Run the attempt in a thread, and hand it Ctrl-C."""
    control = RunControl(prepared.stopper)
    reporting = replace(prepared, store=ReportedCheckpoints(prepared.store, callbacks, control))
    shown = [make_display(sys.stdout, clock=time.monotonic)] if progress else []
    display = Displays([*shown, CallbackDisplay(callbacks, control)])
    cluster = make_cluster(prepared.checked.job.spec, prepared.folder.logs)
    done: Future[None] = Future()

    def work() -> None:
        try:
            attempt.run(reporting, cluster, display)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            done.set_exception(error)
        else:
            done.set_result(None)

    with _process_as_it_was():
        cluster.start_processes(prepared.checked.plan)
        thread = threading.Thread(target=work, name="rljob-run")
        thread.start()
        while True:
            try:
                done.result()
            except KeyboardInterrupt:
                prepared.stopper.interrupt()
                continue
            finally:
                if done.done():
                    thread.join()
            return


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Undo after the block what the driver does to its process for the sake of speed."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)
        gc.unfreeze()


def _result(prepared: attempt.Attempt) -> RunResult:
    """What the run left in its folder."""
    folder, reason = prepared.folder, prepared.stopper.reason
    table, summary = load_metrics(folder.metrics_jsonl), load_summary(folder.summary_json)
    stopped = reason is not None and summary.steps < summary.total_steps
    return RunResult(
        outcome=Outcome.STOPPED if stopped else Outcome.SUCCEEDED,
        stop_reason=reason if stopped else None,
        folder=folder.path,
        model=folder.model if folder.model.is_dir() else None,
        steps=table.steps,
        metrics=dict(table.columns),
        summary=summary,
    )
