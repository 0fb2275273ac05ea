"""Layouts of expert-parallel ranks, tensor-parallel ones among them, against one: gradients, norms, routes, weights, checkpoints, offload.

Four processes go through all layouts in turn; those that a layout does not need wait for the next one that needs them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from rljob_runtime.errors import ModelError
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import TrainBatch
from rljob_runtime.training import model as model_module
from rljob_runtime.training.config import LoadBalancingConfig, LoraConfig, PolicyConfig
from rljob_runtime.training.critic import CriticWorker
from rljob_runtime.training.critic_config import CriticConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.optimizer import clip_gradients
from rljob_runtime.training.replay import replay_of
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.value_step import ValueMeter, accumulate_value_gradients, prepare_values
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.rank_processes import (
    check_deadlines,
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
from tests.integration.test_critic import set_head
from tests.integration.test_mixture_ranks import BIAS_STD, SMALL, VOCAB, bias_rate, biased, deepseek, plain_gradients
from tests.integration.test_tensor_parallel import valued
from tests.support.rounding import LOGPROBS, assert_gradients_equal
from tests.support.trainers import save_model

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GLM: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, mlp_only_layers=[1], tie_word_embeddings=True, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**SMALL | {"num_hidden_layers": 2}, **EXPERTS, shared_expert_intermediate_size=10),
    "mixtral": MixtralConfig(**SMALL | {"num_key_value_heads": 4, "num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": deepseek(6),
    "glm4_moe": Glm4MoeConfig(**biased(6) | GLM, head_dim=8, use_qk_norm=True),
}
"""Of six experts each of two ranks has three, which two groups of ranks share unevenly."""


class Sizes(NamedTuple):
    """A layout of ranks."""

    dp: int
    cp: int = 1
    ep: int = 1
    tp: int = 1
    sequence: bool = False
    """Whether tensor-parallel ranks divide tokens outside of experts too."""

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def label(self) -> str:
        """How folders and cases call it."""
        return f"{self.dp}x{self.cp}x{self.ep}" + (f" tp{self.tp}" if self.tp > 1 else "") + (" sequence" if self.sequence else "")

    def part(self, rank: int) -> slice:
        """Sequences of a rank."""
        return PARTS[self.dp][rank // (self.cp * self.tp)]


ONE = Sizes(1)
WITHIN, ACROSS = Sizes(2, 1, 2, tp=2), Sizes(1, 2, 4, tp=2, sequence=True)
LAYOUTS: dict[str, list[Sizes]] = {
    "qwen3_moe": [ONE, Sizes(4, 1, 2), Sizes(2, 2, 2), WITHIN],
    "qwen2_moe": [ONE, Sizes(1, 1, 1, tp=2), Sizes(2, 1, 2, tp=2, sequence=True)],
    "mixtral": [ONE, Sizes(4, 1, 4), Sizes(1, 1, 2, tp=4), ACROSS],
    "deepseek_v3": [ONE, Sizes(2, 2, 2), Sizes(1, 1, 1, tp=2), Sizes(2, 1, 2, tp=2, sequence=True)],
    "glm4_moe": [ONE, WITHIN],
}
"""Of each model; the first is what the others have to equal."""
PARTS = {
    1: [slice(0, 11)],
    2: [slice(0, 9), slice(9, 11)],
    3: [slice(0, 6), slice(6, 9), slice(9, 11)],
    4: [slice(0, 5), slice(5, 8), slice(8, 10), slice(10, 11)],
}
"""Sequences of each data-parallel rank; uneven, so that some have more micro-batches."""
ROLE_LAYOUTS = [Sizes(2, 2, 2), WITHIN]
"""Of a critic and of a frozen policy."""
RESUMED = [
    ("qwen3_moe", Sizes(4, 1, 2), Sizes(2, 1, 1)),
    ("qwen3_moe", ONE, Sizes(2, 1, 2)),
    ("qwen3_moe", WITHIN, Sizes(3, 1, 3)),
    ("qwen3_moe", Sizes(4, 1, 2), Sizes(1, 1, 1, tp=2, sequence=True)),
    ("deepseek_v3", Sizes(2, 1, 2, tp=2, sequence=True), ONE),
]
"""Of which model whose checkpoint is loaded, and in which layout."""
RECOMPUTED = [ONE, WITHIN]
CLIP = 0.05
BUCKET_BYTES = 15_000
"""Several buckets, in which experts stand with other weights."""
NUM_PORTS = 35


def settings(folder: Path, sizes: Sizes, **changes: object) -> PolicyConfig:
    """Small micro-batches, the same for all layouts; a large eps makes Adam see the scale of gradients, that is clipping."""
    config = PolicyConfig(
        model_path=str(folder),
        learning_rate=1e-3,
        eps=1e-3,
        token_budget=30 // sizes.cp,
        max_grad_norm=CLIP,
        load_balancing=LoadBalancingConfig(),
        replays_routes=True,
        context_parallel_size=sizes.cp,
        expert_parallel_size=sizes.ep,
        tensor_parallel_size=sizes.tp,
        sequence_parallel=sizes.sequence,
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def started(config: PolicyConfig, rank: int, port: int, world_size: int) -> PolicyWorker:
    worker = PolicyWorker(config, rank, world_size)
    join(worker, port)
    check_deadlines(worker)
    return worker


def gradients(worker: PolicyWorker, batch: TrainBatch, **changes: object) -> dict[str, np.ndarray]:
    """Whole gradients by name, with their norm; leaves the model as it was."""
    cpu, config = torch.device("cpu"), dataclasses.replace(worker.config, **changes)  # type: ignore[arg-type]
    (prepared,) = prepare_batches([batch], config, cpu, worker.ready.costs)
    assert len(prepared.micro_batches) > 1
    accumulate_gradients(worker.model, prepared, config, StepMeter(cpu), fresh=True)
    norm = clip_gradients(worker.model, None)
    found = full_gradients(worker)
    worker.model.zero_grad(set_to_none=True)
    return found | {"norm": norm.numpy()}


def routed_to_the_first(batch: TrainBatch, worker: PolicyWorker) -> TrainBatch:
    """Tokens go to two of the first three experts of every layer, by their ids, so that some ranks get none."""
    replay = replay_of(worker.model)
    assert replay is not None
    pairs = np.array([[0, 1], [1, 2], [2, 0]], dtype=np.int8)
    routes = np.repeat(pairs[batch.token_ids % 3][:, None], replay.num_layers, axis=1)
    return dataclasses.replace(batch, routes=routes)


def run_layout(rank: int, port: int, base: Path, name: str, sizes: Sizes) -> None:
    """What one rank does in one layout; rank 0 leaves the results."""
    out, part = base / name / sizes.label, sizes.part(rank)
    worker = started(settings(base / name / "model", sizes, router_bias_update_rate=bias_rate(name)), rank, port, sizes.ranks)
    everything, batch = random_batch(VOCAB, 2), random_batch(VOCAB, 0, part)
    arrays = {"logprobs": worker.compute_logprobs(everything.token_ids, everything.lengths, 1.0)}
    arrays |= {f"grad/{n}": g for n, g in gradients(worker, batch).items()}
    arrays |= {f"each/{n}": g for n, g in gradients(worker, batch, reduces_each_micro_batch=True).items()}
    arrays |= {f"first/{n}": g for n, g in gradients(worker, routed_to_the_first(batch, worker)).items()}
    metrics = worker.train_step([random_batch(VOCAB, 1, part)], step=0)
    arrays |= {f"metric/{n}": np.array(v) for n, v in metrics.items() if not n.startswith("time/")}
    before = shards(worker)
    worker.offload(StateKind)
    worker.load(StateKind)
    assert all(torch.equal(a, b) for a, b in zip(before, shards(worker), strict=True))
    arrays |= {f"packed/{n}": w for n, w in packed_weights(worker, BUCKET_BYTES).items()}
    arrays |= {f"weight/{n}": p.full_tensor().detach().numpy().copy() for n, p in worker.model.named_parameters()}
    worker.export_hf(out / "export")
    if any((name, sizes) == (model, saved) for model, saved, _ in RESUMED):
        worker.save_checkpoint(out / "checkpoint")
    arrays["second_loss"] = np.array(worker.train_step([random_batch(VOCAB, 3, part)], step=1)["train/total_loss"])
    worker.shutdown()
    if rank == 0:
        write(out, "result", arrays)


def run_resumed(rank: int, port: int, base: Path, name: str, saved: Sizes, sizes: Sizes) -> None:
    """Load another layout's checkpoint, pack, and make the next step."""
    worker = started(settings(base / name / "model", sizes, seed=9), rank, port, sizes.ranks)
    assert worker.load_checkpoint(base / name / saved.label / "checkpoint") == 1
    arrays = {f"packed/{n}": w for n, w in packed_weights(worker, BUCKET_BYTES).items()}
    loss = worker.train_step([random_batch(VOCAB, 3, sizes.part(rank))], step=1)["train/total_loss"]
    worker.shutdown()
    if rank == 0:
        write(base, f"resumed {name} {saved.label} {sizes.label}", arrays | {"second_loss": np.array(loss)})


