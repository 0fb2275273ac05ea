"""A policy worker whose state leaves the device between calls: same losses bit for bit, and no use of what is away."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rljob_runtime.errors import OffloadError
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.records import IntArray, TrainBatch
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets

VOCAB = 61
ALL = frozenset(StateKind)

Start = Callable[..., PolicyWorker]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with tied embeddings."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = Qwen2Config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start(model_folder: Path) -> Iterator[Start]:
    """Starts workers, one at a time (a process has one process group), and shuts the last one down."""
    running: list[PolicyWorker] = []

    def build(**settings: object) -> PolicyWorker:
        stop()
        config = PolicyConfig(**({"model_path": str(model_folder), "learning_rate": 1e-2} | settings))  # type: ignore[arg-type]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        worker = PolicyWorker(config, rank=0, world_size=1)
        worker.setup("127.0.0.1", port, timeout_s=30.0)
        running.append(worker)
        return worker

    def stop() -> None:
        while running:
            running.pop().shutdown()

    yield build
    stop()


def batch_of(seed: int) -> TrainBatch:
    """Six sequences of two prompt and four response tokens."""
    rng = np.random.default_rng(seed)
    mask = np.tile(np.array([0, 0, 1, 1, 1, 1], np.float32), 6)
    return TrainBatch(
        token_ids=rng.integers(0, VOCAB, 36).astype(np.int32),
        lengths=np.full(6, 6, np.int32),
        response_mask=mask,
        behaviour_logprobs=(rng.normal(0, 0.2, 36) - np.log(VOCAB)).astype(np.float32) * mask,
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
        packed = worker.pack_bucket(bucket)
        assert packed is not None
        found.append(packed.tobytes().hex())
        between(step)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloads_between_all_calls_change_no_bit(start: Start, dtype: str) -> None:
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


def test_a_trained_worker_refuses_what_it_cannot_do(start: Start, tmp_path: Path) -> None:
    worker = start()
    (bucket,) = plan_buckets(worker.weight_specs(), 2**30).buckets
    worker.train_step([batch_of(0)], 0)
    worker.offload([StateKind.OPTIMIZER])
    worker.compute_logprobs(*sequences(), 1.0)
    worker.pack_bucket(bucket)
    with pytest.raises(
        OffloadError, match=r"policy worker 0 of 1: train_step needs its state on cpu, but optimizer is Offloaded; load it first"
    ):
        worker.train_step([batch_of(0)], 0)
    worker.load([StateKind.OPTIMIZER])
    worker.offload([StateKind.PARAMS])
    uses: dict[str, Callable[[], object]] = {
        "train_step": lambda: worker.train_step([batch_of(0)], 0),
        "compute_logprobs": lambda: worker.compute_logprobs(*sequences(), 1.0),
        "pack_bucket": lambda: worker.pack_bucket(bucket),
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


def test_state_that_a_checkpoint_replaced_moves_too(start: Start, tmp_path: Path) -> None:
    worker = start()
    worker.train_step([batch_of(0)], 0)
    worker.save_checkpoint(tmp_path / "c")
    expected = worker.train_step([batch_of(1)], 1)["train/grad_norm"], worker.compute_logprobs(*sequences(), 1.0).tobytes()
    worker.offload(ALL)
    worker.load(ALL)
    assert worker.load_checkpoint(tmp_path / "c") == 1
    out = worker.offload(ALL)
    assert out.after.allocated_bytes == 0
    worker.load(ALL)
    assert (worker.train_step([batch_of(1)], 1)["train/grad_norm"], worker.compute_logprobs(*sequences(), 1.0).tobytes()) == expected


def test_a_frozen_reference_offloads_its_weights(start: Start) -> None:
    worker = start(trainable=False, dtype="bfloat16")
    before = worker.compute_logprobs(*sequences(), 1.0)
    out = worker.offload(ALL)
    assert out.copied_bytes[StateKind.PARAMS] > 0
    assert out.copied_bytes[StateKind.OPTIMIZER] == out.after.allocated_bytes == 0
    worker.load([StateKind.PARAMS, StateKind.OTHER])
    assert np.array_equal(worker.compute_logprobs(*sequences(), 1.0), before)


def test_the_host_budget_holds(start: Start) -> None:
    worker = start(offload_host_bytes=0)
    with pytest.raises(OffloadError, match=r"this worker's share of the budget is 0; raise spec.offload.hostMemoryBytes"):
        worker.offload(ALL)
    with pytest.raises(OffloadError, match=r"raise spec.offload.hostMemoryBytes"):
        worker.reserve_offload(ALL)
    worker.train_step([batch_of(0)], 0)
    assert worker._require().store.residence(StateKind.PARAMS) is Residence.ON_DEVICE


def test_host_memory_can_be_taken_before_the_first_switch(start: Start) -> None:
    worker = start()
    worker.reserve_offload(ALL)
    reserved_bytes = worker.memory().pinned_bytes
    assert reserved_bytes > worker.memory().allocated_bytes
    assert worker.offload(ALL).after.pinned_bytes == reserved_bytes
