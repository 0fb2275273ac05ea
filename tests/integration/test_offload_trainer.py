"""A policy worker whose state leaves the device between calls: same losses bit for bit, and no use of what is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rljob_runtime.errors import HostBudgetError, OffloadError
from rljob_runtime.offload.copies import Direction, HostCopies
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.records import IntArray, TrainBatch
from rljob_runtime.report.names import require_registered
from rljob_runtime.training import rank as rank_module
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets
from tests.support.trainers import VOCAB, StartPolicy, one_at_a_time, policy, save_model, tiny_qwen2

ALL = frozenset(StateKind)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with tied embeddings."""
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen2(tie_word_embeddings=True), seed=3)


@pytest.fixture
def start(model_folder: Path) -> Iterator[StartPolicy]:
    """Starts workers, one at a time."""
    with one_at_a_time(partial(policy, model_folder)) as start:
        yield start


def batch_of(seed: int) -> TrainBatch:
    """Six sequences of two prompt and four response tokens."""
    rng = np.random.default_rng(seed)
    mask = np.tile(np.array([0, 0, 1, 1, 1, 1], np.float32), 6)
    return TrainBatch(
        token_ids=rng.integers(0, VOCAB, 36).astype(np.int32),
        lengths=np.full(6, 6, np.int32),
        response_mask=mask,
        behavior_logprobs=(rng.normal(0, 0.2, 36) - np.log(VOCAB)).astype(np.float32) * mask,
        advantages=rng.normal(0, 1, 36).astype(np.float32) * mask,
        reference_logprobs=None,
        global_tokens=24,
        global_sequences=6,
        version=0,
    )


def sequences() -> tuple[IntArray, IntArray]:
    return np.arange(12, dtype=np.int32), np.array([5, 7], np.int32)


def trace(worker: PolicyWorker, between: Callable[[int], None]) -> list[str]:
    """Exact losses, gradient norms, log-probs and exported weights over four steps; ``between`` runs after every call."""
    (bucket,) = plan_buckets(worker.weight_specs(), 2**30).buckets
    found = []
    for step in range(4):
        metrics = worker.train_step([batch_of(step), batch_of(step + 100)], step)
        found += [metrics["train/policy_loss"].hex(), metrics["train/grad_norm"].hex()]
        between(step)
        found.append(worker.compute_logprobs(*sequences(), 1.0).tobytes().hex())
        between(step)
        packed = worker.pack_buckets({0: bucket})
        assert packed is not None
        found.append(packed.tobytes().hex())
        between(step)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloads_between_all_calls_change_no_bit(start: StartPolicy, dtype: str) -> None:
    plain = trace(start(dtype=dtype), lambda _: None)
    worker = start(dtype=dtype)
    taken = []

    def away_and_back(step: int) -> None:
        out = worker.offload(ALL)
        assert out.after.allocated_bytes == 0
        assert out.copied_bytes[StateKind.OPTIMIZER] > 2 * out.copied_bytes[StateKind.PARAMS] > 0
        back = worker.load(ALL)
        assert back.after.allocated_bytes == out.before.allocated_bytes == worker.memory().allocated_bytes
        taken.append(back.after.pinned_bytes)

    assert trace(worker, away_and_back) == plain
    assert len(set(taken)) == 1, "host memory is taken once"


def test_a_trained_worker_refuses_what_it_cannot_do(start: StartPolicy, tmp_path: Path) -> None:
    worker = start()
    (bucket,) = plan_buckets(worker.weight_specs(), 2**30).buckets
    worker.train_step([batch_of(0)], 0)
    worker.offload([StateKind.OPTIMIZER])
    worker.compute_logprobs(*sequences(), 1.0)
    worker.pack_buckets({0: bucket})
    with pytest.raises(
        OffloadError, match=r"policy worker 0 of 1: train_step needs its state on cpu, but optimizer is Offloaded; load it first"
    ):
        worker.train_step([batch_of(0)], 0)
    worker.load([StateKind.OPTIMIZER])
    worker.offload([StateKind.PARAMS])
    uses: dict[str, Callable[[], object]] = {
        "train_step": lambda: worker.train_step([batch_of(0)], 0),
        "compute_logprobs": lambda: worker.compute_logprobs(*sequences(), 1.0),
        "pack_buckets": lambda: worker.pack_buckets({0: bucket}),
        "save_checkpoint": lambda: worker.save_checkpoint(tmp_path / "out"),
        "load_checkpoint": lambda: worker.load_checkpoint(tmp_path / "in"),
        "export_hf": lambda: worker.export_hf(tmp_path / "export"),
    }
    for name, use in uses.items():
        with pytest.raises(OffloadError, match=rf"{name} needs .*params is Offloaded"):
            use()
    assert not list(tmp_path.iterdir())
    worker.load(ALL)
    worker.train_step([batch_of(0)], 0)


