"""A policy with adapters: gradients, what engines get, checkpoints, and one rank against two of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from rljob_runtime.errors import CheckpointError, ModelError, OffloadError
from rljob_runtime.offload.states import StateKind
from rljob_runtime.training import model as model_module
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.optimizer import clip_gradients
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.rank_processes import (
    Arrays,
    fork_ranks,
    full_gradients,
    join,
    largest_difference,
    packed_weights,
    random_batch,
    read,
    run_script,
    shards,
    write,
)
from tests.support.rounding import LOGPROBS, assert_gradients_equal
from tests.support.trainers import StartPolicy, one_at_a_time, save_model

VOCAB = 62
LORA = LoraConfig(rank=3, alpha=6.0)  # an odd rank, so that shards of A are uneven
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS: dict[str, PretrainedConfig] = {
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "untied": Qwen3Config(**SMALL, tie_word_embeddings=False),
}
LAYOUTS = [(1, 1), (2, 1), (1, 2)]


def settings(folder: Path, **changes: object) -> PolicyConfig:
    config = PolicyConfig(model_path=str(folder), learning_rate=1e-2, eps=1e-3, token_budget=40, lora=LORA)
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def gradients(worker: PolicyWorker, part: slice = slice(None)) -> Arrays:
    """Whole gradients of one batch's loss; leaves the model as it was."""
    cpu = torch.device("cpu")
    (prepared,) = prepare_batches([random_batch(VOCAB, 3, part)], worker.config, cpu, worker.ready.costs)
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(cpu), fresh=True)
    clip_gradients(worker.model, None)
    arrays = full_gradients(worker)
    worker.model.zero_grad(set_to_none=True)
    return arrays


def full_weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in worker.model.named_parameters()}


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


@pytest.fixture(scope="module", params=list(MODELS))
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), MODELS[request.param], seed=5)


@pytest.fixture
def start(model_folder: Path) -> Iterator[StartPolicy]:
    """Starts workers, one at a time."""

    def adapted(folder: Path = model_folder, **changes: object) -> PolicyWorker:
        return PolicyWorker(settings(folder, **changes), rank=0, world_size=1)

    with one_at_a_time(adapted) as start:
        yield start