def run_recomputed(rank: int, ports: list[int], base: Path, sizes: Sizes) -> None:
    """bfloat16 for a step, and adapters on the attention for two; layers are computed again and are one unit of FSDP."""
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj",))
    kinds: dict[str, tuple[int, dict[str, object]]] = {"bfloat16": (1, {"dtype": "bfloat16"}), "adapters": (2, {"lora": lora})}
    for kind, (steps, changes) in kinds.items():
        changes = changes | {"activation_checkpointing": True}
        worker = started(settings(base / "qwen3_moe" / "model", sizes, **changes), rank, ports.pop(), sizes.ranks)
        everything = random_batch(VOCAB, 2)
        arrays = {"logprobs": worker.compute_logprobs(everything.token_ids, everything.lengths, 1.0)}
        norms = [worker.train_step([random_batch(VOCAB, step, sizes.part(rank))], step)["train/grad_norm"] for step in range(steps)]
        if kind == "adapters":
            arrays |= {f"packed/{n}": w for n, w in packed_weights(worker).items()}
        worker.shutdown()
        if rank == 0:
            write(base, f"{kind} {sizes.label}", arrays | {"norms": np.array(norms)})


def run_critic(rank: int, port: int, base: Path, sizes: Sizes) -> None:
    """Gradients and values of a critic, and losses of two steps, with layers that are computed again."""
    policy = settings(base / "qwen3_moe" / "model", sizes, load_balancing=None, replays_routes=False, activation_checkpointing=True)
    shared = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name != "loss"}
    worker = CriticWorker(CriticConfig(**shared), rank, sizes.ranks)
    join(worker, port)
    set_head(worker)
    batches, everything = [valued(random_batch(VOCAB, step, sizes.part(rank))) for step in range(2)], random_batch(VOCAB, 2)
    arrays = {"values": worker.compute_values(everything.token_ids, everything.lengths, everything.response_mask)}
    (prepared,) = prepare_values(batches[:1], worker.config, torch.device("cpu"), worker.ready.costs)
    accumulate_value_gradients(worker.model, prepared, worker.config, ValueMeter(torch.device("cpu")))
    clip_gradients(worker.model, None)
    arrays |= {f"grad/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.model.zero_grad(set_to_none=True)
    found = [worker.train_step([batch], step) for step, batch in enumerate(batches)]
    worker.shutdown()
    if rank == 0:
        arrays |= {f"metric/{key}": np.array([one[f"critic/{key}"] for one in found]) for key in ("loss", "grad_norm")}
        write(base, f"critic {sizes.label}", arrays)


def run_frozen(rank: int, port: int, base: Path, sizes: Sizes) -> None:
    """Log-probs of a reference or teacher, the same after its weights were away."""
    frozen: dict[str, object] = {"trainable": False, "load_balancing": None, "replays_routes": False}
    worker = started(settings(base / "qwen3_moe" / "model", sizes, **frozen), rank, port, sizes.ranks)
    batch = random_batch(VOCAB, 2, sizes.part(rank))
    before = worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0)
    worker.offload(StateKind)
    worker.load(StateKind)
    assert np.array_equal(worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0), before)
    worker.shutdown()
    share, place = divmod(rank, sizes.cp * sizes.tp)
    if place == 0:
        write(base, f"frozen {sizes.label} {share}", {"logprobs": before})


