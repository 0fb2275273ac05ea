"""Real engines that fail in the middle of generation, each in another way: replaced in place, every step trained, no response lost."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rljob_runtime.cluster.host import START_WORD, WAITS_WORDS
from tests.integration.broken_engine import FAILED, FAULT_FILE, FIRST, MOVED
from tests.integration.jobs import Running, job
from tests.support import forked_workers
from tests.support.pace import HANG_S

pytestmark = pytest.mark.slow

STALL_S = 20
"""Of the hanging engine, longer than a busy machine holds up a healthy one; the others are noticed at once."""
STEPS = 12


def replaced_job(model: Path, fault_file: Path) -> dict[str, Any]:
    """One trainer and one engine, each step long enough to be hit."""
    manifest = job(model, steps=STEPS)
    manifest["spec"]["rollout"] |= {"maxResponseTokens": 64}
    manifest["spec"]["components"][1]["env"] = [{"name": FAULT_FILE, "value": str(fault_file)}]
    return manifest


def check_replaced(run: Running, times: int = 1) -> dict[str, float]:
    """Every step trained with all its samples, by one engine process more than ``times``; what was kept."""
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1))
    assert all(m["rollout/sequences"] == 16 for m in metrics)
    assert sum(m["rollout/engines_lost"] for m in metrics) == times, run.output
    assert sum(m.get("engine/replaced", 0.0) for m in metrics) == times, run.output
    assert sum(m["rollout/groups_dropped"] for m in metrics) == 0
    assert max(m["staleness/max"] for m in metrics) == 0
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics)
    assert run.log("actor_infer-0").count(" starts ") == times + 1
    assert run.left_behind() == []
    return {
        "kept": sum(m["rollout/tokens_kept"] for m in metrics),
        "moved": sum(m["rollout/requests_moved"] for m in metrics),
    }


def times_of(what: str, log: str) -> list[float]:
    """When a faulty engine printed it, in order."""
    return [float(after.split()[0]) for after in log.split(f"{what} at ")[1:]]


def pids(run: Running, name: str) -> list[str]:
    """Of the processes that were a worker, from the first lines that each wrote to its log."""
    return [line.split("pid ")[1].split()[0] for line in run.log(name).splitlines() if f" {START_WORD} " in line]


def test_an_engine_whose_thread_ends_and_one_that_hangs_are_replaced_by_standbys_and_their_tokens_are_kept(
    model: Path, tmp_path: Path
) -> None:
    file, hold = tmp_path / "fault", tmp_path / "hold"
    hold.touch()
    manifest = replaced_job(model, file)
    manifest["spec"]["rollout"] |= {"standbyProcesses": "PerNode", "stallTimeoutSeconds": STALL_S}
    # held, not timed out: no step passes before the second fault
    manifest["spec"]["rewards"][0] |= {"function": "length_reward:held_score", "timeoutSeconds": HANG_S}
    run = Running(tmp_path, manifest, adapter="tests.integration.broken_engine:FAULTY")
    run.until("the second step", lambda: len(run.metrics()) >= 2)
    for number, fault in enumerate(("raise", "hang"), start=1):
        run.until("a process that waits", lambda n=number: run.log("actor_infer-standby-0").count(WAITS_WORDS) == n)
        file.write_text(fault)
        hold.unlink()
        run.until(f"the fault {fault!r}", lambda n=number: run.log("actor_infer-0").count(FAILED) == n)
        hold.touch()
    hold.unlink()
    found = check_replaced(run, times=2)
    assert found["moved"] > 0
    assert found["kept"] > 0
    assert "CUDA error: an illegal memory access" in run.output
    assert f"it gave no token for {STALL_S} s" in run.output
    assert "actor_infer-0 was replaced within" in run.output
    # processes that had started before the faults took the place, and responses went on there
    assert pids(run, "actor_infer-0")[1:] == pids(run, "actor_infer-standby-0")[:2]
    assert times_of(MOVED, run.log("actor_infer-0"))


def test_responses_of_a_failed_engine_go_on_at_another_one_while_it_is_replaced(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    manifest = replaced_job(model, file)
    manifest["spec"]["nodeGroups"][0]["devicesPerNode"] = 3
    manifest["spec"]["components"][1]["placement"]["ranks"] = "1-2"
    manifest["spec"]["rewards"][0]["function"] = "length_reward:slow_score"
    run = Running(tmp_path, manifest, adapter="tests.integration.broken_engine:FAULTY")
    run.until("the second step", lambda: len(run.metrics()) >= 2)
    file.write_text("raise")
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1))
    assert all(m["rollout/sequences"] == 16 for m in metrics)
    assert sum(m["rollout/engines_lost"] for m in metrics) == 1, run.output
    assert sum(m["rollout/tokens_kept"] for m in metrics) > 0
    (failed,) = (name for name in ("actor_infer-0", "actor_infer-1") if FAILED in run.log(name))
    (other,) = {"actor_infer-0", "actor_infer-1"} - {failed}
    moved_s = times_of(MOVED, run.log(other))[0]
    assert all(moved_s < first_s for first_s in times_of(FIRST, run.log(failed))[1:]), "the process in its place begins later"


def test_an_engine_that_shares_its_device_with_the_trainer_is_replaced_under_its_own_lease(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    manifest = replaced_job(model, file)
    manifest["spec"]["nodeGroups"][0]["devicesPerNode"] = 1
    manifest["spec"]["components"][1]["placement"]["ranks"] = "0"
    manifest["spec"]["rollout"]["standbyProcesses"] = "PerNode"  # it may still be starting when the fault happens
    run = Running(tmp_path, manifest, adapter="tests.integration.broken_engine:FAULTY")
    run.until("the second step", lambda: len(run.metrics()) >= 2)
    file.write_text("raise")
    assert check_replaced(run)["kept"] > 0


def test_a_killed_shard_of_a_tensor_parallel_engine_is_noticed_and_the_engine_replaced(model: Path, tmp_path: Path) -> None:
    manifest = replaced_job(model, tmp_path / "fault")
    spec = manifest["spec"]
    spec["nodeGroups"][0]["devicesPerNode"] = 3
    spec["components"][1] |= {
        "placement": {"deviceMapping": "[1, 2]", "devicesPerWorker": 2},
        "engine": {"type": "VLLM", "tensorParallelSize": 2},
    }
    run = Running(tmp_path, manifest)
    run.until("the second step", lambda: len(run.metrics()) >= 2)
    engine = forked_workers.family(run.worker_pid("actor_infer-0"))
    shards = [process for process in engine if any("VLLM::Worker" in text for text in (process.name(), *process.cmdline()))]
    assert len(shards) == 2, [(process.name(), process.cmdline()) for process in engine]
    os.kill(shards[1].pid, signal.SIGKILL)
    check_replaced(run)
    assert "a process of vLLM's ended" in run.output, run.output
