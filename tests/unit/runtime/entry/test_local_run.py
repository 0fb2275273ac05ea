"""A manifest written for Kubernetes, on this machine: what is refused, what is said, where checkpoints go."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.reading import manifest
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.validation import check as checked
from rljob_runtime.entry import local_checks, local_run
from rljob_runtime.entry.local_run import run_job
from rljob_runtime.errors import RuntimeFault, SetupError
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.job import launch, models
from rljob_runtime.job.models import LOCAL
from rljob_runtime.job.worker_settings import spec_fingerprint
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from tests.integration.jobs import job


def a_job(**changes: Any) -> RLJob:
    return manifest.to_job(manifest.Document(data=job(Path("m"), steps=1, **changes)))


def spec(**changes: Any) -> RLJobSpec:
    return a_job(**changes).spec


def test_fields_that_do_nothing_here_are_listed_once_and_others_are_not() -> None:
    assert local_checks.notes(spec()) == ()
    group = {
        "name": "local",
        "devicesPerNode": 1,
        "deviceResource": "cpu",
        "resources": {"cpu": "2", "memory": "8Gi"},
        "nodeSelector": {"a": "b"},
    }
    kubernetes = spec(
        image="example.com/rljob:1",
        storage={"claimName": "disk"},
        head={"resources": {"cpu": "1"}},
        podTemplate={"spec": {}},
        queue={"name": "team"},
        failurePolicy={"maxRestarts": 2},
        ttlSecondsAfterFinished=0,
        managedBy="me",
        nodeGroups=[group, group | {"name": "other"}],
    )
    (note,) = local_checks.notes(kubernetes)
    assert note == (
        "without effect on this machine: spec.managedBy, spec.queue, spec.image, spec.head, spec.storage, spec.podTemplate, "
        "spec.failurePolicy, spec.ttlSecondsAfterFinished, spec.nodeGroups[].nodeSelector, spec.nodeGroups[].resources.memory"
    )
    local_checks.check(kubernetes, {})


def test_a_checkpoint_path_on_the_volume_becomes_the_run_folder_and_is_reported(tmp_path: Path) -> None:
    storage = {"claimName": "disk", "mountPath": "/storage"}
    on_volume = a_job(storage=storage, checkpoint={"path": "/storage/checkpoints"})
    assert local_checks.checkpoint_folder(on_volume, tmp_path) == tmp_path
    assert "spec.checkpoint.path /storage/checkpoints lies on the volume" in local_checks.notes(on_volume.spec)[1]
    elsewhere = a_job(checkpoint={"path": "/data/checkpoints"})
    assert local_checks.checkpoint_folder(elsewhere, tmp_path) == Path("/data/checkpoints") / elsewhere.metadata.name
    assert local_checks.checkpoint_folder(a_job(), tmp_path) == tmp_path


def test_a_secret_comes_from_the_environment_and_is_named_when_it_is_not_there() -> None:
    secret = {"name": "HUB_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    group = {"name": "local", "devicesPerNode": 2, "deviceResource": "cpu", "env": [{"name": "A", "value": "1"}, secret]}
    local_checks.check(spec(nodeGroups=[group]), {"HUB_TOKEN": "x"})
    with pytest.raises(SetupError, match=r"spec.nodeGroups\[0\].env\[1\] takes HUB_TOKEN from Secret hub; .* export it first"):
        local_checks.check(spec(nodeGroups=[group]), {})


def test_a_suspended_job_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml.safe_dump(job(Path("m"), steps=1, suspend=True))
    assert run_job(text, tmp_path / "job.yaml", tmp_path / "run", overwrite=False, resume=False) == ExitCode.INVALID
    assert capsys.readouterr().err == "spec.suspend is true: the job is suspended; write false to run it\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("resume", "said"), [(False, "is not empty; choose another output folder"), (True, "holds no run to resume")])
def test_a_folder_that_cannot_be_taken_is_a_wrong_argument(resume: bool, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch, "preflight", lambda *_: LOCAL)
    monkeypatch.setattr(local_run, "check", lambda text, **_: checked(text))
    (tmp_path / "notes.txt").touch()
    text = yaml.safe_dump(job(Path("m"), steps=1))
    assert run_job(text, tmp_path / "job.yaml", tmp_path, overwrite=False, resume=resume) == ExitCode.INVALID
    assert said in capsys.readouterr().err


def test_a_run_whose_report_cannot_be_opened_or_closed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(launch, "preflight", lambda *_: LOCAL)
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    folder.spec_yaml.write_text("x: 1\n")
    folder.metrics_jsonl.write_text('{"step": 1}\n\0\0\n{"step": 2}\n')  # after a loss of power
    text = yaml.safe_dump(job(Path("m"), steps=1))
    state = {"source_state": {}, "first_prompt": 0, "done": (), "rule_state": {}}
    fingerprint = spec_fingerprint(checked(text).job.spec)
    store = CheckpointStore(folder.checkpoints, keep=2)
    store.complete(store.begin(1, 0), DriverState(step=1, spec_fingerprint=fingerprint, **state), ())
    monkeypatch.setattr(local_run, "check", lambda text, **_: checked(text))
    monkeypatch.setattr(models, "recorded", lambda *_: {})
    assert run_job(text, tmp_path / "job.yaml", tmp_path / "run", overwrite=False, resume=True) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "metrics.jsonl:2: not JSON" in said
    assert "nothing was started" in said


def test_a_report_that_cannot_be_closed_says_that_the_run_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = RunInfo(job_name="job", model="m", algorithm="-", devices="-", total_steps=1, seed=0, spec_yaml="a: 1\n")
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    display = PlainDisplay(io.StringIO(), clock=lambda: 0.0)

    def full(*_: object) -> None:
        raise RuntimeFault("report.html cannot be written: the disk is full")

    monkeypatch.setattr(Reporter, "finish", full)
    with pytest.raises(RuntimeFault, match="the disk is full") as found, Reporter(folder, info, display, packages={}, ticker=False):
        pass
    assert "the run itself ended well" in found.value.__notes__[0]