def test_state_that_a_checkpoint_replaced_moves_too(start: StartPolicy, tmp_path: Path) -> None:
    worker = start()
    worker.train_step([batch_of(0)], 0)
    worker.begin_checkpoint(tmp_path / "c")
    worker.offload(ALL)  # while files are written, from the copy
    worker.load(ALL)
    expected = worker.train_step([batch_of(1)], 1)["train/grad_norm"], worker.compute_logprobs(*sequences(), 1.0).tobytes()
    worker.finish_checkpoint(60.0)
    worker.offload(ALL)
    worker.load(ALL)
    assert worker.load_checkpoint(tmp_path / "c") == 1
    out = worker.offload(ALL)
    assert out.after.allocated_bytes == 0
    worker.load(ALL)
    assert (worker.train_step([batch_of(1)], 1)["train/grad_norm"], worker.compute_logprobs(*sequences(), 1.0).tobytes()) == expected


def test_a_frozen_reference_offloads_its_weights(start: StartPolicy) -> None:
    worker = start(trainable=False, dtype="bfloat16")
    before = worker.compute_logprobs(*sequences(), 1.0)
    out = worker.offload(ALL)
    assert out.copied_bytes[StateKind.PARAMS] > 0
    assert out.copied_bytes[StateKind.OPTIMIZER] == out.after.allocated_bytes == 0
    worker.load([StateKind.PARAMS, StateKind.OTHER])
    assert np.array_equal(worker.compute_logprobs(*sequences(), 1.0), before)


def test_the_host_budget_holds(start: StartPolicy) -> None:
    worker = start(offload_host_bytes=0)
    with pytest.raises(OffloadError, match=r"this worker's share of the budget is 0; raise spec.offload.hostMemoryBytes"):
        worker.offload(ALL)
    with pytest.raises(HostBudgetError, match=r"raise spec.offload.hostMemoryBytes"):
        worker.reserve_offload(ALL)
    worker.train_step([batch_of(0)], 0)
    assert worker.ready.store.residence(StateKind.PARAMS) is Residence.ON_DEVICE


def test_host_memory_can_be_taken_before_the_first_switch(start: StartPolicy) -> None:
    worker = start()
    worker.reserve_offload(ALL)
    reserved_bytes = worker.memory().pinned_bytes
    assert reserved_bytes > worker.memory().allocated_bytes
    assert worker.offload(ALL).after.pinned_bytes == reserved_bytes


def test_a_budget_that_is_too_small_ends_the_start_and_is_the_specs_fault(start: StartPolicy) -> None:
    """AdamW's states exist from the start, so that nothing is missing in the sum."""
    worker = start(reserve=tuple(ALL))
    needed_bytes = worker.memory().pinned_bytes
    worker.train_step([batch_of(0)], 0)
    assert worker.offload(ALL).after.pinned_bytes == needed_bytes, "the optimizer's states take no more after a step"
    start(reserve=tuple(ALL), offload_host_bytes=needed_bytes)
    too_small = rf"optimizer \(\d+ bytes\).* needs {needed_bytes} bytes .* budget is {needed_bytes - 1}; raise spec.offload.hostMemoryBytes"
    with pytest.raises(HostBudgetError, match=too_small) as caught:
        start(reserve=tuple(ALL), offload_host_bytes=needed_bytes - 1)
    assert not caught.value.retryable
    start()  # the failed one has left the process group


