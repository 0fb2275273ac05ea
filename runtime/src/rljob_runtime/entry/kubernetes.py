"""``python -m rljob_runtime.entry.kubernetes``: the driver of one attempt, on the head pod of a running Ray cluster. Started by KubeRay.

::

    spec file -> rljob_api (validate, plan) -> preflight -> RunFolder -> attempt on the cluster that RAY_ADDRESS names

It can be started again at any time, by the next attempt or by KubeRay after the head was lost: it goes on from the newest complete
checkpoint in the run folder. Its output goes to the Ray job's log, to ``logs/driver-a<attempt>.log`` in the run folder and to the pod's
own output. Whatever ends it, the last line gives the reason (:mod:`rljob_api.termination`). Exit codes: see
:mod:`rljob_runtime.entry.attempt`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TextIO

from rljob_api import naming
from rljob_api.errors import SpecInvalidError
from rljob_api.termination import encode
from rljob_api.v1alpha1.status import Progress
from rljob_api.validation import CheckedJob, check
from rljob_runtime.cluster import pid_file
from rljob_runtime.cluster.pod_log import POD_OUTPUT, ByteSink, PodOutput, Tee
from rljob_runtime.entry import attempt, metrics, progress
from rljob_runtime.entry.termination_message import failure_of
from rljob_runtime.errors import Evicted, Interrupted, RuntimeFault, SetupError
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.job import launch, models
from rljob_runtime.job.model_shape import read_config, read_shape
from rljob_runtime.loop.checkpointing import Checkpoints, CheckpointStore, NoCheckpoints
from rljob_runtime.report import Display, Displays, FolderMode, PlainDisplay, RunFolder
from rljob_runtime.report.prometheus import Deadline

RUNNING_CLUSTER = "auto"
"""Ray's word for the cluster that RAY_ADDRESS names."""
NO_STORAGE = (
    "spec.storage is not set, so nothing outlives the pods: no checkpoints are written, another attempt begins at step 0, "
    "and the trained model is lost"
)
TOLERATED = "the job has started and continues, but a new job with this setting would be refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContext:
    """What the operator passes to this pod."""

    namespace: str
    job: str
    attempt: int
    run_folder: Path
    has_storage: bool
    """Whether all pods, also those of later attempts, share the run folder."""
    has_started: bool = False
    """Whether a driver has trained with this spec before, maybe of an earlier version."""


def pod_context(environment: Mapping[str, str]) -> PodContext:
    """Read it from the pod's environment.

    Raises:
        SetupError: a variable is missing or malformed.
    """
    names = (naming.ENV_NAMESPACE, naming.ENV_JOB, naming.ENV_ATTEMPT, naming.ENV_RUN_FOLDER, naming.ENV_STORAGE_SHARED)
    if missing := [name for name in names if not environment.get(name)]:
        raise SetupError(f"{', '.join(missing)} must be set in the head's environment; the operator does that, podTemplate must leave it")
    number, shared = environment[naming.ENV_ATTEMPT], environment[naming.ENV_STORAGE_SHARED]
    if not number.isdecimal() or int(number) < 1 or shared not in ("0", "1"):
        raise SetupError(f"{naming.ENV_ATTEMPT}={number} must be a number from 1, {naming.ENV_STORAGE_SHARED}={shared} must be 0 or 1")
    return PodContext(
        namespace=environment[naming.ENV_NAMESPACE],
        job=environment[naming.ENV_JOB],
        attempt=int(number),
        run_folder=Path(environment[naming.ENV_RUN_FOLDER]),
        has_storage=shared == "1",
        has_started=environment.get(naming.ENV_HAS_STARTED) == "1",
    )


class TerminationMessage:
    """A context manager that turns whatever ends its body into an exit code and a last line on standard output; nothing gets past it."""

    def __init__(self) -> None:
        """Assume the best."""
        self.exit_code: int = ExitCode.OK
        self.checking = False
        """Whether the job is still being checked and nothing has been started."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Print the reason, readable text first."""
        if error is None:
            return False
        self.exit_code = exit_code_of(error, checking=self.checking)
        failure = failure_of(error)
        if isinstance(error, SpecInvalidError | RuntimeFault | Interrupted):
            lines = [f"{failure.reason}: {failure.message}", *getattr(error, "__notes__", [])]
        else:
            lines = ["".join(traceback.format_exception(error)).rstrip()]
        sys.stdout.write("\n".join([*lines, encode(failure)]) + "\n")
        sys.stdout.flush()
        return True


def exit_code_of(error: BaseException, *, checking: bool) -> int:
    """The exit code that ``error`` ends a run with."""
    if isinstance(error, SpecInvalidError | SetupError) or (checking and isinstance(error, RuntimeFault)):
        return ExitCode.INVALID
    return ExitCode.INTERRUPTED if isinstance(error, Interrupted | KeyboardInterrupt) else ExitCode.FAILED


