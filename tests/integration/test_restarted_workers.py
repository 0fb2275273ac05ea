"""A trainer rank of two and a reward worker are killed in a real run: both start again from the checkpoint, the engine stays."""

import os
import signal
from pathlib import Path

import pytest

from rljob_runtime.cluster.host import START_WORD
from tests.integration.jobs import Running, job

pytestmark = pytest.mark.slow

STEPS = 10
BETWEEN = 3
"""Steps after which the next worker is killed."""


def newest_pid(run: Running, worker: str) -> int:
    """Of the process that is the worker now."""
    lines = [line for line in run.log(worker).splitlines() if f" {START_WORD} " in line]
    return int(lines[-1].split("pid ")[1].split()[0])


def test_a_lost_trainer_rank_and_a_lost_reward_worker_start_again_and_every_step_is_trained(model: Path, tmp_path: Path) -> None:
    """The other rank's collectives fail when one ends: that is the loss of the group, not an error of the rank that is still there."""
    manifest = job(model, steps=STEPS)
    manifest["spec"]["nodeGroups"][0]["devicesPerNode"] = 3
    for component, ranks in zip(manifest["spec"]["components"], ("0-1", "2"), strict=False):
        component["placement"]["ranks"] = ranks
    manifest["spec"]["rewards"][0]["function"] = "length_reward:slow_score"
    manifest["spec"]["failurePolicy"] = {"maxWorkerRestarts": 2}
    run = Running(tmp_path, manifest)
    for number, worker in enumerate(("actor_train-1", "reward-0"), start=1):
        run.until(f"step {number * BETWEEN}", lambda n=number: len(run.metrics()) >= n * BETWEEN)
        os.kill(newest_pid(run, worker), signal.SIGKILL)
        run.until(f"restart {number}", lambda n=number: f"restart {n} of 2" in run.output)
    assert run.wait() == 0, run.output

    metrics = run.metrics()
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1))
    assert all(m["rollout/sequences"] == 16 for m in metrics)
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics)
    started = {name: run.log(name).count(f" {START_WORD} ") for name in ("actor_train-0", "actor_train-1", "actor_infer-0", "reward-0")}
    assert started == {"actor_train-0": 3, "actor_train-1": 3, "actor_infer-0": 1, "reward-0": 3}
    assert "worker actor_train-1 is gone" in run.output, "the rank that ended is named, not the one that noticed"
    assert run.summary()["status"] == "succeeded"
    assert run.left_behind() == []