def test_only_adapters_have_gradients_and_they_equal_autograd_through_merged_weights(start: StartPolicy, model_folder: Path) -> None:
    worker = start()
    worker.train_step([random_batch(VOCAB)], step=0)  # B is no longer zero
    weights, got = full_weights(worker), gradients(worker)
    assert got.keys() == {name for name in weights if is_adapter(name)}
    assert len(got) == 2 * 2 * 7  # both adapters of seven layers in two blocks

    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    leaves = {name: tensor.requires_grad_() for name, tensor in weights.items() if is_adapter(name)}
    merged = dict(plain.named_parameters())
    for name in [name for name in leaves if name.endswith("lora_b")]:
        layer = name.removesuffix(".lora_b")
        merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + 2.0 * leaves[name] @ leaves[f"{layer}.lora_a"]
    batch, begin, loss = random_batch(VOCAB, 3), 0, torch.zeros(())
    for length in batch.lengths.tolist():
        part = slice(begin, begin + length)
        begin += length
        tokens = torch.from_numpy(batch.token_ids[part]).long()
        logits = functional_call(plain, merged, (tokens[None],), {"use_cache": False}).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        old, advantage, mask = (torch.from_numpy(a[part])[1:] for a in (batch.behavior_logprobs, batch.advantages, batch.response_mask))
        ratio = (logp - old).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        clipped = torch.where(advantage < 0, torch.maximum(clipped, 3.0 * advantage), clipped)  # the dual clip
        loss = loss - (clipped * mask).sum() / batch.global_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    assert max(np.abs(g).max() for g in got.values()) > 1e-3
    assert_gradients_equal(got, {name: leaf.grad for name, leaf in leaves.items()})


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "activation_checkpointing": True}])
def test_engines_get_the_weights_the_trainer_computes_with(start: StartPolicy, tmp_path: Path, changes: dict[str, object]) -> None:
    worker = start(**changes)
    names = [name for name, _, _ in worker.weight_specs()]
    base = packed_weights(worker)
    for step in range(2):
        worker.train_step([random_batch(VOCAB, step)], step)
    batch = random_batch(VOCAB, 7)
    trained = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    packed = packed_weights(worker)
    worker.export_hf(tmp_path / "export")
    dtype = getattr(torch, worker.config.dtype)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=dtype)
    assert names == [name for name, _ in exported.named_parameters()]  # an ordinary model
    for name, parameter in exported.named_parameters():
        assert np.array_equal(packed[name], parameter.detach().float().numpy()), name
        assert np.array_equal(packed[name], base[name]) is not name.endswith("_proj.weight")
    plain = start(folder=tmp_path / "export", lora=None, trainable=False, **{k: v for k, v in changes.items() if k == "dtype"})
    assert np.array_equal(plain.compute_logprobs(batch.token_ids, batch.lengths, 1.0), trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_answers_for_a_reference_of_its_own(start: StartPolicy, dtype: str) -> None:
    worker = start(dtype=dtype)
    for step in range(2):
        worker.train_step([random_batch(VOCAB, step)], step)
    batch = random_batch(VOCAB, 7)
    trained = worker.compute_logprobs(batch.token_ids, batch.lengths, 0.7)
    base = worker.compute_base_logprobs(batch.token_ids, batch.lengths, 0.7)
    again = worker.compute_logprobs(batch.token_ids, batch.lengths, 0.7)
    worker.offload({StateKind.PARAMS})
    with pytest.raises(OffloadError, match="compute_logprobs"):
        worker.compute_base_logprobs(batch.token_ids, batch.lengths, 0.7)
    worker.load({StateKind.PARAMS})
    assert np.array_equal(worker.compute_base_logprobs(batch.token_ids, batch.lengths, 0.7), base)
    assert np.array_equal(again, trained), "adapters count again afterwards"
    reference = start(dtype=dtype, lora=None, trainable=False)
    assert np.array_equal(reference.compute_logprobs(batch.token_ids, batch.lengths, 0.7), base)
    assert np.abs(trained - base).max() > 1e-2
    with pytest.raises(ModelError, match="which has no adapters"):
        reference.compute_base_logprobs(batch.token_ids, batch.lengths, 0.7)


def test_base_weights_never_change_and_the_optimizer_knows_only_adapters(start: StartPolicy) -> None:
    worker = start(weight_decay=0.1, dtype="bfloat16")
    before = full_weights(worker)
    worker.train_step([random_batch(VOCAB), random_batch(VOCAB, 1)], step=0)
    for name, tensor in full_weights(worker).items():
        assert torch.equal(tensor, before[name]) is not is_adapter(name), name
        assert tensor.dtype is (torch.float32 if is_adapter(name) else torch.bfloat16)
    optimizer = worker.ready.optimizer
    assert optimizer is not None
    assert len(optimizer.state) == sum(is_adapter(name) for name in before)


def test_checkpoint_holds_adapters_only_and_resumes_bit_equal(start: StartPolicy, tmp_path: Path) -> None:
    worker = start(weight_decay=0.1)
    worker.train_step([random_batch(VOCAB)], step=0)
    worker.save_checkpoint(tmp_path / "c")
    kept = [name for name in FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata if name.startswith("model.")]
    assert kept
    assert all(is_adapter(name) for name in kept)
    expected = [worker.train_step([random_batch(VOCAB, step)], step)["train/total_loss"] for step in (1, 2)]
    expected_weights = packed_weights(worker)
    resumed = start(weight_decay=0.1, seed=99)
    resumed.train_step([random_batch(VOCAB, 50)], step=0)
    assert resumed.load_checkpoint(tmp_path / "c") == 1
    assert [resumed.train_step([random_batch(VOCAB, step)], step)["train/total_loss"] for step in (1, 2)] == expected
    got = packed_weights(resumed)
    assert all(np.array_equal(value, got[name]) for name, value in expected_weights.items())


def test_checkpoints_with_and_without_adapters_do_not_mix(start: StartPolicy, tmp_path: Path) -> None:
    start().save_checkpoint(tmp_path / "adapters")
    whole = start(lora=None)
    with pytest.raises(CheckpointError, match="cannot be loaded into this model"):
        whole.load_checkpoint(tmp_path / "adapters")
    whole.save_checkpoint(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="cannot be loaded into this model"):
        start().load_checkpoint(tmp_path / "whole")


def test_unknown_target_modules_are_refused(start: StartPolicy) -> None:
    with pytest.raises(ModelError, match=r"names c_attn, but the linear layers of Qwen\dDecoderLayer are down_proj, gate_proj"):
        start(lora=LoraConfig(rank=2, alpha=2.0, target_modules=("c_attn",)))


def run_layout(rank: int, port: int, base: Path, name: str, dp: int, tp: int) -> None:
    """What one rank does in one layout; rank 0 leaves the results."""
    worker = PolicyWorker(settings(base / name / "model", tensor_parallel_size=tp), rank, dp * tp)
    join(worker, port)
    part = slice(None) if dp == 1 else (slice(0, 9), slice(9, 11))[rank // tp]
    metrics = worker.train_step([random_batch(VOCAB, 0, part)], step=0)
    arrays = {f"grad/{key}": value for key, value in gradients(worker, part).items()}
    scored = random_batch(VOCAB, 7)
    base_logprobs = worker.compute_base_logprobs(scored.token_ids, scored.lengths, 1.0)
    before = shards(worker)
    worker.offload(StateKind)
    worker.load(StateKind)
    assert all(torch.equal(a, b) for a, b in zip(before, shards(worker), strict=True))
    arrays |= {f"packed/{key}": value for key, value in packed_weights(worker, 20_000).items()}
    full = full_weights(worker)
    sent = packed_weights(worker, 2_000, adapters=True)
    for key, value in sent.items():
        layer, end = key.rsplit(".lora_", 1)
        whole = full[f"{layer}.lora_{end[0].lower()}"] * (1.0 if end[0] == "A" else LORA.alpha / LORA.rank)
        assert np.array_equal(value, whole.numpy()), key
    assert len(sent) == (2 * 2 * 7 if rank == 0 else 0)
    worker.export_hf(base / name / f"{dp}x{tp}" / "export")
    worker.save_checkpoint(base / name / f"{dp}x{tp}" / "checkpoint")
    if dp * tp == 2:  # the checkpoint of the layout before
        worker.load_checkpoint(base / name / ("1x1" if dp == 2 else "2x1") / "checkpoint")
        arrays |= {f"loaded/{key}": value for key, value in packed_weights(worker).items()}
    worker.shutdown()
    if rank == 0:
        write(base / name / f"{dp}x{tp}", "result", arrays | {"norm": np.array(metrics["train/grad_norm"]), "base": base_logprobs})


def run_low_precision(rank: int, port: int, base: Path, dp: int, tp: int) -> None:
    """bfloat16 weights and float32 adapters in one FSDP unit: one step, then scores and weights."""
    worker = PolicyWorker(settings(base / "tied" / "model", tensor_parallel_size=tp, dtype="bfloat16"), rank, dp * tp)
    join(worker, port)
    part = slice(None) if dp == 1 else (slice(0, 9), slice(9, 11))[rank // tp]
    worker.train_step([random_batch(VOCAB, 0, part)], step=0)
    batch = random_batch(VOCAB, 7)
    arrays = {"logprobs": worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)}
    arrays |= {f"packed/{key}": value for key, value in packed_weights(worker).items()}
    worker.shutdown()
    if rank == 0:
        write(base / "tied" / f"{dp}x{tp}", "bfloat16", arrays)


def run_divided(rank: int, port: int, base: Path) -> None:
    """Gradients after a step where two ranks share each sequence."""
    worker = PolicyWorker(settings(base / "untied" / "model", token_budget=20, context_parallel_size=2), rank, 2)
    join(worker, port)
    worker.train_step([random_batch(VOCAB)], step=0)
    arrays = gradients(worker)
    worker.shutdown()
    if rank == 0:
        write(base, "divided", arrays)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results: ``model/DPxTP/result.npz``."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, config in MODELS.items():
        save_model(folder / name / "model", config, seed=5)
        for dp, tp in LAYOUTS:
            (folder / name / f"{dp}x{tp}").mkdir()
    run_script(__file__, folder)
    return folder


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS[1:])
def test_two_ranks_equal_one(base: Path, name: str, dp: int, tp: int) -> None:
    one, two = base / name / "1x1", base / name / f"{dp}x{tp}"
    assert_gradients_equal(read(two, "result", "grad/"), read(one, "result", "grad/"))
    assert largest_difference(read(one, "result", "packed/"), read(two, "result", "packed/")) < 1e-6
    np.testing.assert_allclose(read(two, "result", "base")[""], read(one, "result", "base")[""], **LOGPROBS)
    assert read(two, "result", "norm")[""] == pytest.approx(read(one, "result", "norm")[""], rel=5e-6)


def test_ranks_that_share_sequences_equal_one(base: Path) -> None:
    assert_gradients_equal(read(base, "divided"), read(base / "untied" / "1x1", "result", "grad/"))


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS[1:])
def test_two_ranks_are_near_one_in_bfloat16(base: Path, dp: int, tp: int) -> None:
    one, two = base / "tied" / "1x1", base / "tied" / f"{dp}x{tp}"
    np.testing.assert_allclose(read(two, "bfloat16", "logprobs")[""], read(one, "bfloat16", "logprobs")[""], atol=0.1)
    expected, got = read(one, "bfloat16", "packed/"), read(two, "bfloat16", "packed/")
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=2**-7, atol=2e-3)  # a rounding, and a step along gradients of bfloat16


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("saved", "by"), [("1x1", "2x1"), ("2x1", "1x2")])
def test_a_checkpoint_loads_in_another_layout(base: Path, name: str, saved: str, by: str) -> None:
    expected, got = read(base / name / saved, "result", "packed/"), read(base / name / by, "result", "loaded/")
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, atol=1e-7, rtol=0)  # products of adapters may round otherwise by rows


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_exports_are_what_engines_get(base: Path, name: str, dp: int, tp: int) -> None:
    folder = base / name / f"{dp}x{tp}"
    packed = read(folder, "result", "packed/")
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    assert packed.keys() == {key for key, _ in exported.named_parameters()}
    for key, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), packed[key]), key


def main(rank: int, ports: list[int], base: Path) -> None:
    """All layouts in turn, as far as they need this rank."""
    model_module.ONE_UNIT_BYTES = 0
    for name in MODELS:
        for dp, tp in LAYOUTS:
            port = ports.pop()
            if rank < dp * tp:
                run_layout(rank, port, base, name, dp, tp)
    for dp, tp in LAYOUTS:
        port = ports.pop()
        if rank < dp * tp:
            run_low_precision(rank, port, base, dp, tp)
    run_divided(rank, ports.pop(), base)


if __name__ == "__main__":
    fork_ranks(2, (len(MODELS) + 1) * len(LAYOUTS) + 1, main)
