"""One trainer rank on a tiny Qwen2: log-probs, gradients, determinism, weights, checkpoints, exports, errors."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rljob_api.vocabulary import Aggregation, KLEstimator, OptimizerStateDType, Schedule
from rljob_runtime.errors import CheckpointError, ModelError, WeightSyncError
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import TrainBatch
from rljob_runtime.report.names import METRICS
from rljob_runtime.training import checkpoint, model
from rljob_runtime.training.bfloat16_adamw import MOMENTS
from rljob_runtime.training.checkpoint_reading import METADATA, CheckedReader
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.optimizer import learning_rate_at
from rljob_runtime.training.parallel import local_tensor
from rljob_runtime.training.sharing import LINEAR_ONLY, LayerCosts
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets, unpack
from tests.support.ports import free_port
from tests.support.rounding import LOGPROBS, assert_gradients_equal
from tests.support.trainers import VOCAB, StartPolicy, one_at_a_time, policy, save_model, tiny_qwen2

TINY: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with an odd vocabulary."""
    folder = save_model(tmp_path_factory.mktemp("model"), tiny_qwen2(tie_word_embeddings=request.param), seed=3)
    (folder / "tokenizer_config.json").write_text('{"marker": 1}')
    return folder


@pytest.fixture
def start(model_folder: Path) -> Iterator[StartPolicy]:
    """Starts workers, one at a time."""
    with one_at_a_time(partial(policy, model_folder)) as start:
        yield start


def make_batch(seed: int = 0, sequences: int = 9, reference: bool = False) -> TrainBatch:
    """Random sequences, one of them without a response; behavior log-probs near uniform."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 15, sequences).astype(np.int32)
    total = int(lengths.sum())
    mask = np.zeros(total, np.float32)
    for begin, length in zip((np.cumsum(lengths) - lengths)[:-1], lengths[:-1], strict=True):
        mask[begin + 2 : begin + length] = 1.0
    noise = rng.normal(0, 0.2, (3, total)).astype(np.float32)
    return TrainBatch(
        token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        lengths=lengths,
        response_mask=mask,
        behavior_logprobs=(noise[0] - np.float32(np.log(VOCAB))) * mask,
        advantages=rng.normal(0, 1, total).astype(np.float32) * mask,
        reference_logprobs=(noise[1] - np.float32(np.log(VOCAB))) * mask if reference else None,
        global_tokens=int(mask.sum()),
        global_sequences=sequences - 1,
        version=0,
    )


def gradients(worker: PolicyWorker, batch: TrainBatch, *, packed: bool = False) -> dict[str, torch.Tensor]:
    """Full gradients of one batch's loss; leaves the model as it was."""
    device = torch.device("cpu")
    (prepared,) = prepare_batches([batch], worker.config, device, worker.ready.costs if packed else None)
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(device), fresh=True)
    result = {name: p.grad.full_tensor().clone() for name, p in worker.model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    worker.model.zero_grad(set_to_none=True)
    return result


def full_weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in worker.model.named_parameters()}  # type: ignore[attr-defined]