def test_no_host_memory_is_taken_after_the_warm_up(start: StartPolicy, tmp_path: Path) -> None:
    worker = start(reserve=tuple(ALL))
    slabs = worker.ready.store.slabs
    taken = slabs.allocations, slabs.held_bytes
    for step in range(4):
        worker.train_step([batch_of(step)], step)
        worker.offload(ALL)
        worker.load(ALL)
        if step == 1:
            worker.save_checkpoint(tmp_path / "c")
            worker.load_checkpoint(tmp_path / "c")
    assert (slabs.allocations, slabs.held_bytes) == taken


# ------------------------------------------------------------------ AdamW's states only around the optimizer's step


class Watch:
    """What of a worker is on the device at the end of backward, when gradients are there too, and in the optimizer's step."""

    def __init__(self, worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backward_bytes: list[int] = []
        self.step_bytes: list[int] = []
        optimizer = worker.ready.optimizer
        assert optimizer is not None
        clip, step = rank_module.clip_gradients, optimizer.step

        def clipped(*args: Any) -> torch.Tensor:
            self.backward_bytes.append(worker.ready.store.memory().allocated_bytes)
            return clip(*args)

        def stepped() -> None:
            self.step_bytes.append(worker.ready.store.memory().allocated_bytes)
            step()

        monkeypatch.setattr(rank_module, "clip_gradients", clipped)
        monkeypatch.setattr(optimizer, "step", stepped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_states_around_the_step_change_no_bit_and_lower_the_peak_of_backward(
    start: StartPolicy, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        worker = start(dtype=dtype)
        everywhere = Watch(worker, patch)
        plain = trace(worker, lambda _: None)
        optimizer_bytes = worker.offload([StateKind.OPTIMIZER]).freed_bytes[StateKind.OPTIMIZER]
    worker = start(dtype=dtype, optimizer_around_step=True)
    around = Watch(worker, monkeypatch)

    def away_and_back(step: int) -> None:
        if step % 2:
            worker.offload(ALL)
            assert StateKind.OPTIMIZER not in worker.load(ALL).copied_bytes, "it comes for its step alone"

    assert trace(worker, away_and_back) == plain
    assert optimizer_bytes > 0
    assert around.step_bytes == everywhere.step_bytes == everywhere.backward_bytes
    assert around.backward_bytes == [peak - optimizer_bytes for peak in everywhere.backward_bytes]
    assert worker.ready.store.slabs.allocations > 0


def test_the_moves_around_the_step_are_measured(start: StartPolicy) -> None:
    worker = start(optimizer_around_step=True)
    before = worker.memory()
    metrics = worker.train_step([batch_of(0), batch_of(1)], 0)
    require_registered(metrics)
    assert 0 < metrics["time/optimizer_load_s"] + metrics["time/optimizer_offload_s"] < metrics["time/optimizer_s"]
    after = worker.memory()
    assert after.allocated_bytes == before.allocated_bytes
    assert after.peak_bytes > 3 * after.allocated_bytes, "the peak of the step is reported although switches lay in between"
    assert worker.memory().peak_bytes == after.allocated_bytes
    assert "time/optimizer_load_s" not in start().train_step([batch_of(0)], 0)


def test_checkpoints_have_the_moments_although_they_are_away(start: StartPolicy, tmp_path: Path) -> None:
    expected = []
    for around in (False, True):
        worker = start(optimizer_around_step=around)
        worker.train_step([batch_of(0)], 0)
        worker.save_checkpoint(tmp_path / str(around))
        worker.train_step([batch_of(1)], 1)
        assert worker.load_checkpoint(tmp_path / str(not around) if (tmp_path / str(not around)).exists() else tmp_path / str(around)) == 1
        expected.append((worker.train_step([batch_of(2)], 1)["train/grad_norm"], worker.compute_logprobs(*sequences(), 1.0).tobytes()))
        held = worker.ready.store.residence(StateKind.OPTIMIZER)
        assert held is (Residence.OFFLOADED if around else Residence.ON_DEVICE)
    assert expected[0] == expected[1]


@pytest.mark.parametrize(("copy", "made"), [("load", False), ("load at last", False), ("offload", True), ("step", False)])
def test_a_failure_around_the_step_makes_it_or_does_not_and_loses_no_moment(
    start: StartPolicy, copy: str, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failures in a row, because one is tried again; after that the worker trains on like one that never failed."""

    def go_on(worker: PolicyWorker) -> list[str]:
        found = [worker.train_step([batch_of(step)], step)["train/grad_norm"].hex() for step in (2, 3)]
        return [*found, worker.compute_logprobs(*sequences(), 1.0).tobytes().hex()]

    plain = start()
    for step in (0, 1)[: 2 if made else 1]:
        plain.train_step([batch_of(step)], step)
    expected = go_on(plain)
    worker = start(optimizer_around_step=True)
    worker.train_step([batch_of(0)], 0)
    ready = worker.ready
    assert ready.optimizer is not None
    with monkeypatch.context() as patch:
        if copy == "step":
            patch.setattr(ready.optimizer, "step", lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
        else:
            direction = Direction(copy.split()[0])
            tensors = sum(1 for _ in optimizer_tensors(ready.optimizer))
            first = tensors - 1 if copy.endswith("last") else 0
            patch.setattr(ready.store, "copies", FailingDirection(direction, {first, 2 * first + 1}))
        with pytest.raises(RuntimeError, match="device lost" if copy == "step" else "was undone") as caught:
            worker.train_step([batch_of(1)], 1)
    if not made and copy != "step":
        assert isinstance(caught.value, OffloadError)
        assert str(caught.value).startswith("update 0 of step 1 was not made on any rank: ")
        assert caught.value.rolled_back
    assert ready.store.residence(StateKind.OPTIMIZER) is (Residence.ON_DEVICE if copy == "offload" else Residence.OFFLOADED)
    assert all(parameter.grad is None for parameter in ready.model.parameters())
    assert go_on(worker) == expected


def test_one_failure_around_the_step_is_tried_again(start: StartPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trace(start(), lambda _: None)
    worker = start(optimizer_around_step=True)
    for direction in Direction:
        copies = FailingDirection(direction, {0})
        monkeypatch.setattr(worker.ready.store, "copies", copies)
        worker.train_step([batch_of(0)], 0)
        assert copies.count > 1
    worker = start(optimizer_around_step=True)
    monkeypatch.setattr(worker.ready.store, "copies", FailingDirection(Direction.LOAD, {0}))
    assert trace(worker, lambda _: None) == expected


def test_lost_moments_are_never_stepped_with(start: StartPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(optimizer_around_step=True)
    worker.train_step([batch_of(0)], 0)
    before = worker.compute_logprobs(*sequences(), 1.0)
    monkeypatch.setattr(worker.ready.store, "copies", LosingCopies())
    with pytest.raises(OffloadError, match=r"update 0 of step 1 was not made on any rank: .*restart the worker") as caught:
        worker.train_step([batch_of(1)], 1)
    assert not caught.value.rolled_back
    monkeypatch.undo()
    with pytest.raises(OffloadError, match=r"train_step needs .*optimizer is Broken .*restart the worker from its last checkpoint"):
        worker.train_step([batch_of(1)], 1)
    assert np.array_equal(worker.compute_logprobs(*sequences(), 1.0), before), "its weights are whole"


def test_a_frozen_policy_has_no_optimizer_to_move() -> None:
    with pytest.raises(ValueError, match="optimizer_around_step is True with trainable False"):
        PolicyConfig(model_path="m", trainable=False, optimizer_around_step=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class FailingDirection(HostCopies):
    """Fails at the copies with these indices of one direction."""

    def __init__(self, direction: Direction, failing: set[int]) -> None:
        self.direction, self.failing = direction, failing
        self.active, self.count = direction, 0

    def begin(self, direction: Direction) -> None:
        self.active = direction

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.active is self.direction:
            index, self.count = self.count, self.count + 1
            if index in self.failing:
                target.fill_(77)
                raise RuntimeError(f"copy {index} failed")
        super().copy(target, source)


class LosingCopies(HostCopies):
    """A device that fails permanently in the middle of a load."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("device lost")

    def drain(self) -> None:
        raise RuntimeError("device lost")
