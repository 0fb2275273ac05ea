"""The driver as KubeRay starts it, on a real Ray cluster that this test brings up in the operator's place."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.termination import decode
from rljob_api.vocabulary import Reason
from rljob_runtime.entry import pre_stop
from tests.integration.jobs import LENGTH_REWARD, Driving, RayNodes, job

GROUPS = [
    {"name": "train", "devicesPerNode": 1, "deviceResource": "example.com/virtual-gpu", "deviceType": "CPU", "resources": {"cpu": "2"}},
    {"name": "infer", "devicesPerNode": 1, "deviceResource": "cpu", "resources": {"cpu": "2"}},
]
COMPONENTS = [
    {"name": "actor_train", "role": "Trainer", "placement": {"nodeGroups": ["train"], "ranks": "0"}, "threadsPerWorker": 1},
    {"name": "actor_infer", "role": "Rollout", "placement": {"nodeGroups": ["infer"], "ranks": "0"}, "threadsPerWorker": 1},
    {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
]


def manifest(model: Path, **spec: Any) -> dict[str, Any]:
    """Two nodes with a device each, one of them counted as a GPU."""
    return job(model, steps=spec.pop("steps", 4), nodeGroups=GROUPS, components=COMPONENTS, **spec)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's modules, importable by every worker as from an image."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "length_reward.py").write_text(LENGTH_REWARD)
    (folder / "hostile.py").write_text("import a_module_nobody_has\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


@pytest.fixture(scope="module")
def nodes(model: Path, code: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """The cluster of the manifest."""
    folder = tmp_path_factory.mktemp("nodes")
    with RayNodes(write(folder, manifest(model)), folder) as nodes:
        yield nodes


def write(folder: Path, manifest: dict[str, Any], name: str = "job.yaml") -> Path:
    (folder / name).write_text(yaml.safe_dump(manifest))
    return folder / name


def worker_pids(driving: Driving, name: str) -> list[int]:
    lines = (driving.run_dir / "logs" / f"{name}.log").read_text().splitlines()
    return [int(line.split("pid ")[1].split()[0]) for line in lines if line.startswith(f"[{name}] pid ")]


@pytest.mark.slow
def test_a_second_driver_resumes_after_a_kill_and_a_third_after_an_orderly_stop(nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    slow = [{"name": "digits", "type": "Function", "function": "length_reward:slow_score"}]
    write(tmp_path, manifest(model, steps=40, rewards=slow))
    short = manifest(model, steps=8, rewards=slow)
    first = Driving(tmp_path, nodes.address)
    complete = "checkpoints/step-*/COMPLETE"  # written beside the steps that follow
    first.until("a step after the first checkpoint", lambda: len(first.metrics()) >= 3 and any(first.run_dir.glob(complete)))
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    done = len(first.metrics())

    second = Driving(tmp_path, nodes.address)  # KubeRay starts the driver of the same attempt again
    second.until("a further step", lambda: len(second.metrics()) > done)
    assert pre_stop.stop(second.state_folder, 60, lambda text: None)
    assert second.wait() == 130, second.output
    failure = decode(second.output)
    assert failure is not None
    assert failure.reason is Reason.EVICTED
    assert second.output.splitlines()[-1].startswith("RLJOB-FAILURE ")
    assert "resumed after step" in second.output
    stopped_at = len(second.metrics())
    assert list(second.run_dir.glob(f"checkpoints/step-{stopped_at:06d}-*/COMPLETE"))

    short["spec"]["training"]["steps"] = stopped_at + 1
    write(tmp_path, short, "short.yaml")
    third = Driving(tmp_path, nodes.address, attempt=2, steps_file="short.yaml")
    assert third.wait() == 0, third.output
    assert decode(third.output) is None
    assert [m["step"] for m in third.metrics()] == list(range(1, stopped_at + 2))
    run = third.run_dir
    assert {p.name for p in (run / "model").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    log = (run / "logs" / "driver-a1.log").read_text()
    assert log.count("files in ") == 2, "both starts of attempt 1 are in its log"
    assert log.rstrip().endswith(second.output.splitlines()[-1])
    assert "resumed after step" in (run / "logs" / "driver-a2.log").read_text()
    assert len(worker_pids(third, "actor_train-0")) == 3, "no attempt cuts the log of an earlier one"


def test_a_missing_node_is_named_at_the_deadline(model: Path, tmp_path: Path) -> None:
    spec = write(tmp_path, manifest(model, startupDeadlineSeconds=2))
    with RayNodes(spec, tmp_path / "nodes", left_out=(1,)) as nodes:
        driving = Driving(tmp_path, nodes.address)
        assert driving.wait() == 3, driving.output
    failure = decode(driving.output)
    assert failure is not None
    assert failure.reason is Reason.NODES_MISMATCH
    assert "node 1 (group infer, index 0) has not joined" in failure.message
    assert driving.output.splitlines()[-1].startswith("RLJOB-FAILURE ")


def test_a_reward_that_cannot_be_imported_ends_with_the_python_error_and_a_broken_spec_with_its_problems(
    nodes: RayNodes, model: Path, tmp_path: Path
) -> None:
    write(tmp_path, manifest(model, rewards=[{"name": "hostile", "type": "Function", "function": "hostile:score"}]))
    driving = Driving(tmp_path, nodes.address)
    assert driving.wait() == 3, driving.output
    write(tmp_path, manifest(model) | {"kind": "RLJobs"}, "broken.yaml")
    broken = Driving(tmp_path, nodes.address, steps_file="broken.yaml")
    assert broken.wait() == 2, broken.output
    failure, refused = decode(driving.output), decode(broken.output)
    assert failure is not None
    assert failure.reason is Reason.REWARD_INVALID
    assert "a_module_nobody_has" in failure.message
    assert refused is not None
    assert refused.reason is Reason.SPEC_INVALID


@pytest.mark.slow
def test_without_storage_the_run_ends_well_and_says_what_is_lost(nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    write(tmp_path, manifest(model, steps=2, checkpoint={"everySteps": 1}))
    driving = Driving(tmp_path, nodes.address, shared="0")
    assert driving.wait() == 0, driving.output
    assert len(driving.metrics()) == 2
    assert not list(driving.run_dir.glob("checkpoints/*"))
    assert not (driving.run_dir / "model").exists()
    assert driving.output.count("spec.storage is not set") == 1
    assert "the trained model is not written" in driving.output