def run_refused(rank: int, ports: list[int], base: Path) -> None:
    """What two ranks cannot divide is said by both, before anything is computed."""
    for changes, message in (
        (
            {"model_path": str(base / "dense")},
            "expert_parallel_size is 2, but model type qwen2 has no experts; set expertParallelSize to 1",
        ),
        ({"model_path": str(base / "odd")}, "expert_parallel_size is 2 but the model has 3 experts; choose a divisor of it"),
        ({"expert_parallel_size": 3}, "expert_parallel_size is 3 but there are 2 ranks; use a divisor of them"),
    ):
        config = settings(base / "qwen3_moe" / "model", Sizes(2, 1, 2), load_balancing=None, replays_routes=False)
        with pytest.raises(ModelError) as caught:
            started(dataclasses.replace(config, **changes), rank, ports.pop(), 2)
        assert message in str(caught.value)


def main(rank: int, ports: list[int], base: Path) -> None:
    model_module.ONE_UNIT_BYTES = 0  # layers are units of their own, as in large models
    for name, layouts in LAYOUTS.items():
        for sizes in layouts:
            port = ports.pop()
            if rank < sizes.ranks:
                run_layout(rank, port, base, name, sizes)
    for name, saved, sizes in RESUMED:
        port = ports.pop()
        if rank < sizes.ranks:
            run_resumed(rank, port, base, name, saved, sizes)
    for run in (run_critic, run_frozen):
        for sizes in (ONE, *ROLE_LAYOUTS):
            port = ports.pop()
            if rank < sizes.ranks:
                run(rank, port, base, sizes)
    model_module.ONE_UNIT_BYTES = 2**20
    for sizes in RECOMPUTED:
        pair = [ports.pop(), ports.pop()]
        if rank < sizes.ranks:
            run_recomputed(rank, pair, base, sizes)
    if rank < 2:
        run_refused(rank, ports, base)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results: ``model/LAYOUT/result.npz`` and others."""
    folder = tmp_path_factory.mktemp("experts")
    for name, config in MODELS.items():
        save_model(folder / name / "model", config, seed=5, bias_std=BIAS_STD)
        for layout in LAYOUTS[name]:
            (folder / name / layout.label).mkdir()
    for name, config in {"dense": Qwen2Config(**SMALL), "odd": MixtralConfig(**SMALL, num_local_experts=3)}.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    run_script(__file__, folder)
    return folder


OTHERS = [(name, layout.label) for name, layouts in LAYOUTS.items() for layout in layouts[1:]]
IDS = [f"{name} {layout}" for name, layout in OTHERS]


@pytest.mark.parametrize(("name", "layout"), OTHERS, ids=IDS)
def test_gradients_and_norms_equal_those_of_one_rank(base: Path, name: str, layout: str) -> None:
    one, other = base / name / "1x1x1", base / name / layout
    for way, expected in (("grad/", "grad/"), ("each/", "grad/"), ("first/", "first/")):
        gradients_of_one, found = read(one, "result", expected), read(other, "result", way)
        assert found.pop("norm") == pytest.approx(gradients_of_one.pop("norm"), rel=5e-6)
        assert_gradients_equal(found, gradients_of_one)


@pytest.fixture(scope="module")
def plain(base: Path) -> dict[str, dict[str, np.ndarray]]:
    """Gradients of each model by a plain loop."""
    return {name: plain_gradients(base / name / "model", random_batch(VOCAB, 0), coefficient=0.5) for name in MODELS}


@pytest.mark.parametrize(("name", "layout"), OTHERS, ids=IDS)
def test_gradients_equal_a_plain_transformers_loop(base: Path, plain: dict[str, dict[str, np.ndarray]], name: str, layout: str) -> None:
    found, expected = read(base / name / layout, "result", "grad/"), plain[name]
    norm = np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in expected.values()))
    assert norm > 2 * CLIP  # so that weights after a step show whether clipping is right too
    assert found.pop("norm") == pytest.approx(norm, rel=5e-6)
    assert_gradients_equal(found, expected)
    assert min(np.abs(gradient).max() for gradient in expected.values()) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_with_replayed_routes_only_the_first_experts_have_gradients(base: Path, name: str) -> None:
    experts = {n: g for n, g in read(base / name / "1x1x1", "result", "first/").items() if ".experts." in n}
    assert experts
    for gradient in experts.values():
        assert min(np.abs(gradient[expert]).max() for expert in range(3)) > 1e-3
        assert not gradient[3:].any()


@pytest.mark.parametrize(("name", "layout"), OTHERS, ids=IDS)
def test_logprobs_metrics_and_weights_after_a_step_equal_those_of_one_rank(base: Path, name: str, layout: str) -> None:
    one, other = read(base / name / "1x1x1", "result"), read(base / name / layout, "result")
    assert one.keys() == other.keys()
    np.testing.assert_allclose(other["logprobs"], one["logprobs"], **LOGPROBS)
    for key in one:
        if key.startswith("metric/") and not key.endswith("micro_batches"):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=2e-6), key
        elif key.startswith("packed/"):
            np.testing.assert_allclose(other[key], one[key], atol=1e-6, rtol=0, err_msg=key)
    assert other["second_loss"] == pytest.approx(one["second_loss"], abs=2e-6)


@pytest.mark.parametrize(("name", "layout"), OTHERS, ids=IDS)
def test_packed_names_and_bytes_are_those_of_the_checkpoint(base: Path, name: str, layout: str) -> None:
    folder = base / name / layout
    packed, original = read(folder, "result", "packed/"), load_file(base / name / "model" / "model.safetensors")
    assert {n: w.shape for n, w in packed.items()} == {n: tuple(w.shape) for n, w in original.items()}
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported.keys() == packed.keys()
    for key, tensor in exported.items():
        assert np.array_equal(tensor.numpy(), packed[key]), key
    loaded = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    weights = read(folder, "result", "weight/")
    assert weights.keys() == {n for n, _ in loaded.named_parameters()}
    for key, parameter in loaded.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), weights[key]), key
    changed = {key for key, tensor in original.items() if not np.array_equal(tensor.numpy(), packed[key])}
    assert changed == set(original)


@pytest.mark.parametrize(("model", "saved", "layout"), [(name, saved.label, sizes.label) for name, saved, sizes in RESUMED])
def test_a_checkpoint_loads_in_another_layout(base: Path, model: str, saved: str, layout: str) -> None:
    name, folder = f"resumed {model} {saved} {layout}", base / model / saved
    assert largest_difference(read(base, name, "packed/"), read(folder, "result", "packed/")) == 0.0
    assert read(base, name, "second_loss")[""] == pytest.approx(read(folder, "result", "second_loss")[""], abs=2e-6)


def test_bfloat16_with_recomputed_layers(base: Path) -> None:
    one, four = read(base, "bfloat16 1x1x1"), read(base, f"bfloat16 {WITHIN.label}")
    difference = np.abs(one["logprobs"] - four["logprobs"])
    assert difference.mean() < 0.02
    assert np.median(difference) < 0.01  # sums over tp round otherwise, so that a token may go to another expert
    assert four["norms"] == pytest.approx(one["norms"], rel=0.05)


def test_adapters_are_on_the_attention_and_experts_stay(base: Path) -> None:
    original, packed = load_file(base / "qwen3_moe" / "model" / "model.safetensors"), read(base, f"adapters {WITHIN.label}", "packed/")
    changed = {key for key, weight in packed.items() if not np.array_equal(weight, original[key].numpy())}
    assert changed == {key for key in packed if "q_proj" in key}
    one, four = read(base, "adapters 1x1x1"), read(base, f"adapters {WITHIN.label}")
    assert four["norms"] == pytest.approx(one["norms"], rel=1e-5)
    np.testing.assert_allclose(four["logprobs"], one["logprobs"], **LOGPROBS)


@pytest.mark.parametrize("layout", [sizes.label for sizes in ROLE_LAYOUTS])
def test_a_critic_learns_what_one_rank_learns(base: Path, layout: str) -> None:
    one, four = read(base, "critic 1x1x1"), read(base, f"critic {layout}")
    gradients = [name for name in one if name.startswith("grad/")]
    assert "grad/value_head.weight" in gradients
    assert any(".experts." in name for name in gradients)
    assert min(float(np.abs(one[name]).max()) for name in gradients) > 1e-4
    whole, same = (np.concatenate([arrays[name].ravel() for name in gradients]) for arrays in (one, four))
    assert np.linalg.norm(whole - same) < 1e-6 * np.linalg.norm(whole)
    np.testing.assert_allclose(four["values"], one["values"], atol=2e-6, rtol=2e-6)
    for key in ("metric/loss", "metric/grad_norm"):
        np.testing.assert_allclose(four[key], one[key], rtol=1e-5, err_msg=key)
        assert one[key].min() > 1e-3


@pytest.mark.parametrize("sizes", ROLE_LAYOUTS, ids=[sizes.label for sizes in ROLE_LAYOUTS])
def test_a_frozen_policy_scores_as_one_rank_does(base: Path, sizes: Sizes) -> None:
    one = read(base, "frozen 1x1x1 0")["logprobs"]
    parts = [read(base, f"frozen {sizes.label} {share}")["logprobs"] for share in range(sizes.dp)]
    np.testing.assert_allclose(np.concatenate(parts), one, **LOGPROBS)


if __name__ == "__main__":
    fork_ranks(4, NUM_PORTS, main)
