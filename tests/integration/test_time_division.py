"""Trainer, engine and reference on one device: the same losses and weights as apart, and no half-done switch survives a failure."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob_runtime.cluster.host import PREPARED_WORDS
from tests.integration.jobs import SWITCH_METRICS, Running, shortened
from tests.support.pace import HANG_S

pytestmark = pytest.mark.slow

STEPS = 4
APART, TOGETHER = "quickstart", "quickstart-collocated"
RESIDENT = {"offload": {"residency": "Resident"}}
HELD = {"rewards": [{"name": "digits", "type": "Function", "function": "length_reward:held_score", "timeoutSeconds": 300}]}
"""As many points as without, but the third step waits for its reward, with the engine on the device, while the file ``hold`` exists."""
CACHE_BYTES = 32 << 20
ADAMW_MOMENTS = 2
"""Each as large as the weights."""
ENGINE, TRAINER, REWARD = "actor_infer-0", "actor_train-0", "reward-0"
HELD_STEP = 3
LONG_TOKENS = 96
"""At a high temperature: with few at a time, some are running when the trainer needs a device."""
SWITCH_S = HANG_S
STEP_TIMEOUT_S = 20
ENDS_S = HANG_S
"""Bound of the end of a run after the death of a worker, or after a deadline."""


def with_reference(manifest: dict[str, Any], device: str) -> dict[str, Any]:
    """The same job with a KL penalty; its reference runs on ``device``."""
    spec = manifest["spec"]
    spec["components"].append({"name": "reference", "role": "Reference", "placement": {"ranks": device}, "threadsPerWorker": 1})
    spec["algorithm"] = {"kl": {"coefficient": 0.1}}
    return manifest


def finished(runs: Mapping[str, Running]) -> Mapping[str, Running]:
    """The same runs, which were started side by side, after their ends."""
    for name, run in runs.items():
        assert run.wait() == 0, f"{name}: {run.output}"
    return runs


def assert_same(one: Running, other: Running) -> None:
    """Losses, rewards and responses of every step and the trained weights are equal bit for bit."""
    families = ("train/", "reward/", "rollout/logprob", "rollout/sequences", "response/", "prompt/", "mismatch/")
    ours, theirs = (
        [{name: value for name, value in step.items() if name.startswith(families)} for step in run.metrics()] for run in (one, other)
    )
    assert len(ours) == STEPS
    assert ours == theirs
    assert len({step["train/total_loss"] for step in ours}) == STEPS, "a loss that does not change shows nothing"
    assert any(step["train/grad_norm"] > 0 for step in ours)
    assert weights(one) == weights(other)


def weights(run: Running) -> bytes:
    return (run.run_dir / "model" / "model.safetensors").read_bytes()


def switched(run: Running, weight_bytes: int, *, frozen: bool = False) -> None:
    """Each step took the trainer's state and the reference's weights off the device and back; of the engine nothing was copied.

    The trainer's weights leave for the next generation shortly before or after the end of a step, so either step may count them.
    """
    steps = run.metrics()
    for step in steps:
        assert set(step) >= SWITCH_METRICS
        assert step["time/offload_s"] > 0
        assert step["time/load_s"] > 0
    moved_weights = 1 + ADAMW_MOMENTS + frozen
    moved_bytes = [step["offload/bytes"] for step in steps[1:]]  # the first step also has the start's
    assert sum(moved_bytes) == pytest.approx(2 * moved_weights * weight_bytes * len(moved_bytes), abs=1.1 * weight_bytes)


def test_with_a_reference_on_the_same_device_losses_and_weights_are_those_of_three_devices(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    apart = with_reference(shortened(APART, model, steps=STEPS), "2")
    apart["spec"]["nodeGroups"][0]["devicesPerNode"] = 3
    together = with_reference(shortened(TOGETHER, model, steps=STEPS), "0")
    runs = finished({name: Running(tmp_path_factory.mktemp(name), job) for name, job in (("apart", apart), ("together", together))})
    assert_same(runs["together"], runs["apart"])
    assert runs["apart"].metrics()[-1]["train/kl_loss"] > 0, "the reference is used"
    assert not SWITCH_METRICS & set(runs["apart"].metrics()[0])
    switched(runs["together"], stored_bytes(model), frozen=True)
    assert [run.left_behind() for run in runs.values()] == [[], []]


def stored_bytes(model: Path) -> int:
    """Bytes of the model's weights, which are stored as float32, as the trainer has them; its file holds little else."""
    return (model / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def apart(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """The quickstart as it is, shortened."""
    return Running(tmp_path_factory.mktemp("apart"), shortened(APART, model, steps=STEPS))


def test_switching_or_resident_the_quickstart_on_one_device_trains_as_on_two(model: Path, tmp_path: Path, apart: Running) -> None:
    together = {
        name: Running(tmp_path / name, shortened(TOGETHER, model, steps=STEPS, **spec))
        for name, spec in (("switching", {}), ("resident", RESIDENT))
    }
    runs = finished({"apart": apart, **together})
    assert_same(runs["switching"], runs["apart"])
    assert_same(runs["resident"], runs["apart"])
    switched(runs["switching"], stored_bytes(model))
    assert [PREPARED_WORDS in run.log(ENGINE) for run in runs.values()] == [False, True, False], "the engine imports beside the trainer"
    assert not (SWITCH_METRICS - {"offload/waits_s"}) & set(runs["resident"].metrics()[0]), "they take turns, and nothing moves"


class Halted:
    """A collocated run in the middle of a switch: the engine has left, the trainer is stopped and does not come back."""

    def __init__(self, folder: Path, model: Path, **training: int) -> None:
        # A checkpoint that is written beside the next step counts after that step, which is held here.
        job = shortened(TOGETHER, model, steps=STEPS, checkpoint={"everySteps": 1, "asynchronous": False}, **HELD)
        job["spec"]["components"][1]["engine"]["kvCacheBytes"] = CACHE_BYTES
        job["spec"]["rollout"]["maxEngineRestarts"] = 0
        job["spec"]["failurePolicy"] = {"maxWorkerRestarts": 0}
        job["spec"]["training"] |= training
        hold = folder / "hold"
        hold.touch()
        self.run = Running(folder, job)
        self.run.until("a held step", lambda: "held" in self.run.log(REWARD).splitlines())
        assert self._is_checkpointed()
        self.processes = {name: psutil.Process(self.run.worker_pid(name)) for name in (ENGINE, TRAINER)}
        self.processes[TRAINER].suspend()
        with_cache_bytes = self._engine_bytes()
        hold.unlink()
        self.run.until("the engine has left", lambda: with_cache_bytes - self._engine_bytes() > 0.9 * CACHE_BYTES, SWITCH_S)
        assert len(self.run.metrics()) == HELD_STEP - 1

    def _is_checkpointed(self) -> bool:
        return bool(list(self.run.run_dir.glob(f"checkpoints/step-{HELD_STEP - 1:06}-*/COMPLETE")))

    def _engine_bytes(self) -> int:
        held: int = self.processes[ENGINE].memory_info().rss
        return held

    def fails(self, within_s: float) -> str:
        """The run ends as failed, leaves no process behind and keeps its newest checkpoint; the failure that it reports."""
        assert self.run.wait(within_s + ENDS_S) == 3, self.run.output
        assert self.run.left_behind() == []
        assert self._is_checkpointed()
        failure: str = self.run.summary()["failure"]
        return failure


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A run whose trainer was killed in a switch, and which has ended."""
    halted = Halted(tmp_path_factory.mktemp("killed"), model)
    os.kill(halted.processes[TRAINER].pid, signal.SIGKILL)
    failure = halted.fails(0)
    assert f"worker {TRAINER} is gone" in failure, failure
    assert f"logs/{TRAINER}.log" in failure
    return halted.run


def test_a_trainer_killed_while_it_comes_back_fails_the_run_and_is_named(killed: Running) -> None:
    assert killed.summary()["status"] == "failed"
    assert [step["step"] for step in killed.metrics()] == list(range(1, HELD_STEP))


def test_resumed_after_a_switch_that_failed_the_losses_are_those_of_an_undisturbed_run(killed: Running, apart: Running) -> None:
    again = Running(killed.folder, killed.manifest, "--resume")
    finished({"apart": apart, "again": again})
    assert_same(again, apart)


def test_an_engine_killed_after_it_left_fails_the_run_though_the_trainer_does_not_answer(model: Path, tmp_path: Path) -> None:
    halted = Halted(tmp_path, model)
    os.kill(halted.processes[ENGINE].pid, signal.SIGKILL)
    assert f"worker {ENGINE} is gone" in halted.fails(0)


def test_a_trainer_that_never_comes_back_fails_the_run_at_the_deadline_of_the_step(model: Path, tmp_path: Path) -> None:
    failure = Halted(tmp_path, model, stepTimeoutSeconds=STEP_TIMEOUT_S).fails(STEP_TIMEOUT_S)
    assert f"training of step {HELD_STEP}" in failure, failure
    assert "actor_train" in failure


def test_with_the_trainer_on_half_of_the_engines_devices_the_others_take_over_unfinished_responses(model: Path, tmp_path: Path) -> None:
    """Partial-device mode. Weights that hardly change show that a response which moved goes on just where it was."""
    job = shortened(APART, model, steps=STEPS, overlap={"asyncGenerationRatio": 1, "updateMode": "Interrupt"})
    spec = job["spec"]
    spec["components"][1] |= {"placement": {"ranks": "all"}, "engine": {"prefixCaching": False, "maxRunningRequests": 2}}
    spec["offload"] = {"residency": "Switching"}
    spec["training"]["learningRate"] = 1e-12
    spec["rollout"] |= {"maxResponseTokens": LONG_TOKENS, "promptsPerStep": 8, "temperature": 2.0}
    run = finished({"partial": Running(tmp_path, job)})["partial"]
    steps = run.metrics()
    assert len(steps) == STEPS
    assert sum(step["rollout/requests_moved"] for step in steps) > 0
    assert sum(step["rollout/tokens_kept"] for step in steps) > 0
    assert max(step["response/max_tokens"] for step in steps) > 12
    for step in steps:
        assert step["mismatch/max_abs_logprob_diff"] < 1e-4
        assert step["staleness/max"] <= 1
        assert step["rollout/groups_dropped"] == 0
        assert step["time/engine_pause_s"] < ENDS_S
        assert step["offload/bytes"] > 0
    engines = {row["worker"] for row in run.rows("switches.jsonl") if row.get("worker", "").startswith("actor_infer")}
    assert engines == {"actor_infer-0"}, "the engine on other devices is never paused"