def make_group_batch(seed: int = 0, reference: bool = False) -> TrainBatch:
    """Three prompts with four responses each, out of order; two responses begin alike and two are equal."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, n) for n in (3, 9, 6)]
    sequences = []
    for prompt in prompts:
        responses = [rng.integers(0, VOCAB, n) for n in (1, 4, 6)]
        for response in (*responses, np.r_[responses[1][:2], responses[2]], responses[1]):
            sequences.append((np.r_[prompt, response], np.r_[np.zeros(prompt.size), np.ones(response.size)]))
    order = rng.permutation(len(sequences))
    mask = np.concatenate([sequences[i][1] for i in order]).astype(np.float32)
    noise = rng.normal(0, 0.2, (2, mask.size)).astype(np.float32) - np.float32(np.log(VOCAB))
    return TrainBatch(
        token_ids=np.concatenate([sequences[i][0] for i in order]).astype(np.int32),
        lengths=np.array([sequences[i][0].size for i in order], np.int32),
        response_mask=mask,
        behavior_logprobs=noise[0] * mask,
        advantages=rng.normal(0, 1, mask.size).astype(np.float32) * mask,
        reference_logprobs=noise[1] * mask if reference else None,
        global_tokens=int(mask.sum()),
        global_sequences=len(sequences),
        version=0,
    )


def assert_layout(worker: PolicyWorker, batch: TrainBatch, *, packed: bool) -> None:
    costs = worker.ready.costs if packed else None
    (prepared,) = prepare_batches([batch], worker.config, torch.device("cpu"), costs)
    assert {micro.packed is not None for micro in prepared.micro_batches} == {packed}


def reference_logprobs(folder: Path, batch: TrainBatch, temperature: float) -> np.ndarray:
    """Each sequence on its own through transformers and a full softmax; 0 at first positions."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, begin = np.zeros(batch.token_ids.shape, np.float32), 0
    for length in batch.lengths.tolist():
        tokens = torch.from_numpy(batch.token_ids[begin : begin + length]).long()
        with torch.no_grad():
            full = (plain(tokens[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        expected[begin + 1 : begin + length] = full[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()
        begin += length
    return expected


def test_a_frozen_policy_keeps_nothing_of_its_forward_passes(start: StartPolicy) -> None:
    """Torch notes the order of the layers in each of them until a backward, which never comes."""
    worker, batch = start(trainable=False), make_batch()
    assert worker.compute_logprobs(batch.token_ids[:0], batch.lengths[:0], 1.0).size == 0
    for _ in range(2):
        worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    assert worker.model._get_fsdp_state()._comm_ctx.post_forward_order == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers_full_softmax(start: StartPolicy, model_folder: Path, temperature: float) -> None:
    worker = start(token_budget=30, logprob_chunk_tokens=7)
    for batch in (make_batch(), make_group_batch()):
        got = worker.compute_logprobs(batch.token_ids, batch.lengths, temperature)
        np.testing.assert_allclose(got, reference_logprobs(model_folder, batch, temperature), **LOGPROBS)


@pytest.mark.parametrize("budget", [20, 10_000])
def test_logprobs_with_shared_prompts_equal_the_full_softmax_and_padded_rows(start: StartPolicy, model_folder: Path, budget: int) -> None:
    worker = start(token_budget=budget)
    batch = make_group_batch()
    assert_layout(worker, batch, packed=True)
    got = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0, wanted=batch.response_mask)
    assert np.array_equal(got, worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0, wanted=batch.response_mask))
    np.testing.assert_allclose(got, reference_logprobs(model_folder, batch, 1.0) * batch.response_mask, **LOGPROBS)
    plain = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0) * batch.response_mask
    np.testing.assert_allclose(got, plain, **LOGPROBS)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_a_loss_written_out_on_full_logits(start: StartPolicy, model_folder: Path, packed: bool) -> None:
    batch = make_group_batch(reference=True) if packed else make_batch(reference=True)
    loss_config = LossConfig(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN, kl_coefficient=0.3, kl_estimator=KLEstimator.K2)
    worker = start(loss=loss_config, token_budget=40)
    assert_layout(worker, batch, packed=packed)
    got = gradients(worker, batch, packed=packed)
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert batch.reference_logprobs is not None
    loss, begin = torch.zeros(()), 0
    for length in batch.lengths.tolist():
        part = slice(begin, begin + length)
        begin += length
        mask = torch.from_numpy(batch.response_mask[part])[1:]
        if not mask.any():
            continue
        tokens = torch.from_numpy(batch.token_ids[part]).long()
        logp = plain(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        old, advantage, ref = (torch.from_numpy(a[part])[1:] for a in (batch.behavior_logprobs, batch.advantages, batch.reference_logprobs))
        ratio = (logp - old).exp()
        terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.3 * 0.5 * (logp - ref) ** 2
        loss = loss + (terms * mask).sum() / mask.sum() / batch.global_sequences
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_gradients_equal(got, expected)


def test_gradients_do_not_depend_on_the_layout(start: StartPolicy) -> None:
    worker = start()
    batch = make_group_batch()
    plain = gradients(worker, batch)
    for settings in ({}, {"token_budget": 25}, {"activation_checkpointing": True}):
        worker = start(**settings)
        assert_layout(worker, batch, packed=True)
        shared = gradients(worker, batch, packed=True)
        assert_gradients_equal(shared, plain)


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(**TINY, ffn_dim=40, word_embed_proj_dim=24, dropout=0.5),
        FalconH1Config(
            **TINY, num_key_value_heads=2, head_dim=8, mamba_d_ssm=16, mamba_n_heads=4, mamba_d_head=4, mamba_n_groups=1,
            mamba_d_state=8, mamba_chunk_size=8, lm_head_multiplier=0.05, initializer_range=0.3,
        ),
    ],
    ids=["layers that call dropout themselves", "a multiplier of logits"],
)  # fmt: skip
def test_logprobs_are_transformers_with_activation_checkpointing(config: PretrainedConfig, tmp_path: Path) -> None:
    folder, batch = save_model(tmp_path / "model", config, seed=3), make_batch()
    expected = reference_logprobs(folder, batch, 1.0)
    with one_at_a_time(partial(policy, folder)) as start:
        worker = start(activation_checkpointing=True)
        np.testing.assert_allclose(worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0), expected, **LOGPROBS)
        found = gradients(worker, batch)
        assert_gradients_equal(found, gradients(start(), batch))