def checked_job(spec_file: Path, run_folder: Path, *, started: bool = False) -> tuple[CheckedJob, models.ModelSources]:
    """The job, and all it names is there: where its model comes from; an earlier attempt's commit of it goes on.

    One that has ``started`` before is not refused for checks that an earlier version did not have.

    Raises:
        SpecInvalidError, RuntimeFault: not so.
    """
    try:
        text = spec_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise SetupError(f"the job's spec {spec_file} cannot be read: {why}; the operator mounts it into the head") from error
    checked = check(text, started=started, shape_of=read_shape, config_of=read_config)
    return checked, launch.preflight(checked.job.spec, None, models.recorded(run_folder, checked.job.spec))


def drive(pod: PodContext, folder: RunFolder, checked: CheckedJob, sources: models.ModelSources, state_folder: Path) -> None:
    """Run the attempt to its end.

    Raises:
        RuntimeFault, Interrupted: it did not end well.
    """
    spec = checked.job.spec
    store: Checkpoints = NoCheckpoints()
    if pod.has_storage:
        own = Path(spec.checkpoint.path) / pod.namespace / pod.job if spec.checkpoint.path else folder.checkpoints
        store = CheckpointStore(own, spec.checkpoint.keep)
    prepared = attempt.prepare(
        checked,
        folder,
        store,
        resume=True,
        job_folder=None,
        model_folder=folder.model if pod.has_storage else None,
        sources=sources,
        notes=(*(() if pod.has_storage else (NO_STORAGE,)), *(f"{TOLERATED}: {problem}" for problem in checked.tolerated)),
        pod_stops=pid_file.stopping_file(state_folder).exists,
    )
    from rljob_runtime.cluster.ray_cluster import RayCluster

    address = "::" if ":" in os.environ.get("KUBERNETES_SERVICE_HOST", "") else "0.0.0.0"
    port = naming.METRICS_PORT if spec.report.metrics_endpoint else None
    deadline = Deadline()
    facts = metrics.facts_of(checked, namespace=pod.namespace, attempt=pod.attempt, deadline=deadline)
    with metrics.served(prepared, display_of(pod, deadline), facts, address, port) as (noted, display):
        attempt.run(noted, RayCluster(RUNNING_CLUSTER, folder.logs.resolve()), display)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attempt that the environment describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rljob_runtime.entry.kubernetes", description="Driver of one attempt of an RLJob.")
    parser.add_argument("--spec-file", type=Path, default=Path(naming.SPEC_FILE), help="the resolved RLJob")
    parser.add_argument("--state-folder", type=Path, default=pid_file.STATE_FOLDER, help="where the stop hook finds this process")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, functools.partial(_stopped_early, options.state_folder))
    with contextlib.ExitStack() as outputs:
        output = outputs.enter_context(contextlib.closing(PodOutput(POD_OUTPUT, "[driver] "))) if _in_pod() else None
        outputs.enter_context(_copied_to([output] if output is not None else []))
        with TerminationMessage() as last:
            pod = pod_context(os.environ)
            folder = RunFolder.open(pod.run_folder, FolderMode.RESUME_OR_NEW)
            log = outputs.enter_context(_opened(folder.logs / f"driver-a{pod.attempt}.log"))
            outputs.enter_context(_copied_to([log]))
            _claim(pid_file.driver_file(options.state_folder))
            last.checking = True
            checked, sources = checked_job(options.spec_file, folder.path, started=pod.has_started)
            last.checking = False
            drive(pod, folder, checked, sources, options.state_folder)
    return last.exit_code


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def display_of(pod: PodContext, deadline: Deadline) -> Display:
    """Plain lines, and the RLJob's status where it can be written, which also tells its deadline."""
    lines = PlainDisplay(sys.stdout, clock=time.monotonic)
    server = progress.api_server(os.environ)
    if server is None:
        sys.stdout.write("progress is not written to the RLJob's status: this process has no ServiceAccount token\n")
        return lines
    reachable = server

    def send(value: Progress) -> str | None:
        return progress.apply_progress(reachable, pod.namespace, pod.job, value, deadline)

    return Displays([lines, progress.ProgressDisplay(send, attempt=pod.attempt, notify=_log)])


def _log(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _claim(path: Path) -> None:
    """Let the stop hook find this process.

    Raises:
        RuntimeFault: another driver runs in this pod, or the file cannot be written.
    """
    if pid := pid_file.running(path):
        raise RuntimeFault(f"another driver (pid {pid}) of this job runs in this pod already; wait for its end or stop it")
    try:
        pid_file.write(path)
    except OSError as error:
        raise RuntimeFault(f"{path} cannot be written: {error.strerror}; the pod needs a writable /tmp") from error


def _stopped_early(state_folder: Path, number: int, frame: FrameType | None) -> None:
    """Until the attempt handles signals itself."""
    kind = Evicted if pid_file.stopping_file(state_folder).exists() else Interrupted
    raise kind(f"{signal.Signals(number).name} before the run began")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[ByteSink]:
    """A log to append to, unbuffered.

    Raises:
        RuntimeFault: it cannot be written.
    """
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise RuntimeFault(f"{path} cannot be written: {error.strerror}; check the volume of spec.storage") from error
    with file:
        yield file


@contextlib.contextmanager
def _copied_to(copies: Sequence[ByteSink]) -> Iterator[None]:
    """What Python prints goes to ``copies``, too."""
    before: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
    tee = Tee(sys.stdout, copies)
    sys.stdout = sys.stderr = tee  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


if __name__ == "__main__":
    raise SystemExit(main())
