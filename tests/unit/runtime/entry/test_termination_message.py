"""The driver's last line: every error says its reason, and a worker's error what its log explains."""

import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.termination import decode, encode
from rljob_api.vocabulary import Reason
from rljob_runtime import errors
from rljob_runtime.cluster import pid_file
from rljob_runtime.entry import kubernetes
from rljob_runtime.entry.kubernetes import TerminationMessage, pod_context
from rljob_runtime.entry.termination_message import failure_of
from rljob_runtime.errors import EngineDiedError, Interrupted, RuntimeFault, WorkerFailedError, WorkerLostError
from rljob_runtime.exit_codes import ExitCode
from tests.support.pace import HANG_S
from tests.unit.api.manifests import manifest

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, BaseException) and c.__module__ == errors.__name__]
REASONS = {
    "RuntimeFault": Reason.DRIVER_FAILED,
    "SetupError": Reason.SPEC_INVALID,
    "ClusterError": Reason.NODES_MISMATCH,
    "WorkerLostError": Reason.WORKER_LOST,
    "NodeLostError": Reason.WORKER_LOST,
    "ClusterLostError": Reason.HEAD_LOST,
    "WorkerStuckError": Reason.WORKER_LOST,
    "EngineLostError": Reason.WORKER_LOST,
    "EpisodesFailedError": Reason.WORKER_FAILED,
    "EngineDiedError": Reason.WORKER_LOST,
    "WorkerFailedError": Reason.WORKER_FAILED,
    "WeightSyncError": Reason.WEIGHT_SYNC_FAILED,
    "CorruptedWeightsError": Reason.WEIGHT_SYNC_FAILED,
    "SyncBrokenError": Reason.WEIGHT_SYNC_FAILED,
    "WholeNeededError": Reason.WEIGHT_SYNC_FAILED,
    "OffloadError": Reason.OFFLOAD_FAILED,
    "HostBudgetError": Reason.SPEC_INVALID,
    "NoRoomError": Reason.SPEC_INVALID,
    "LeaseLostError": Reason.DEADLINE_EXCEEDED,
    "CheckpointError": Reason.CHECKPOINT_FAILED,
    "SupersededError": Reason.CHECKPOINT_FAILED,
    "CallbackError": Reason.DRIVER_FAILED,
    "PluginError": Reason.SPEC_INVALID,
    "RewardSetupError": Reason.REWARD_INVALID,
    "RewardsFailedError": Reason.REWARD_INVALID,
    "EnvironmentSetupError": Reason.SPEC_INVALID,
    "DataError": Reason.DATA_INVALID,
    "FilteredOutError": Reason.DATA_INVALID,
    "ModelError": Reason.MODEL_INVALID,
    "DownloadError": Reason.DRIVER_FAILED,
    "DeadlineError": Reason.DEADLINE_EXCEEDED,
    "StartupDeadlineError": Reason.STARTUP_DEADLINE_EXCEEDED,
    "ActiveDeadlineError": Reason.ACTIVE_DEADLINE_EXCEEDED,
    "BrokenGroupError": Reason.WORKER_LOST,
    "CallDeadlineError": Reason.DEADLINE_EXCEEDED,
    "Interrupted": Reason.STOPPED,
    "Evicted": Reason.EVICTED,
}


def example(cls: type[BaseException]) -> BaseException:
    if cls.__init__ is RuntimeFault.__init__:
        return cls("what broke and the remedy")
    return cls(*(f"<{name}>" for name in list(inspect.signature(cls.__init__).parameters)[1:]))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_arrives_with_its_reason_also_from_another_process(cls: type[BaseException]) -> None:
    error = pickle.loads(pickle.dumps(example(cls)))
    failure = decode("before\n" + encode(failure_of(error)) + "\n")
    assert failure is not None
    assert failure.reason is REASONS[cls.__name__]
    assert str(error) in failure.message
    assert failure.worker == getattr(error, "worker", None)
    if isinstance(error, errors.RuntimeFault):
        assert error.retryable is failure.reason.is_machine_failure


def test_an_engine_that_died_is_worth_another_attempt() -> None:
    assert EngineDiedError("x").retryable


def test_a_workers_log_explains_its_end_with_what_this_attempt_wrote(tmp_path: Path) -> None:
    log = tmp_path / "actor_train-0.log"
    log.write_text(
        "[actor_train-0] pid 1 starts a:B\nTraceback (most recent call last):\nValueError: of the first attempt\n"
        "[actor_train-0] pid 2 starts a:B\nall is well\n"
    )
    error = WorkerLostError("actor_train-0", "signal 9", str(log))
    assert failure_of(error).message == str(error)
    with log.open("a") as file:
        file.write(
            "Traceback (most recent call last):\n" + "".join(f'  File "x.py", line {i}\n' for i in range(50)) + "ValueError: second\n"
        )
    message = failure_of(error).message
    assert message.endswith("ValueError: second")
    assert "first attempt" not in message
    assert message.count("File") == 19


def test_a_log_in_another_pod_is_pointed_to() -> None:
    failed = WorkerFailedError("actor_infer-1", "start", "ValueError: no", "/nowhere/actor_infer-1.log")
    message = failure_of(failed).message
    assert "/nowhere/actor_infer-1.log" in message
    assert "kubectl logs" in message


