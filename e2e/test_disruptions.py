"""Drains: a pod is asked to end while the job trains; the attempt ends with a checkpoint, the next one goes on, and no restart is used."""

from __future__ import annotations

from pathlib import Path

from e2e.jobs import unhurried
from e2e.kubectl import Kubectl
from e2e.test_training import STARTS_S, metrics
from e2e.volumes import Volume

NAME = "drained"
DRAINS_S = 180.0
"""The grace period, and what KubeRay needs to end the rest of the cluster."""


def trains_beyond(kubectl: Kubectl, step: int) -> None:
    kubectl.until(f"ten steps after step {step}", lambda: kubectl.step(NAME) >= step + 10, STARTS_S, job=NAME)


def test_a_drained_head_and_a_drained_trainer_cost_no_step_and_no_restart(kubectl: Kubectl, volume: Volume) -> None:
    code, job = unhurried(NAME, checkpoint_every=0)  # a checkpoint is written only where it is interrupted
    job["spec"]["failurePolicy"] = {"maxRestarts": 0, "restartBackoffSeconds": 1}
    kubectl.apply(code, job)
    trained = 0
    for attempt, group in ((1, "headgroup"), (2, "train")):
        trains_beyond(kubectl, trained)
        kubectl.evict(kubectl.pod_of(NAME, group, attempt)["metadata"]["name"])
        wanted = f"--for=jsonpath={{.status.attempt}}={attempt + 1}"
        kubectl("wait", wanted, f"rljob/{NAME}", f"--timeout={DRAINS_S:.0f}s", timeout_s=DRAINS_S + 30)
        status = kubectl.get("rljob", NAME)["status"]
        assert (status["disruptions"], status["lastFailure"]["reason"]) == (attempt, "Evicted"), status
        trained = len(metrics(volume, NAME))
        complete = [Path(file).parent.name for file in volume.files(f"{NAME}/checkpoints") if file.endswith("/COMPLETE")]
        assert any(name.startswith(f"step-{trained:06d}-") for name in complete), "the step under way was finished and saved"
    trains_beyond(kubectl, trained)
    steps = [m["step"] for m in metrics(volume, NAME)]
    assert steps == list(range(1, len(steps) + 1)), "every step is trained once"
    for attempt in (2, 3):
        assert "resum" in volume.read(f"{NAME}/logs/driver-a{attempt}.log").lower()
    kubectl("delete", "rljob", NAME)