def test_metrics_do_not_depend_on_the_layout(start: StartPolicy) -> None:
    worker = start()
    batch = make_group_batch()
    shared = worker.train_step([batch], step=0)
    worker = start(attn_implementation="eager")
    assert not worker.ready.costs.may_pack
    plain = worker.train_step([batch], step=0)
    for name, value in plain.items():
        if not name.startswith("time/"):
            assert shared[name] == pytest.approx(value, abs=2e-6), name


def test_arrays_that_cannot_be_written_train_without_a_warning(start: StartPolicy) -> None:
    batch = make_group_batch(reference=True)
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics = start(loss=LossConfig(kl_coefficient=0.1)).train_step([batch], step=0)
    assert metrics["train/grad_norm"] > 0


SMALL = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}


def costs_of(config: PretrainedConfig, attention: str = "sdpa", device: str = "cpu") -> LayerCosts:
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.prepare_attention(made)
    return model.layer_costs(made, torch.device(device))


def test_only_models_that_attend_to_all_earlier_tokens_pack() -> None:
    per_layer = 2 * 24 * 24 + 24 + 2 * (24 * 12 + 12) + 3 * 24 * 40 + 2 * 24  # query and output, key and value, MLP, norms
    known = LayerCosts(linear_flops=2.0 * 2 * per_layer, attention_flops=4.0 * 24 * 2, call_flops=1.5e6 * 2)
    assert costs_of(Qwen2Config(**SMALL)) == known
    assert costs_of(LlamaConfig(**SMALL)).may_share
    assert costs_of(Qwen2Config(**SMALL), attention="eager") == replace(known, may_pack=False, may_share=False)
    assert costs_of(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)) == LINEAR_ONLY
    assert costs_of(MistralConfig(**SMALL, sliding_window=8)) == LINEAR_ONLY
    assert costs_of(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=32)) == LINEAR_ONLY


@pytest.mark.parametrize("config", [Qwen2Config(**SMALL), MistralConfig(**SMALL, sliding_window=8)], ids=["known", "unknown"])
def test_a_micro_batch_costs_more_by_itself_on_an_accelerator(config: PretrainedConfig) -> None:
    on_cpu = costs_of(config)
    assert on_cpu.overhead_tokens == 256
    assert costs_of(config, device="cuda") == replace(on_cpu, overhead_tokens=2048, call_flops=0.0, by_blocks=on_cpu.may_pack)


@pytest.mark.parametrize("one_unit_bytes", [0, model.ONE_UNIT_BYTES], ids=["sharded by layer", "one unit"])
def test_micro_batched_gradients_equal_one_big_batch(start: StartPolicy, monkeypatch: pytest.MonkeyPatch, one_unit_bytes: int) -> None:
    batch = make_batch()
    whole = gradients(start(token_budget=10_000), batch)
    monkeypatch.setattr(model, "ONE_UNIT_BYTES", one_unit_bytes)
    for settings in ({"token_budget": 14}, {"token_budget": 40, "activation_checkpointing": True}):
        parts = gradients(start(**settings), batch)
        assert_gradients_equal(parts, whole)


