"""One critic rank on a tiny Qwen2: values, gradients, learning, metrics, checkpoints, offload, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from rljob_runtime.errors import CheckpointError, ModelError, OffloadError
from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.records import FloatArray, TrainBatch
from rljob_runtime.report.names import require_registered
from rljob_runtime.training import model
from rljob_runtime.training.config import LoraConfig
from rljob_runtime.training.critic import CriticWorker
from rljob_runtime.training.critic_config import CriticConfig
from rljob_runtime.training.value_step import ValueMeter, accumulate_value_gradients, prepare_values
from tests.support.rounding import assert_gradients_equal
from tests.support.trainers import LEARNING_RATE, VOCAB, one_at_a_time, save_model, tiny_qwen2

HIDDEN = 24
CPU = torch.device("cpu")
ALL = frozenset(StateKind)

Start = Callable[..., CriticWorker]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with an odd vocabulary."""
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen2(tie_word_embeddings=request.param), seed=3)


@pytest.fixture
def start(model_folder: Path) -> Iterator[Start]:
    """Starts workers, one at a time."""

    def critic(**settings: object) -> CriticWorker:
        config = CriticConfig(**({"model_path": str(model_folder), "learning_rate": LEARNING_RATE} | settings))  # type: ignore[arg-type]
        return CriticWorker(config, rank=0, world_size=1)

    with one_at_a_time(critic) as start:
        yield start


def make_batch(seed: int = 0) -> TrainBatch:
    """Three prompts with four responses each, out of order, and a sequence without a response; old values and returns are noise."""
    rng = np.random.default_rng(seed)
    sequences = [(rng.integers(0, VOCAB, 4), np.zeros(4))]
    for prompt in [rng.integers(0, VOCAB, n) for n in (3, 9, 6)]:
        for size in (1, 4, 6, 6):
            sequences.append((np.r_[prompt, rng.integers(0, VOCAB, size)], np.r_[np.zeros(prompt.size), np.ones(size)]))
    order = rng.permutation(len(sequences))
    mask = np.concatenate([sequences[i][1] for i in order]).astype(np.float32)
    values, returns = rng.normal(0, 1, (2, mask.size)).astype(np.float32)
    return TrainBatch(
        token_ids=np.concatenate([sequences[i][0] for i in order]).astype(np.int32),
        lengths=np.array([sequences[i][0].size for i in order], np.int32),
        response_mask=mask,
        behavior_logprobs=np.zeros_like(mask),
        advantages=np.zeros_like(mask),
        values=values * mask,
        returns=returns * mask,
        global_tokens=int(mask.sum()),
        global_sequences=len(sequences) - 1,
        version=0,
    )


def targets(batch: TrainBatch) -> tuple[FloatArray, FloatArray]:
    assert batch.values is not None
    assert batch.returns is not None
    return batch.values, batch.returns


def set_head(worker: CriticWorker, seed: int = 1) -> None:
    """A random head, so that values differ and gradients reach the layers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in worker.model.value_head.parameters():
        full = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.data.to_local().copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local())


def full_weights(worker: CriticWorker) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in worker.model.named_parameters()}  # type: ignore[attr-defined]


def gradients(worker: CriticWorker, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Full gradients of one batch's loss; leaves the model as it was."""
    (prepared,) = prepare_values([batch], worker.config, CPU, worker.ready.costs)
    accumulate_value_gradients(worker.model, prepared, worker.config, ValueMeter(CPU))
    result = {name: p.grad.full_tensor().clone() for name, p in worker.model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    worker.model.zero_grad(set_to_none=True)
    return result


def plain_critic(folder: Path, weights: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, torch.nn.Linear]:
    """Transformers' own layers and a linear layer, with the worker's weights."""
    layers, head = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model, torch.nn.Linear(HIDDEN, 1)
    layers.load_state_dict({name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")})
    head.load_state_dict({name.removeprefix("value_head."): w for name, w in weights.items() if name.startswith("value_head.")})
    return layers, head


def plain_values(layers: torch.nn.Module, head: torch.nn.Linear, batch: TrainBatch) -> torch.Tensor:
    """Each sequence on its own: the value of the state before each token; 0 at first tokens."""
    found, begin = [], 0
    for length in batch.lengths.tolist():
        tokens = torch.from_numpy(batch.token_ids[begin : begin + length]).long()
        hidden = layers(tokens[None], use_cache=False).last_hidden_state[0]
        found += [torch.zeros(1), head(hidden[:-1]).squeeze(-1)]
        begin += length
    return torch.cat(found)


@pytest.mark.parametrize("settings", [{}, {"token_budget": 25}, {"attn_implementation": "eager"}], ids=["whole", "cut", "nothing shared"])
def test_a_value_is_read_before_its_token(start: Start, model_folder: Path, settings: dict[str, object]) -> None:
    worker = start(**settings)
    batch = make_batch()
    set_head(worker)
    worker.train_step([make_batch(1)], 0)
    got = worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask)
    with torch.no_grad():
        expected = plain_values(*plain_critic(model_folder, full_weights(worker)), batch).numpy() * batch.response_mask
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.std(got[batch.response_mask > 0]) > 0.1


def test_a_new_critic_values_everything_at_zero(start: Start) -> None:
    worker = start(activation_checkpointing=True)
    batch = make_batch()
    assert not worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask).any()
    assert {n for n, _ in worker.model.named_parameters() if not n.startswith("model.")} == {"value_head.weight", "value_head.bias"}
    before = full_weights(worker)
    worker.train_step([batch], 0)
    assert worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask).any()
    changed = {name for name, weight in full_weights(worker).items() if not torch.equal(weight, before[name])}
    assert changed == {"value_head.weight", "value_head.bias"}, "a head of zeros passes no gradient on"


