"""Layouts of data-, tensor- and context-parallel ranks against one rank: gradients, norms, weights, checkpoints, exports, offload.

Four processes go through all layouts in turn; those that a layout does not need wait for the next one that needs them.
The other classes of models that tensor parallelism divides are in test_tensor_parallel_classes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rljob_api.vocabulary import Aggregation, OptimizerStateDType
from rljob_runtime.errors import ModelError
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import TrainBatch
from rljob_runtime.training import model as model_module
from rljob_runtime.training.bfloat16_adamw import MOMENTS
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.context_parallel import part_of
from rljob_runtime.training.critic import CriticWorker
from rljob_runtime.training.critic_config import CriticConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.model import decoder_layers
from rljob_runtime.training.optimizer import clip_gradients
from rljob_runtime.training.packing import RowsPart, TreePart
from rljob_runtime.training.parallel import apply_tensor_parallel
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.value_step import ValueMeter, accumulate_value_gradients, prepare_values
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.checkpoint_names import checkpoint_parts
from tests.integration.rank_processes import (
    check_deadlines,
    fork_ranks,
    full_gradients,
    join,
    largest_difference,
    masked,
    packed_weights,
    random_batch,
    read,
    run_script,
    shards,
    write,
)
from tests.integration.test_critic import set_head
from tests.integration.test_mixture_ranks import deepseek
from tests.support.pace import HANG_S
from tests.support.ports import free_port
from tests.support.rounding import LOGPROBS, assert_gradients_equal

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}

MODELS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SMALL, vocab_size=62, tie_word_embeddings=True),  # biases; a vocabulary that tp divides, unevenly over dp
    "qwen3": Qwen3Config(**SMALL, vocab_size=62, head_dim=32, tie_word_embeddings=False),  # norms within heads
    "llama": LlamaConfig(**SMALL, vocab_size=61, attention_bias=True, mlp_bias=True, pad_token_id=7),  # biases after the sum
}

LAYOUTS: dict[str, list[tuple[int, int, int]]] = {
    "qwen2": [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2)],
    "qwen3": [(1, 1, 1), (2, 2, 1), (1, 2, 2)],
    "llama": [(1, 1, 1), (1, 2, 1), (1, 1, 4)],  # more context-parallel ranks than key-value heads
}
"""Of each model dp, tp, cp; the first is what the others have to equal."""

PARTS = {1: [slice(0, 11)], 2: [slice(0, 9), slice(9, 11)], 4: [slice(0, 5), slice(5, 8), slice(8, 10), slice(10, 11)]}
"""Sequences of each data-parallel rank; uneven, so that some have more micro-batches."""

UNEVEN = [("qwen2", "1x1"), ("qwen2", "1x1x2"), ("qwen3", "1x1"), ("qwen3", "1x2x2")]
"""Which also compute :func:`uneven_batch`: pairs of one rank and several."""

RESUMED = [("2x1", 1, 2), ("2x2", 2, 1), ("1x2", 1, 1), ("2x1x2", 1, 2)]
"""Whose checkpoint is loaded, and at which dp and tp."""


SEQUENCE = " sequence"
"""What folders of results are called after where tensor-parallel ranks divide tokens too."""

DIVIDED_TOKENS = [("qwen2", 2, 2, 1), ("qwen3", 1, 2, 2), ("llama", 1, 2, 1)]
"""Models and layouts that are computed in this way as well."""

NUM_PORTS = 60
CLIP = 0.05


def label(dp: int, tp: int, cp: int = 1) -> str:
    """How folders and cases call a layout."""
    return f"{dp}x{tp}" if cp == 1 else f"{dp}x{tp}x{cp}"


def make_model(folder: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # otherwise all zeros or ones
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


def settings(folder: Path, tp: int, **changes: object) -> PolicyConfig:
    """A large eps keeps Adam from amplifying the rounding of gradients near 0, and makes it see their scale, that is clipping."""
    config = PolicyConfig(
        model_path=str(folder),
        learning_rate=1e-3,
        eps=1e-3,
        weight_decay=0.1,
        token_budget=40,
        max_grad_norm=CLIP,
        logprob_chunk_tokens=9,
        loss=LossConfig(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN, entropy_coefficient=0.1),
        tensor_parallel_size=tp,
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def gradients_and_norms(worker: PolicyWorker, dp: int, dp_rank: int, vocab: int) -> dict[str, np.ndarray]:
    """Gradients of the first batch and their norm; leaves the model as it was."""
    cpu = torch.device("cpu")
    batch = masked(random_batch(vocab, part=PARTS[dp][dp_rank]), vocab)
    (prepared,) = prepare_batches([batch], worker.config, cpu, worker.ready.costs)
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(cpu), fresh=True)
    norm = clip_gradients(worker.model, None)
    arrays = {f"grad/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.model.zero_grad(set_to_none=True)
    each = dataclasses.replace(worker.config, reduces_each_micro_batch=True)
    accumulate_gradients(worker.model, prepared, each, StepMeter(cpu), fresh=True)
    clip_gradients(worker.model, None)
    arrays |= {f"each/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.model.zero_grad(set_to_none=True)
    return arrays | {"norm": norm.numpy()}


def uneven_batch(vocab: int) -> TrainBatch:
    """Three responses to one long prompt, which is more than half of the row, and a sequence that shares nothing."""
    rng, prompts, responses = np.random.default_rng(4), (20, 20, 20, 5), (3, 4, 2, 6)
    lengths = np.add(prompts, responses).astype(np.int32)
    mask = np.concatenate([np.arange(n) >= prompt for prompt, n in zip(prompts, lengths, strict=True)]).astype(np.float32)
    shared, tokens = rng.integers(0, vocab, 20), rng.integers(0, vocab, mask.size)
    for begin in (np.cumsum(lengths) - lengths)[:3]:
        tokens[begin : begin + 20] = shared
    return TrainBatch(
        token_ids=tokens.astype(np.int32),
        lengths=lengths,
        response_mask=mask,
        behavior_logprobs=rng.normal(-np.log(vocab), 0.2, mask.size).astype(np.float32) * mask,
        advantages=rng.normal(0, 1, mask.size).astype(np.float32) * mask,
        global_tokens=int(mask.sum()),
        global_sequences=4,
        version=0,
    )


def uneven_gradients(worker: PolicyWorker, vocab: int) -> dict[str, np.ndarray]:
    """Of a row with a tree in branches and a plain sequence, of which the first of two context-parallel ranks predicts nothing."""
    cpu, config = torch.device("cpu"), dataclasses.replace(worker.config, token_budget=64)
    costs = dataclasses.replace(worker.ready.costs, call_flops=0.0)  # else the kernel is not called for a few tokens
    (prepared,) = prepare_batches([uneven_batch(vocab)], config, cpu, costs)
    (micro,) = prepared.micro_batches
    assert micro.packed is not None
    assert [type(part) for part in micro.packed.parts] == [TreePart, RowsPart]
    assert min(part_of(micro, rank, 2).own.size for rank in range(2)) == 0
    accumulate_gradients(worker.model, prepared, config, StepMeter(cpu), fresh=True)
    clip_gradients(worker.model, None)
    arrays = {f"uneven/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.model.zero_grad(set_to_none=True)
    return arrays


def run_layout(rank: int, port: int, base: Path, name: str, vocab: int, dp: int, tp: int, cp: int, **changes: object) -> None:
    """What one rank does in one layout; rank 0 leaves the results."""
    out = base / name / (label(dp, tp, cp) + (SEQUENCE if changes.get("sequence_parallel") else ""))
    worker = PolicyWorker(settings(base / name / "model", tp, context_parallel_size=cp, **changes), rank, dp * tp * cp)
    join(worker, port)
    check_deadlines(worker)
    dp_rank = rank // (tp * cp)
    everything = random_batch(vocab)
    arrays = {"logprobs": worker.compute_logprobs(everything.token_ids, everything.lengths, 0.9)}
    arrays |= gradients_and_norms(worker, dp, dp_rank, vocab)
    if (name, label(dp, tp, cp)) in UNEVEN:
        arrays |= uneven_gradients(worker, vocab)
    metrics = worker.train_step([masked(random_batch(vocab, part=PARTS[dp][dp_rank]), vocab)], step=0)
    arrays |= {f"metric/{key}": np.array(value) for key, value in metrics.items() if not key.startswith("time/")}

    before = shards(worker)
    worker.offload(StateKind)
    assert all(getattr(p, "_local_tensor", p).untyped_storage().size() == 0 for p in worker.model.parameters())
    worker.load(StateKind)
    after = shards(worker)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    arrays |= {f"packed/{key}": value for key, value in packed_weights(worker).items()}
    arrays |= {f"weight/{n}": p.full_tensor().detach().numpy().copy() for n, p in worker.model.named_parameters()}
    worker.export_hf(out / "export")
    if name == "qwen2":
        worker.save_checkpoint(out / "checkpoint")
        metrics = worker.train_step([random_batch(vocab, 1, PARTS[dp][dp_rank])], step=1)
        arrays["second_loss"] = np.array(metrics["train/total_loss"])
    worker.shutdown()
    if rank == 0:
        write(out, "result", arrays)


def run_divided_tokens(rank: int, ports: list[int], base: Path) -> None:
    """Layouts of sequence parallelism, one of them with recomputed layers; and bfloat16, with it and without."""
    for name, dp, tp, cp in DIVIDED_TOKENS:
        model_module.ONE_UNIT_BYTES = 0 if name == "qwen3" else 32 * 2**20
        port = ports.pop()
        if rank < dp * tp * cp:
            recomputed = {"activation_checkpointing": name == "qwen3"}
            run_layout(rank, port, base, name, MODELS[name].vocab_size, dp, tp, cp, sequence_parallel=True, **recomputed)
    for divided in (False, True):
        port = ports.pop()
        if rank < 2:
            run_divided_bfloat16(rank, port, base, divided=divided)


def run_resumed(rank: int, port: int, base: Path, saved: str, dp: int, tp: int) -> None:
    """Load another layout's checkpoint, pack, and make the next step."""
    vocab = MODELS["qwen2"].vocab_size
    worker = PolicyWorker(settings(base / "qwen2" / "model", tp, seed=9), rank, dp * tp)
    join(worker, port)
    assert worker.load_checkpoint(base / "qwen2" / saved / "checkpoint") == 1
    arrays = {f"packed/{key}": value for key, value in packed_weights(worker).items()}
    metrics = worker.train_step([random_batch(vocab, 1, PARTS[dp][rank // tp])], step=1)
    worker.shutdown()
    if rank == 0:
        write(base, f"resumed {saved} {dp}x{tp}", arrays | {"second_loss": np.array(metrics["train/total_loss"])})


def run_low_precision(rank: int, port: int, base: Path, dp: int, tp: int, cp: int) -> None:
    """bfloat16 with recomputed layers, and of moments: log-probs, one step, its moments, and those in the other one's checkpoint."""
    vocab = MODELS["qwen2"].vocab_size
    low = {"dtype": "bfloat16", "optimizer_state_dtype": OptimizerStateDType.BFLOAT16}
    config = settings(base / "qwen2" / "model", tp, activation_checkpointing=True, context_parallel_size=cp, **low)
    worker = PolicyWorker(config, rank, dp * tp * cp)
    join(worker, port)
    everything, batch = random_batch(vocab), random_batch(vocab, part=PARTS[dp][rank // (tp * cp)])
    arrays = {"logprobs": worker.compute_logprobs(everything.token_ids, everything.lengths, 1.0)}
    metrics = worker.train_step([batch], step=0)
    arrays |= {f"own/{name}": moment for name, moment in whole_moments(worker).items()}
    worker.save_checkpoint(base / f"bfloat16 checkpoint {label(dp, tp, cp)}")
    worker.load_checkpoint(base / "bfloat16 checkpoint 1x1")
    arrays |= {f"loaded/{name}": moment for name, moment in whole_moments(worker).items()}
    worker.train_step([batch], step=1)
    worker.shutdown()
    write(base, f"bfloat16 {label(dp, tp, cp)} {rank}", arrays | {"norm": np.array(metrics["train/grad_norm"])})


def run_divided_bfloat16(rank: int, port: int, base: Path, *, divided: bool) -> None:
    """Log-probs and gradients of two tensor-parallel ranks in bfloat16, which divide tokens too if ``divided``."""
    vocab, cpu = MODELS["qwen2"].vocab_size, torch.device("cpu")
    config = settings(base / "qwen2" / "model", 2, dtype="bfloat16", sequence_parallel=divided)
    worker = PolicyWorker(config, rank, 2)
    join(worker, port)
    everything = random_batch(vocab)
    arrays = {"logprobs": worker.compute_logprobs(everything.token_ids, everything.lengths, 1.0)}
    (prepared,) = prepare_batches([masked(everything, vocab)], worker.config, cpu, worker.ready.costs)
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(cpu), fresh=True)
    clip_gradients(worker.model, None)
    arrays |= {f"grad/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.shutdown()
    if rank == 0:
        write(base, f"bfloat16 1x2{SEQUENCE if divided else ''}", arrays)


def whole_moments(worker: PolicyWorker) -> dict[str, np.ndarray]:
    """AdamW's moments by name; of a parameter that this rank holds as a whole, its own."""
    optimizer = worker.ready.optimizer
    assert optimizer is not None
    states = {f"{n}/{kind}": optimizer.state[p][kind] for n, p in worker.model.named_parameters() for kind in MOMENTS}
    assert {state.dtype for state in states.values()} == {torch.bfloat16}
    return {name: state.full_tensor().float().numpy().copy() for name, state in states.items()}


def valued(batch: TrainBatch) -> TrainBatch:
    """The batch with old values and returns, the same for a token in whatever part it is."""
    values, returns = np.sin(batch.token_ids), 1 + np.cos(3.0 * batch.token_ids)
    mask = batch.response_mask
    return dataclasses.replace(batch, values=values.astype(np.float32) * mask, returns=returns.astype(np.float32) * mask)


def run_critic(rank: int, port: int, base: Path, dp: int, tp: int, cp: int) -> None:
    """Gradients, values, and losses of a critic: of two steps, and of the second again from the checkpoint that one rank made before it."""
    vocab = MODELS["qwen3"].vocab_size
    policy = settings(base / "qwen3" / "model", tp, context_parallel_size=cp)
    shared = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name != "loss"}
    worker = CriticWorker(CriticConfig(**shared), rank, dp * tp * cp)
    join(worker, port)
    set_head(worker)
    first, second = (valued(random_batch(vocab, seed, PARTS[dp][rank // (tp * cp)])) for seed in (0, 1))
    (prepared,) = prepare_values([first], worker.config, torch.device("cpu"), worker.ready.costs)
    accumulate_value_gradients(worker.model, prepared, worker.config, ValueMeter(torch.device("cpu")))
    clip_gradients(worker.model, None)
    arrays = {f"grad/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.model.zero_grad(set_to_none=True)
    everything = random_batch(vocab)
    arrays["values"] = worker.compute_values(everything.token_ids, everything.lengths, everything.response_mask)
    losses = [worker.train_step([first], 0)["critic/loss"]]
    checkpoint = base / "critic checkpoint"
    if dp * tp * cp == 1:
        worker.save_checkpoint(checkpoint)
    losses.append(worker.train_step([second], 1)["critic/loss"])
    assert worker.load_checkpoint(checkpoint) == 1
    kept = shards(worker)
    worker.offload(StateKind)
    worker.load(StateKind)
    assert all(torch.equal(a, b) for a, b in zip(kept, shards(worker), strict=True))
    losses.append(worker.train_step([second], 1)["critic/loss"])
    worker.shutdown()
    if rank == 0:
        write(base, f"critic {label(dp, tp, cp)}", arrays | {"losses": np.array(losses)})


def run_frozen(rank: int, port: int, base: Path, dp: int, tp: int, cp: int) -> None:
    """Log-probs of a reference or teacher, before and after its weights were away; data-parallel ranks score a part each."""
    vocab = MODELS["qwen2"].vocab_size
    config = settings(base / "qwen2" / "model", tp, trainable=False, context_parallel_size=cp)
    worker = PolicyWorker(config, rank, dp * tp * cp)
    join(worker, port)
    batch = random_batch(vocab, part=PARTS[dp][rank // (tp * cp)])
    before = worker.compute_logprobs(batch.token_ids, batch.lengths, 0.9)
    worker.offload(StateKind)
    worker.load(StateKind)
    assert np.array_equal(worker.compute_logprobs(batch.token_ids, batch.lengths, 0.9), before)
    worker.shutdown()
    if rank % (tp * cp) == 0:
        write(base, f"frozen {label(dp, tp, cp)} {rank // (tp * cp)}", {"logprobs": before})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results: ``model/DPxTP/result.npz`` and others."""
    folder = make_folders(tmp_path_factory.mktemp("layouts"), MODELS, LAYOUTS)
    run_script(__file__, folder)
    return folder


def make_folders(folder: Path, models: Mapping[str, PretrainedConfig], layouts: Mapping[str, list[tuple[int, int, int]]]) -> Path:
    """Models, and empty folders for the results of their layouts."""
    for name, config in models.items():
        make_model(folder / name / "model", config)
        for layout in layouts[name]:
            for ending in ("", SEQUENCE):
                (folder / name / (label(*layout) + ending)).mkdir()
    return folder


OTHERS = [(name, label(*layout)) for name, layouts in LAYOUTS.items() for layout in layouts[1:]]
OTHERS += [(name, label(dp, tp, cp) + SEQUENCE) for name, dp, tp, cp in DIVIDED_TOKENS]
IDS = [f"{name} {layout}" for name, layout in OTHERS]


@pytest.mark.parametrize(("name", "layout"), OTHERS, ids=IDS)
def test_gradients_and_norms_equal_those_of_one_rank(base: Path, name: str, layout: str) -> None:
    check_gradients(base, name, layout)


def check_gradients(base: Path, name: str, layout: str) -> None:
    """Gradients and their norm are those of one rank."""
    one, other = base / name / "1x1", base / name / layout
    gradients, norm = read(one, "result", "grad/"), read(one, "result", "norm")[""]
    assert min(float(np.abs(g).max()) for key, g in gradients.items() if "k_proj.bias" not in key) > 1e-3  # softmax ignores key biases
    for way in ("grad/", "each/"):  # reduced with the last micro-batch, and with each
        assert_gradients_equal(read(other, "result", way), gradients)
    assert norm == pytest.approx(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values())), rel=1e-6)
    assert norm > 2 * CLIP  # so that weights after a step show whether clipping is right too
    assert read(other, "result", "norm")[""] == pytest.approx(norm, rel=5e-6)


@pytest.mark.parametrize(("name", "layout"), UNEVEN[1::2])
def test_a_rank_that_predicts_nothing_of_a_row_has_its_part_in_the_gradients(base: Path, name: str, layout: str) -> None:
    assert_gradients_equal(*(read(base / name / one, "result", "uneven/") for one in (layout, "1x1")))


@pytest.mark.parametrize(("name", "layout"), OTHERS, ids=IDS)
def test_logprobs_metrics_and_weights_after_a_step_equal_those_of_one_rank(base: Path, name: str, layout: str) -> None:
    check_step(base, name, layout)


def check_step(base: Path, name: str, layout: str) -> None:
    """Log-probs, metrics, and weights after a step are those of one rank."""
    one, other = base / name / "1x1", base / name / layout
    np.testing.assert_allclose(read(other, "result", "logprobs")[""], read(one, "result", "logprobs")[""], **LOGPROBS)
    expected, got = read(one, "result", "metric/"), read(other, "result", "metric/")
    for key in expected.keys() - {"train/micro_batches"}:
        assert got[key] == pytest.approx(expected[key], rel=1e-5, abs=2e-6), key
    assert largest_difference(read(one, "result", "packed/"), read(other, "result", "packed/")) < 1e-6


def test_one_rank_equals_transformers(base: Path) -> None:
    check_one_rank(base, MODELS)


def check_one_rank(base: Path, models: Mapping[str, PretrainedConfig], attention: Mapping[str, str] | None = None) -> None:
    """Its log-probs are those of transformers, with ``attention`` of each model where that is not ``sdpa``."""
    for name, config in models.items():
        computed_by = (attention or {}).get(name, "sdpa")
        plain = AutoModelForCausalLM.from_pretrained(base / name / "model", dtype=torch.float32, attn_implementation=computed_by)
        batch, got, begin = random_batch(config.vocab_size), read(base / name / "1x1", "result", "logprobs")[""], 0
        for length in batch.lengths.tolist():
            tokens = torch.from_numpy(batch.token_ids[begin : begin + length]).long()
            with torch.no_grad():
                full = (plain(tokens[None], use_cache=False).logits[0] / 0.9).log_softmax(-1)
            expected = full[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()
            np.testing.assert_allclose(got[begin + 1 : begin + length], expected, **LOGPROBS)
            begin += length


@pytest.mark.parametrize(("name", "layout"), [("qwen2", "1x1"), *OTHERS], ids=["qwen2 1x1", *IDS])
def test_packed_bytes_and_exports_are_the_full_weights(base: Path, name: str, layout: str) -> None:
    check_weights(base, name, layout)


def check_weights(base: Path, name: str, layout: str) -> None:
    """What engines get, and exports, are the full weights."""
    folder = base / name / layout
    weights, packed = read(folder, "result", "weight/"), read(folder, "result", "packed/")
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    parts, parameters = checkpoint_parts(exported), dict(exported.named_parameters())
    assert packed.keys() == parts.keys()
    assert weights.keys() == parameters.keys()
    for name_of_file, part in parts.items():
        assert np.array_equal(packed[name_of_file], weights[part.parameter]), name_of_file
        assert np.array_equal(parameters[part.parameter].detach().numpy(), weights[part.parameter]), name_of_file


@pytest.mark.parametrize(("saved", "dp", "tp"), RESUMED)
def test_a_checkpoint_loads_in_another_layout(base: Path, saved: str, dp: int, tp: int) -> None:
    name, folder = f"resumed {saved} {dp}x{tp}", base / "qwen2" / saved
    assert largest_difference(read(base, name, "packed/"), read(folder, "result", "packed/")) == 0.0
    assert read(base, name, "second_loss")[""] == pytest.approx(read(folder, "result", "second_loss")[""], abs=2e-6)


@pytest.mark.parametrize("layout", ["2x2", "1x1x2"])
def test_bfloat16_with_recomputed_layers(base: Path, layout: str) -> None:
    one, two = read(base, "bfloat16 1x1 0"), read(base, f"bfloat16 {layout} 0")
    difference = np.abs(one["logprobs"] - two["logprobs"]).max()
    assert difference < 0.1
    assert difference > 0.0 or layout == "1x1x2", "sums over tensor-parallel ranks round otherwise"
    assert two["norm"] == pytest.approx(one["norm"], rel=0.05)


def test_sequence_parallelism_in_bfloat16_rounds_as_tensor_parallelism_does(base: Path) -> None:
    """Both ranks' halves of a sum are added and rounded once, whether every rank does so for all tokens or for its own.

    So log-probs differ by less than one rounding, where those of one rank differ by several. Gradients of norms are sums over the tokens of
    each rank, rounded (half an epsilon each) before and after they are added: less than one epsilon of a parameter's gradient.
    """
    whole, divided = read(base, "bfloat16 1x2"), read(base, f"bfloat16 1x2{SEQUENCE}")
    epsilon = torch.finfo(torch.bfloat16).eps
    assert np.abs(whole.pop("logprobs") - divided.pop("logprobs")).max() < epsilon
    assert whole.keys() == divided.keys()
    apart = {name: float(np.linalg.norm(divided[name] - gradient) / np.linalg.norm(gradient)) for name, gradient in whole.items()}
    assert max(apart.values()) < epsilon, apart
    assert max(apart.values()) > 0.0, "tokens were not divided: norms are summed otherwise"


def test_moments_in_bfloat16_are_the_same_on_all_ranks_and_in_another_layouts_checkpoint(base: Path) -> None:
    """What is rounded where, each tensor-parallel rank that holds a parameter as a whole rounds alike."""
    one, ranks = read(base, "bfloat16 1x1 0"), [read(base, f"bfloat16 2x2 {rank}") for rank in range(4)]
    for prefix in ("own/", "loaded/"):
        expected = {name: moment for name, moment in (one if prefix == "loaded/" else ranks[0]).items() if name.startswith(prefix)}
        assert len(expected) > 20
        assert all(np.array_equal(rank[name], moment) for rank in ranks for name, moment in expected.items())
    assert any(not np.array_equal(one[name], ranks[0][name]) for name in one if name.startswith("own/"))


@pytest.mark.parametrize("layout", ["2x2", "1x2x2"])
def test_a_critic_of_any_layout_learns_what_one_rank_learns(base: Path, layout: str) -> None:
    one, other = read(base, "critic 1x1"), read(base, f"critic {layout}")
    assert {"grad/value_head.weight", "grad/value_head.bias", "grad/model.layers.0.self_attn.q_norm.weight"} <= one.keys() == other.keys()
    gradients = {name: array for name, array in one.items() if name.startswith("grad/")}
    assert min(float(np.abs(array).max()) for array in gradients.values()) > 1e-4
    whole, same = (np.concatenate([arrays[name].ravel() for name in gradients]) for arrays in (one, other))
    assert np.linalg.norm(whole - same) < 1e-6 * np.linalg.norm(whole)
    for name, array in gradients.items():  # those of a few small numbers are less exact
        assert np.linalg.norm(other[name] - array) < 3e-6 * np.linalg.norm(array), name
    np.testing.assert_allclose(other["values"], one["values"], atol=2e-6, rtol=2e-6)
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["losses"][1] == one["losses"][2]


@pytest.mark.parametrize(("layout", "dp"), [("2x2", 2), ("1x2x2", 1)])
def test_a_frozen_policy_of_any_layout_scores_as_one_rank_does(base: Path, layout: str, dp: int) -> None:
    one = read(base, "frozen 1x1 0")["logprobs"]
    parts = [read(base, f"frozen {layout} {rank}")["logprobs"] for rank in range(dp)]
    np.testing.assert_allclose(np.concatenate(parts), one, **LOGPROBS)
    np.testing.assert_allclose(one, read(base / "qwen2" / "1x1", "result", "logprobs")[""], **LOGPROBS)


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (Qwen2Config(**SMALL, vocab_size=61), 4, "num_key_value_heads 2; choose a divisor"),
        (Qwen2Config(**SMALL | {"num_attention_heads": 6, "num_key_value_heads": 6}, vocab_size=61), 4, "num_attention_heads 6"),
        (MistralConfig(**SMALL | {"num_key_value_heads": 4, "intermediate_size": 70}, vocab_size=61), 4, "intermediate_size 70"),
        (GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=61), 2, "model type gpt2 has no tensor-parallel plan"),
        (deepseek(6), 3, "num_attention_heads 4; choose a divisor"),
    ],
    ids=["kv heads", "heads", "channels", "unknown model", "latent heads"],
)
def test_a_layout_that_does_not_fit_is_refused(config: PretrainedConfig, tp: int, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout = SimpleNamespace(tp_size=tp)
    with pytest.raises(ModelError, match=message):
        apply_tensor_parallel(model, decoder_layers(model), layout)  # type: ignore[arg-type]


def test_a_layer_with_something_unknown_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL, vocab_size=61))
        model.model.layers[1].self_attn.gate = torch.nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"Qwen2DecoderLayer has self_attn\.gate, which the tensor-parallel plan of qwen2 does not divide"):
        apply_tensor_parallel(model, decoder_layers(model), SimpleNamespace(tp_size=2))  # type: ignore[arg-type]


def test_ranks_that_tensor_parallelism_does_not_divide_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", MODELS["qwen2"])
    worker = PolicyWorker(settings(tmp_path / "model", 2), 0, 1)
    with pytest.raises(ModelError, match="tensor_parallel_size is 2 but there are 1 ranks"):
        worker.setup("127.0.0.1", free_port(), timeout_s=HANG_S)


def main(rank: int, ports: list[int], base: Path) -> None:
    """All layouts in turn, as far as they need this rank."""
    for name, layouts in LAYOUTS.items():
        model_module.ONE_UNIT_BYTES = 0 if name == "qwen3" else 32 * 2**20
        for dp, tp, cp in layouts:
            port = ports.pop()
            if rank < dp * tp * cp:
                run_layout(rank, port, base, name, MODELS[name].vocab_size, dp, tp, cp)
    run_divided_tokens(rank, ports, base)
    for saved, dp, tp in RESUMED:
        port = ports.pop()
        if rank < dp * tp:
            run_resumed(rank, port, base, saved, dp, tp)
    for dp, tp, cp in ((1, 1, 1), (2, 2, 1), (1, 1, 2)):
        port = ports.pop()
        if rank < dp * tp * cp:
            run_low_precision(rank, port, base, dp, tp, cp)
    for run in (run_critic, run_frozen):
        for dp, tp, cp in ((1, 1, 1), (2, 2, 1), (1, 2, 2)):
            port = ports.pop()
            if rank < dp * tp * cp:
                run(rank, port, base, dp, tp, cp)


if __name__ == "__main__":
    fork_ranks(4, NUM_PORTS, main)