def test_same_seed_gives_bit_identical_steps(start: StartPolicy) -> None:
    batches = [make_batch(0), make_group_batch(1)]
    runs = []
    for _ in range(2):
        worker = start()
        metrics = [worker.train_step(batches, step) for step in range(3)]
        runs.append([{k: v for k, v in m.items() if not k.startswith("time/")} for m in metrics])
    assert runs[0] == runs[1]


def test_metrics_of_the_first_step(start: StartPolicy) -> None:
    worker = start()
    batch = make_batch()
    logprobs = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    kept = batch.response_mask > 0
    difference = (logprobs - batch.behavior_logprobs)[kept].astype(np.float64)
    metrics = worker.train_step([batch, batch], step=0)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-difference.mean(), abs=1e-6)
    assert metrics["mismatch/kl_k3"] == pytest.approx((np.exp(difference) - difference - 1).mean(), abs=1e-6)
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(np.abs(difference).max(), abs=1e-6)
    weight = np.exp(difference)
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(weight.sum() ** 2 / (weight**2).sum() / kept.sum(), abs=1e-6)
    assert metrics["train/tokens"] == 2 * batch.token_ids.size
    assert not {name for name in metrics if name not in METRICS}
    assert metrics["train/entropy_from_behavior"] == pytest.approx(-batch.behavior_logprobs[kept].mean(), abs=1e-6)
    assert metrics["train/total_loss"] == metrics["train/policy_loss"]
    assert metrics["train/ratio_min"] < metrics["train/ratio_mean"] < metrics["train/ratio_max"]


def test_training_raises_the_probability_of_what_was_good(start: StartPolicy) -> None:
    worker = start()
    batch = make_batch()
    logprobs = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    batch = replace(batch, behavior_logprobs=logprobs * batch.response_mask, advantages=batch.response_mask.copy())
    first = worker.train_step([batch], step=0)
    after = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    assert first["train/ratio_max"] == first["train/ratio_min"] == 1.0  # on-policy, to the bit
    assert (after * batch.response_mask).sum() > (logprobs * batch.response_mask).sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_bytes_are_the_weights(start: StartPolicy, dtype: str) -> None:
    worker = start(dtype=dtype)
    worker.train_step([make_batch()], step=0)
    manifest = plan_buckets(worker.weight_specs(), bucket_bytes=4096)
    assert len(manifest.buckets) > 1
    received: dict[str, torch.Tensor] = {}
    for bucket in manifest.buckets:
        data = worker.pack_buckets({0: bucket})
        assert data is not None
        received |= {name: tensor.clone() for name, tensor in unpack(bucket, data)}
    expected = full_weights(worker)
    assert received.keys() == expected.keys()
    assert ("lm_head.weight" in received) is not worker.model.config.tie_word_embeddings
    for name, tensor in received.items():
        assert torch.equal(tensor, expected[name].to(getattr(torch, dtype)))


def test_bfloat16_trains_on_float32_masters(start: StartPolicy) -> None:
    batch = make_batch()
    exact = start().compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    worker = start(dtype="bfloat16", learning_rate=1e-6)
    rounded = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    assert 0 < np.abs(rounded - exact).max() < 0.05
    before = full_weights(worker)
    worker.train_step([batch], step=0)
    after = full_weights(worker)
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].dtype is torch.float32
    assert 0 < (after[name] - before[name]).abs().max() < 2e-6  # far below one bfloat16 step: kept only by the masters


def test_bucket_of_another_model_is_refused(start: StartPolicy) -> None:
    worker = start()
    (bucket,) = plan_buckets([("model.norm.weight", "float32", (25,))], 4096).buckets
    with pytest.raises(WeightSyncError, match=r"model.norm.weight \(25,\) is of shape \(24,\)"):
        worker.pack_buckets({0: bucket})


