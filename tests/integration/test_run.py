"""``rljob run`` as users run it: real Ray, vLLM, torch and reward processes."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from rljob_api.planning.sync_routes import chosen_backend
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.validation import check
from rljob_runtime.job.assemble import run_name
from rljob_runtime.report import METRICS
from rljob_runtime.weightsync.shared_memory import FOLDER, prefix_of
from tests.integration.jobs import MASK_METRICS, RARE_METRICS, SWITCH_METRICS, Running, job
from tests.layout.tree import ROOT

STEPS = 10
LOSSES = ("step", "reward/mean", "train/total_loss", "train/grad_norm", "response/mean_tokens", "rollout/logprob_mean")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """All steps without interruption."""
    run = Running(tmp_path_factory.mktemp("whole"), job(model, steps=STEPS))
    assert run.wait() == 0, run.output
    return run


def losses(run: Running) -> list[tuple[float, ...]]:
    return [tuple(m[key] for key in LOSSES) for m in run.metrics()]


def test_a_run_trains_keeps_engines_in_step_and_writes_everything(whole: Running, model: Path) -> None:
    metrics = whole.metrics()
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1))
    assert [m["sync/version"] for m in metrics] == list(range(1, STEPS + 1))
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics)
    assert all(m["mismatch/max_abs_logprob_diff"] < 1e-4 for m in metrics)
    assert all(m["staleness/max"] == 0 for m in metrics)
    assert len({m["train/total_loss"] for m in metrics}) == STEPS
    written = {key for key in metrics[0] if "/" in key}
    expected = {name for name in METRICS if "*" not in name} - SWITCH_METRICS - RARE_METRICS
    assert expected <= written, "a registered metric that no run writes"
    assert whole.summary()["status"] == "succeeded"
    assert (whole.run_dir / "report.html").stat().st_size > 10_000
    rows = [json.loads(line) for line in (whole.run_dir / "trajectories" / "step-000003.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert yaml.safe_load((whole.run_dir / "spec.yaml").read_text())["spec"]["training"]["beta1"] == 0.9
    assert list((whole.run_dir / "tensorboard").iterdir())
    assert whole.left_behind() == []
    assert list(FOLDER.glob(f"{prefix_of(run_name(whole.run_dir))}*")) == []
    assert all(m["sync/fell_back"] == m["sync/resent"] == 0 for m in metrics)
    assert all(m["sync/load_s"] < m["sync/stall_s"] for m in metrics)
    names = {p.name for p in (whole.run_dir / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert (whole.run_dir / "model" / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_after_ctrl_c_and_after_a_kill_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    whole: Running, model: Path, tmp_path: Path
) -> None:
    slow = [{"name": "digits", "type": "Function", "function": "length_reward:slow_score"}]
    manifest = job(model, steps=STEPS, rewards=slow)
    run = Running(tmp_path, manifest, signaled=True)
    run.until("step 2", lambda: len(run.metrics()) >= 2)
    run.interrupt()
    assert run.wait() == 130, run.output
    assert run.summary()["status"] == "interrupted"
    assert run.left_behind() == []
    done = len(run.metrics())
    assert 2 <= done < STEPS - 2, "the interruption came too late to show anything"

    killed = Running(tmp_path, manifest, "--resume", signaled=True)
    beyond = done + 1 + done % 2  # a checkpoint is written after every second step
    killed.until("a step after a checkpoint", lambda: len(killed.metrics()) >= beyond)
    killed.kill()
    seen = len(killed.metrics())
    checkpoint = max(int(p.parent.name.split("-")[1]) for p in run.run_dir.glob("checkpoints/step-*/COMPLETE"))
    assert seen < STEPS, "the kill came too late to show anything"

    again = Running(tmp_path, manifest, "--resume")
    assert again.wait() == 0, again.output
    assert losses(again) == losses(whole)
    recovered = {int(m["step"]): m.get("rollout/groups_recovered", 0) for m in again.metrics()}
    assert all(recovered[step] == 4 for step in range(checkpoint + 1, seen + 1)), "finished before the kill and generated again"
    assert all(m["rollout/tokens_per_s"] == 0 for m in again.metrics() if recovered[int(m["step"])] == 4)
    assert seen == checkpoint or "finished by an earlier attempt" in again.output
    assert list((again.run_dir / "journal").iterdir()) == []
    assert again.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "role"), [("actor_infer-0", "engine"), ("actor_train-0", "trainer")])
def test_a_killed_worker_fails_the_run_and_is_named(model: Path, tmp_path: Path, worker: str, role: str) -> None:
    manifest = job(model, steps=100_000)
    manifest["spec"]["rollout"]["maxEngineRestarts"] = 0
    manifest["spec"]["failurePolicy"] = {"maxWorkerRestarts": 0}
    run = Running(tmp_path, manifest)
    run.until("the first checkpoint", lambda: bool(list(run.run_dir.glob("checkpoints/step-*/COMPLETE"))))
    os.kill(run.worker_pid(worker), signal.SIGKILL)
    assert run.wait() == 3, run.output
    failure = run.summary()["failure"]
    assert f"worker {worker} is gone" in failure, failure
    assert f"logs/{worker}.log" in failure
    assert list(run.run_dir.glob("checkpoints/step-*/COMPLETE"))
    assert run.left_behind() == []


@pytest.mark.slow
def test_the_end_of_rays_control_service_ends_the_run_with_that_and_not_a_minute_later(model: Path, tmp_path: Path) -> None:
    run = Running(tmp_path, job(model, steps=100_000), signaled=True)
    run.until("the first checkpoint", lambda: bool(list(run.run_dir.glob("checkpoints/step-*/COMPLETE"))))
    (control,) = [child for child in psutil.Process(run.process.pid).children(recursive=True) if child.name() == "gcs_server"]
    control.kill()
    assert run.wait() == 3, run.output
    assert "Ray's control service (gcs_server) has ended" in run.summary()["failure"]
    assert run.left_behind() == []


@pytest.mark.slow
def test_two_nodes_several_ranks_a_reference_and_mini_batches(model: Path, tmp_path: Path) -> None:
    groups = [
        {"name": "train", "nodes": 1, "devicesPerNode": 3, "deviceResource": "cpu"},
        {"name": "infer", "nodes": 2, "devicesPerNode": 2, "deviceResource": "cpu"},
    ]
    components = [
        {"name": "actor_train", "role": "Trainer", "placement": {"nodeGroups": ["train"], "ranks": "0-1"}, "threadsPerWorker": 1},
        {"name": "reference", "role": "Reference", "placement": {"nodeGroups": ["train"], "ranks": "2"}, "threadsPerWorker": 1},
        {"name": "actor_infer", "role": "Rollout", "placement": {"deviceMapping": "list(range(3, 6))"}, "threadsPerWorker": 1},
        {"name": "reward", "role": "Reward", "placement": {"workers": 2}},
    ]
    manifest = job(
        model,
        steps=3,
        nodeGroups=groups,
        components=components,
        algorithm={"kl": {"coefficient": 0.1}, "advantage": {"estimator": "RLOO"}, "policyLoss": {"aggregation": "SeqMeanTokenMean"}},
        training={"steps": 3, "learningRate": 1e-5, "miniBatches": 2, "epochs": 2},
        weightSync={"bucketBytes": 65536},
    )
    checked = check(manifest)
    assert chosen_backend(checked.job.spec, checked.plan) is SyncBackend.TCP
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [m["sync/version"] for m in metrics] == [1, 2, 3]
    assert [m["sync/fell_back"] for m in metrics] == [0, 0, 0], "along the chain that Auto selects; two engines of a node read one copy"
    assert 0 < metrics[0]["train/kl_loss"] < 0.01, "the policy starts as the reference"
    assert metrics[0]["train/kl_loss"] < metrics[-1]["train/kl_loss"]
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics)
    assert run.left_behind() == []


@pytest.mark.slow
def test_adapters_with_their_base_as_the_reference_beside_an_engine_of_another_type(model: Path, tmp_path: Path) -> None:
    manifest = job(model, steps=2, algorithm={"kl": {"coefficient": 0.1}}, training={"steps": 2, "learningRate": 1e-2})
    manifest["spec"]["model"] |= {"dtype": "bfloat16", "lora": {"rank": 4}}
    manifest["spec"]["components"][1]["engine"] = {"dtype": "float32"}
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    first, last = run.metrics()
    exported = (run.run_dir / "model" / "model.safetensors").stat().st_size
    assert first["sync/bytes"] == pytest.approx(exported, rel=0.05), "what travels is bfloat16, as the trainer has it"
    assert all(1e-4 < m["sync/probe_max_abs_diff"] < 0.15 for m in (first, last)), "one side rounds to bfloat16, the other does not"
    assert abs(first["train/kl_loss"]) < 1e-6, "the policy starts as its base"
    assert last["train/kl_loss"] > 1e-6
    assert not list((run.run_dir / "logs").glob("reference*"))


@pytest.mark.slow
def test_an_engine_in_bfloat16_beside_a_trainer_in_float32(model: Path, tmp_path: Path) -> None:
    manifest = job(model, steps=3)
    manifest["spec"]["components"][1]["engine"] = {"dtype": "bfloat16"}
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    assert [m["sync/version"] for m in run.metrics()] == [1, 2, 3]
    assert all(1e-4 < m["sync/probe_mean_abs_diff"] < 0.08 for m in run.metrics()), "within the limits of the coarser type"


@pytest.mark.slow
def test_a_validation_only_run_scores_the_model_and_starts_no_trainer(model: Path, tmp_path: Path) -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "evaluate.yaml").read_text())
    manifest["spec"]["model"]["path"] = str(model)
    manifest["spec"]["rewards"] = [{"name": "digits", "type": "Function", "function": "length_reward:score"}]
    manifest["spec"]["validation"] = {"maxPrompts": 5, "samplesPerPrompt": 2, "temperature": 0.9, "maxResponseTokens": 6}
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    (row,) = run.metrics()
    assert (row["step"], row["validation/prompts"], row["validation/errors"]) == (0, 5, 0)
    assert 1 <= row["validation/mean_tokens"] <= 6
    summary = run.summary()
    assert (summary["status"], summary["validation_mean"]) == ("succeeded", row["validation/mean"])
    assert re.search(rf"^validation +{row['validation/mean']:.3f}, ", run.output, re.MULTILINE), run.output
    assert (run.run_dir / "report.html").stat().st_size > 10_000
    assert not (run.run_dir / "model").exists()
    assert {log.stem for log in (run.run_dir / "logs").glob("*-0.log")} == {"actor_infer-0", "reward-0"}
    assert run.left_behind() == []
    again = Running(tmp_path, manifest, "--resume")
    assert again.wait() == 2, again.output
    assert "there is nothing to resume, spec.training.steps is 0" in again.output


@pytest.mark.slow
def test_a_reward_that_raises_or_hangs_costs_samples_not_the_job(model: Path, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(
        "import time\n\n\ndef score(prompt, response, answer, metadata):\n"
        "    if answer.endswith('0'):\n        raise ValueError('no zeros')\n"
        "    if answer.endswith('1'):\n        time.sleep(3600)\n"
        "    return len(response) / 8\n"
    )
    rewards = [{"name": "hostile", "type": "Function", "function": "hostile:score", "timeoutSeconds": 1.0}]
    rollout = {"promptsPerStep": 8, "samplesPerPrompt": 2, "maxPromptTokens": 64, "maxResponseTokens": 8, "topP": 0.9}
    run = Running(tmp_path, job(model, steps=3, rewards=rewards, rollout=rollout))
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert sum(m["reward/errors"] for m in metrics) > 0
    assert all(m["rollout/sequences"] == 16 for m in metrics)
    assert {key for m in metrics for key in m} >= MASK_METRICS
    assert run.left_behind() == []


@pytest.mark.slow
def test_a_sync_that_skips_one_tensor_is_caught_by_the_probe(model: Path, tmp_path: Path) -> None:
    run = Running(tmp_path, job(model, steps=20), adapter="tests.integration.broken_engine:ADAPTER")
    assert run.wait() == 3, run.output
    assert "actor_infer-0 and the trainer disagree by" in run.output
    assert "the engine does not hold the trainer's weights" in run.output
    assert list(FOLDER.glob(f"{prefix_of(run_name(run.run_dir))}*")) == []