def test_no_values_without_sequences(start: Start) -> None:
    assert start().compute_values(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradients_equal_a_loss_written_out(start: Start, model_folder: Path, monkeypatch: pytest.MonkeyPatch, clip: float | None) -> None:
    batch = make_batch()
    old, goal = (torch.from_numpy(array) for array in targets(batch))
    for unit_bytes, settings in (
        (model.ONE_UNIT_BYTES, {}),
        (0, {"token_budget": 25}),
        (0, {"token_budget": 60, "activation_checkpointing": True}),
    ):
        monkeypatch.setattr(model, "ONE_UNIT_BYTES", unit_bytes)
        worker = start(value=ValueLossConfig(value_clip=clip), **settings)
        set_head(worker)
        got = gradients(worker, batch)
        layers, head = plain_critic(model_folder, full_weights(worker))
        values = plain_values(layers, head, batch)
        error = (values - goal) ** 2
        if clip is not None:
            error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - goal) ** 2)
        (0.5 * error * torch.from_numpy(batch.response_mask)).sum().div(batch.global_tokens).backward()
        expected = {f"model.{n}": p.grad for n, p in layers.named_parameters()} | {
            f"value_head.{n}": p.grad for n, p in head.named_parameters()
        }
        assert_gradients_equal(got, expected)


def test_metrics_of_a_step(start: Start) -> None:
    clip = 0.4
    worker = start(value=ValueLossConfig(value_clip=clip), token_budget=25, learning_rate=1e-30)
    set_head(worker)
    batches = [make_batch(0), make_batch(1)]
    kept = [batch.response_mask > 0 for batch in batches]
    now = [worker.compute_values(b.token_ids, b.lengths, b.response_mask)[k].astype(np.float64) for b, k in zip(batches, kept, strict=True)]
    old, goal = ([targets(b)[i][k].astype(np.float64) for b, k in zip(batches, kept, strict=True)] for i in range(2))
    bounded = [np.clip(v, o - clip, o + clip) for v, o in zip(now, old, strict=True)]
    losses = [0.5 * np.maximum((v - g) ** 2, (b - g) ** 2).mean() for v, b, g in zip(now, bounded, goal, strict=True)]
    clipped = np.concatenate([(b - g) ** 2 > (v - g) ** 2 for v, b, g in zip(now, bounded, goal, strict=True)])
    metrics = worker.train_step(batches, 0)
    assert metrics["critic/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["critic/value_mean"] == pytest.approx(np.concatenate(old).mean(), rel=1e-9)
    assert metrics["critic/return_mean"] == pytest.approx(np.concatenate(goal).mean(), rel=1e-9)
    error = np.concatenate(goal) - np.concatenate(old)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - error.var() / np.concatenate(goal).var(), rel=1e-9)
    assert metrics["critic/clip_fraction"] == pytest.approx(clipped.mean(), abs=1e-9)
    assert 0.1 < clipped.mean() < 0.9
    require_registered(metrics)
    assert metrics["critic/learning_rate"] == 1e-30
    assert metrics["critic/grad_norm"] > 0


def test_equal_returns_explain_nothing(start: Start) -> None:
    batch = make_batch()
    worker = start()
    flat = dataclasses.replace(batch, returns=batch.response_mask * np.float32(0.1))
    assert worker.train_step([flat], 0)["critic/explained_variance"] == 0.0
    known = dataclasses.replace(batch, values=targets(batch)[1])
    assert worker.train_step([known], 0)["critic/explained_variance"] == 1.0


def learn(worker: CriticWorker, steps: int) -> list[float]:
    """Losses while it learns what a token is followed by: the return is 1 after tokens of the vocabulary's upper half, else 0."""
    losses = []
    for step in range(steps):
        batch = make_batch(step % 2)
        before = np.roll(batch.token_ids, 1) > VOCAB // 2
        values = worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask)
        batch = dataclasses.replace(batch, values=values, returns=before * batch.response_mask)
        losses.append(worker.train_step([batch], step)["critic/loss"])
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_and_the_same_way_each_time(start: Start, dtype: str) -> None:
    losses = learn(start(dtype=dtype), 40)
    assert losses[-1] < losses[0] / 5
    assert learn(start(dtype=dtype), 10) == losses[:10]