@pytest.mark.parametrize(
    ("error", "code", "reason", "shown"),
    [
        (ZeroDivisionError("unexpected"), ExitCode.FAILED, Reason.DRIVER_FAILED, "ZeroDivisionError: unexpected"),
        (Interrupted("stopped after step 3 of 9"), ExitCode.INTERRUPTED, Reason.STOPPED, "stopped after step 3 of 9"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, Reason.STOPPED, "interrupted"),
        (errors.ModelError("no model"), ExitCode.FAILED, Reason.MODEL_INVALID, "no model"),
        (
            SpecInvalidError([FieldError(path="spec.seed", problem="is bad", remedy="be good")]),
            ExitCode.INVALID,
            Reason.SPEC_INVALID,
            "spec.seed: is bad; be good",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_whatever_ends_the_driver_its_last_line_says_why(
    error: BaseException, code: int, reason: Reason, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TerminationMessage() as last:
        error.add_note("and a note")
        raise error
    out = capsys.readouterr().out
    failure = decode(out.splitlines()[-1])
    assert last.exit_code == code
    assert failure is not None
    assert failure.reason is reason
    assert shown in failure.message
    assert "and a note" in out


def test_a_fault_before_anything_was_started_is_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminationMessage() as last:
        last.checking = True
        raise errors.ModelError("no model")
    failure = decode(capsys.readouterr().out)
    assert (last.exit_code, failure and failure.reason) == (ExitCode.INVALID, Reason.MODEL_INVALID)


def test_what_the_operator_must_set_is_named() -> None:
    with pytest.raises(errors.SetupError, match="RLJOB_NAMESPACE, RLJOB_NAME, RLJOB_ATTEMPT, RLJOB_RUN_FOLDER, RLJOB_STORAGE_SHARED must"):
        pod_context({})
    whole = {"RLJOB_NAMESPACE": "n", "RLJOB_NAME": "j", "RLJOB_ATTEMPT": "2", "RLJOB_RUN_FOLDER": "/x", "RLJOB_STORAGE_SHARED": "1"}
    assert pod_context(whole) == kubernetes.PodContext(namespace="n", job="j", attempt=2, run_folder=Path("/x"), has_storage=True)
    assert pod_context(whole | {"RLJOB_HAS_STARTED": "1"}).has_started
    with pytest.raises(errors.SetupError, match="RLJOB_ATTEMPT=0 must be a number from 1"):
        pod_context(whole | {"RLJOB_ATTEMPT": "0"})


def test_a_spec_that_is_not_there_and_a_signal_before_the_run_end_with_a_failure_line(tmp_path: Path) -> None:
    environment = {
        "RLJOB_NAMESPACE": "n",
        "RLJOB_NAME": "j",
        "RLJOB_ATTEMPT": "1",
        "RLJOB_RUN_FOLDER": str(tmp_path / "run"),
        "RLJOB_STORAGE_SHARED": "1",
    }
    arguments = ["--spec-file", str(tmp_path / "none.yaml"), "--state-folder", str(tmp_path / "state")]
    (tmp_path / "pod").touch()
    environment["KUBERNETES_SERVICE_HOST"] = "198.19.0.1"
    code = "import os, pathlib, signal, sys\nfrom rljob_runtime.entry import kubernetes\n"
    code += f"kubernetes.POD_OUTPUT = pathlib.Path({str(tmp_path / 'pod')!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(kubernetes.main(sys.argv[1:]))", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    failure = decode(done.stdout.splitlines()[-1])
    assert (done.returncode, failure and failure.reason) == (ExitCode.INVALID, Reason.SPEC_INVALID), done.stderr
    assert (tmp_path / "run" / "logs" / "driver-a1.log").read_text() == done.stdout
    killed = code + "kubernetes.checked_job = lambda path, folder, **options: os.kill(os.getpid(), signal.SIGTERM)\n"
    killed += "sys.exit(kubernetes.main(sys.argv[1:]))"
    stopped = subprocess.run([sys.executable, "-c", killed, *arguments], env=environment, capture_output=True, text=True, timeout=HANG_S)
    failure = decode(stopped.stdout.splitlines()[-1])
    assert (stopped.returncode, failure and failure.reason) == (ExitCode.INTERRUPTED, Reason.STOPPED), stopped.stderr
    pid_file.stopping_file(tmp_path / "state").touch()
    evicted = subprocess.run([sys.executable, "-c", killed, *arguments], env=environment, capture_output=True, text=True, timeout=HANG_S)
    failure = decode(evicted.stdout.splitlines()[-1])
    assert (evicted.returncode, failure and failure.reason) == (ExitCode.INTERRUPTED, Reason.EVICTED), evicted.stderr
    said = done.stdout + stopped.stdout + evicted.stdout
    assert (tmp_path / "run" / "logs" / "driver-a1.log").read_text() == said
    both = said.splitlines()
    assert (tmp_path / "pod").read_text().splitlines() == [f"[driver] {line}" for line in both], "kubectl logs of the head shows it, too"


def test_a_spec_that_is_not_mounted_is_named_with_the_cause_in_words(tmp_path: Path) -> None:
    absent = tmp_path / "rljob.yaml"
    words = f"the job's spec {absent} cannot be read: No such file or directory; the operator mounts it into the head"
    with pytest.raises(errors.SetupError) as caught:
        kubernetes.checked_job(absent, tmp_path)
    assert str(caught.value) == words
    absent.write_bytes(b"\xff")
    with pytest.raises(errors.SetupError, match="cannot be read: it is not UTF-8 text; "):
        kubernetes.checked_job(absent, tmp_path)


def test_a_job_that_has_started_is_not_refused_for_a_setting_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "rljob.yaml"
    document = manifest()
    document["spec"] |= {"training": {"minLearningRate": 1e-7}, "model": {"path": str(tmp_path / "absent"), "dtype": "float32"}}
    file.write_text(json.dumps(document))
    with pytest.raises(SpecInvalidError, match="minLearningRate"):
        kubernetes.checked_job(file, tmp_path)
    with pytest.raises(errors.ModelError, match="absent"):  # the next check, of what the spec names
        kubernetes.checked_job(file, tmp_path, started=True)