@pytest.mark.parametrize(
    ("steps_before", "beside", "states"),
    [(0, False, OptimizerStateDType.FLOAT32), (2, True, OptimizerStateDType.FLOAT32), (2, False, OptimizerStateDType.BFLOAT16)],
)
def test_checkpoint_resumes_bit_equal(
    start: StartPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_before: int, beside: bool, states: OptimizerStateDType
) -> None:
    """``beside``: what is trained before the files are there is not in them. They are as many as on an accelerator then."""
    monkeypatch.setitem(checkpoint.FILES, "cpu", 4 if beside else 1)
    same: dict[str, Any] = {"warmup_steps": 3, "weight_decay": 0.1, "optimizer_state_dtype": states}
    worker = start(**same)
    for step in range(steps_before):
        worker.train_step([make_batch(step)], step)
    worker.begin_checkpoint(tmp_path / "c") if beside else worker.save_checkpoint(tmp_path / "c")
    expected = [worker.train_step([make_batch(step)], step)["train/total_loss"] for step in range(steps_before, steps_before + 3)]
    expected_weights = full_weights(worker)
    if beside:
        assert {file.name for file in worker.finish_checkpoint(60.0)} == {path.name for path in (tmp_path / "c").iterdir()}
    assert len(list((tmp_path / "c").glob("*.distcp"))) == checkpoint.FILES["cpu"]
    resumed = start(**same, seed=99 if states is OptimizerStateDType.FLOAT32 else worker.config.seed)
    resumed.train_step([make_batch(50)], 0)  # leaves other weights and moments behind, which loading must replace
    assert resumed.load_checkpoint(tmp_path / "c") == steps_before
    got = [resumed.train_step([make_batch(step)], step)["train/total_loss"] for step in range(steps_before, steps_before + 3)]
    assert got == expected
    assert all(torch.equal(tensor, expected_weights[name]) for name, tensor in full_weights(resumed).items())


def test_a_checkpoint_of_moments_of_the_other_type_is_taken_over(start: StartPolicy, tmp_path: Path) -> None:
    def moments(worker: PolicyWorker) -> list[torch.Tensor]:
        assert worker.ready.optimizer is not None
        return [local_tensor(state[name]).clone() for state in worker.ready.optimizer.state.values() for name in MOMENTS]

    def trained(states: OptimizerStateDType) -> PolicyWorker:
        worker = start(optimizer_state_dtype=states)
        worker.train_step([make_batch(0)], 0)
        kept = moments(worker)
        worker.offload({StateKind.OPTIMIZER})
        worker.load({StateKind.OPTIMIZER})
        assert all(torch.equal(one, other) for one, other in zip(kept, moments(worker), strict=True))
        return worker

    for saved, loaded in (tuple(OptimizerStateDType), tuple(reversed(OptimizerStateDType))):
        worker = trained(saved)
        worker.save_checkpoint(tmp_path / saved)
        expected = moments(worker)
        other = trained(loaded)
        assert other.load_checkpoint(tmp_path / saved) == 1
        assert all(m.dtype is getattr(torch, loaded) for m in moments(other))
        assert all(torch.equal(m, e.to(m.dtype)) for m, e in zip(moments(other), expected, strict=True))
        other.train_step([make_batch(1)], 1)


def test_changed_settings_survive_loading(start: StartPolicy, tmp_path: Path) -> None:
    start(weight_decay=0.1).save_checkpoint(tmp_path / "c")
    worker = start(weight_decay=0.5, betas=(0.5, 0.6))
    worker.load_checkpoint(tmp_path / "c")
    optimizer = worker.ready.optimizer
    assert optimizer is not None
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)