def test_values_are_exact_numbers_under_bfloat16(start: Start) -> None:
    worker = start(dtype="bfloat16")
    set_head(worker)
    batch = make_batch()
    values = torch.from_numpy(worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask))
    assert not torch.equal(values, values.bfloat16().float())


def test_with_adapters_these_and_the_head_are_all_that_learns(start: Start) -> None:
    worker = start(lora=LoraConfig(rank=2, alpha=4.0))
    before = full_weights(worker)
    losses = learn(worker, 40)
    assert losses[-1] < losses[0]
    changed = {name for name, weight in full_weights(worker).items() if not torch.equal(weight, before[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"lora_a", "lora_b", "weight", "bias"}
    assert {name for name in changed if "lora" not in name} == {"value_head.weight", "value_head.bias"}


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_checkpoint_resumes_bit_equal(start: Start, tmp_path: Path, steps_before: int) -> None:
    settings: dict[str, object] = {"warmup_steps": 3, "weight_decay": 0.1, "value": ValueLossConfig(value_clip=0.5)}
    worker = start(**settings)
    for step in range(steps_before):
        worker.train_step([make_batch(step)], step)
    worker.save_checkpoint(tmp_path / "c")
    later = range(steps_before, steps_before + 3)
    expected = [worker.train_step([make_batch(step)], step)["critic/loss"] for step in later]
    expected_weights = full_weights(worker)
    resumed = start(**settings, seed=99)
    resumed.train_step([make_batch(50)], 0)  # leaves other weights and moments behind, which loading must replace
    assert resumed.load_checkpoint(tmp_path / "c") == steps_before
    assert [resumed.train_step([make_batch(step)], step)["critic/loss"] for step in later] == expected
    assert all(torch.equal(tensor, expected_weights[name]) for name, tensor in full_weights(resumed).items())


def trace(worker: CriticWorker, between: Callable[[], None]) -> list[str]:
    """Exact losses, gradient norms and values over three steps; ``between`` runs after every call."""
    found = []
    for step in range(3):
        metrics = worker.train_step([make_batch(step), make_batch(step + 100)], step)
        found += [metrics["critic/loss"].hex(), metrics["critic/grad_norm"].hex()]
        between()
        batch = make_batch(7)
        found.append(worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask).tobytes().hex())
        between()
    return found


def test_offloads_between_all_calls_change_no_bit(start: Start) -> None:
    plain = trace(start(), lambda: None)
    worker = start()

    def away_and_back() -> None:
        before = {name: weight.clone() for name, weight in full_weights(worker).items()}
        out = worker.offload(ALL)
        assert out.after.allocated_bytes == 0
        assert out.copied_bytes[StateKind.OPTIMIZER] > 2 * out.copied_bytes[StateKind.PARAMS] > 0
        back = worker.load(ALL)
        assert back.after.allocated_bytes == out.before.allocated_bytes == worker.memory().allocated_bytes
        assert all(torch.equal(weight, before[name]) for name, weight in full_weights(worker).items())

    assert trace(worker, away_and_back) == plain
    worker = start(optimizer_around_step=True)
    assert trace(worker, lambda: None) == plain
    assert worker.ready.store.residence(StateKind.OPTIMIZER) is Residence.OFFLOADED


def test_what_is_away_is_not_used(start: Start) -> None:
    worker = start()
    batch = make_batch()
    worker.offload([StateKind.OPTIMIZER])
    worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask)
    with pytest.raises(OffloadError, match=r"critic worker 0 of 1: train_step needs its state on cpu, but optimizer is Offloaded"):
        worker.train_step([batch], 0)
    worker.offload([StateKind.PARAMS])
    with pytest.raises(OffloadError, match=r"compute_values needs"):
        worker.compute_values(batch.token_ids, batch.lengths, batch.response_mask)


def test_errors_say_what_is_wrong(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="critic worker 1 of 2 has no model; call setup first"):
        CriticWorker(CriticConfig(model_path="m"), 1, 2).memory()
    worker, batch = start(), make_batch()
    before = full_weights(worker)
    with pytest.raises(ValueError, match="train_step got no batches"):
        worker.train_step([], 0)
    with pytest.raises(ValueError, match="the batch has no values and returns; run compute_values"):
        worker.train_step([dataclasses.replace(batch, values=None, returns=None)], 0)
    with pytest.raises(ValueError, match=r"returns have shape \(3,\) but token_ids"):
        worker.train_step([dataclasses.replace(batch, returns=np.zeros(3, np.float32))], 0)
    with pytest.raises(ValueError, match="tokenizer and model differ"):
        worker.compute_values(batch.token_ids + VOCAB, batch.lengths, batch.response_mask)
    with pytest.raises(ModelError, match="gradient norm is nan in update 0 of step 0; the update was not made"):
        worker.train_step([dataclasses.replace(batch, returns=batch.response_mask * np.float32(np.nan))], 0)
    with pytest.raises(CheckpointError, match="nothing cannot be loaded"):
        worker.load_checkpoint(tmp_path / "nothing")
    assert all(torch.equal(weight, before[name]) for name, weight in full_weights(worker).items())