class Bomb:
    """Runs a command where it is unpickled without limits."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.victim}",)


def test_nothing_that_somebody_put_into_a_checkpoint_is_executed(start: StartPolicy, tmp_path: Path) -> None:
    worker, folder, victim = start(), tmp_path / "c", tmp_path / "victim"
    worker.save_checkpoint(folder)
    assert worker.load_checkpoint(folder) == 0
    plan = folder / METADATA
    metadata = CheckedReader(folder).read_metadata()
    torch.save(Bomb(victim), folder / "bomb")

    def pointed_at(file: str) -> Metadata:
        """All values that are no tensors come from ``file``."""
        size_bytes = (folder / "bomb").stat().st_size
        values = [index for index in metadata.storage_data if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)]
        assert values
        return replace(metadata, storage_data=metadata.storage_data | dict.fromkeys(values, _StorageInfo(file, 0, size_bytes)))

    for hostile, reason in (
        (Bomb(victim), r"refers to posix.system, which no checkpoint has"),
        (pointed_at("bomb"), r"cannot be loaded into this model"),
        (pointed_at("../bomb"), r"'../bomb', which is no plain file of the checkpoint"),
        ({}, r"holds no plan of a checkpoint"),
    ):
        plan.write_bytes(pickle.dumps(hostile))
        with pytest.raises(CheckpointError, match=reason):
            worker.load_checkpoint(folder)
    assert not victim.exists()


def test_missing_checkpoint_is_named(start: StartPolicy, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing cannot be loaded"):
        start().load_checkpoint(tmp_path / "nothing")


def test_export_loads_in_transformers_with_equal_weights(start: StartPolicy, tmp_path: Path) -> None:
    worker = start()
    worker.train_step([make_batch()], step=0)
    worker.export_hf(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(loaded) is Qwen2ForCausalLM
    expected = full_weights(worker)
    assert {n for n, _ in loaded.named_parameters()} == expected.keys()
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"marker": 1}'


def test_frozen_reference_scores_and_never_changes(start: StartPolicy) -> None:
    batch = make_batch()
    trained = start().compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    worker = start(trainable=False)
    before = full_weights(worker)
    scores = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0, wanted=batch.response_mask)
    assert np.array_equal(scores, trained * batch.response_mask)
    for call in (lambda: worker.train_step([batch], 0), lambda: worker.save_checkpoint("never")):
        with pytest.raises(ModelError, match="frozen policy"):
            call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(worker).items())


def test_bad_input_is_refused_before_anything_changes(start: StartPolicy) -> None:
    worker = start(loss=LossConfig(kl_coefficient=0.1))
    before = full_weights(worker)
    good = make_batch(reference=True)
    bad_token = replace(good, token_ids=good.token_ids + 1000)
    infinite = replace(good, advantages=np.where(good.response_mask > 0, np.float32(np.inf), np.float32(0)))
    with pytest.raises(ValueError, match="vocabulary has 61"):
        worker.train_step([bad_token], 0)
    with pytest.raises(ValueError, match="no reference_logprobs"):
        worker.train_step([make_batch()], 0)
    with pytest.raises(ValueError, match="no batches"):
        worker.train_step([], 0)
    with pytest.raises(ModelError, match="gradient norm is nan in update 0 of step 4"):
        worker.train_step([infinite], 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(worker).items())
    worker.train_step([good], 0)


def test_missing_model_is_named_with_a_remedy() -> None:
    worker = PolicyWorker(PolicyConfig(model_path="/no/such/model"), 0, 1)
    with pytest.raises(ModelError, match="/no/such/model does not exist; give an existing folder"):
        worker.setup("127.0.0.1", free_port(), timeout_s=5.0)
    with pytest.raises(ModelError, match="call setup first"):
        worker.weight_specs()


def test_model_with_absolute_positions_works_too(start: StartPolicy, tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=32)).save_pretrained(tmp_path / "gpt2")
    worker = start(model_path=str(tmp_path / "gpt2"))
    before = worker.train_step([make_batch()], step=0)["train/total_loss"]
    assert worker.train_step([make_batch()], step=1)["train/total_loss"] < before


def test_learning_rate_schedules() -> None:
    def rates(schedule: Schedule, steps: list[int], smallest: float = 0.0) -> list[float]:
        config = PolicyConfig(
            model_path="m", learning_rate=1.0, min_learning_rate=smallest, warmup_steps=2, total_steps=6, lr_schedule=schedule
        )
        return [learning_rate_at(config, step) for step in steps]

    assert rates(Schedule.CONSTANT, [0, 1, 2, 100]) == [0.5, 1.0, 1.0, 1.0]
    assert rates(Schedule.LINEAR, [0, 2, 4, 6, 9]) == [0.5, 1.0, 0.5, 0.0, 0.0]
    assert rates(Schedule.COSINE, [2, 4, 6]) == pytest.approx([1.0, 0.5, 0.0])
    assert rates(Schedule.LINEAR, [0, 2, 4, 6, 9], smallest=0.2) == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])
    assert rates(Schedule.COSINE, [2, 4, 6, 9], smallest=0.2) == pytest.approx([1.0, 0.6, 0.2, 0.2])
    with pytest.raises(ValueError, match="must be at most learning_rate, 1e-06"):
        PolicyConfig(model_path="m", learning_rate=1e-6, min_learning_rate=1e-5)
    with pytest.raises(ValueError, match="set total_steps above warmup_steps"):
        PolicyConfig(model_path="m", lr_schedule=Schedule.LINEAR)
