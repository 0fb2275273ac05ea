"""The memory estimate against what transformers and torch really hold."""

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rljob_api import memory, planner
from rljob_api.memory import engine_needs, layer_activations, step_needs, training_needs
from rljob_api.memory.adapters import adapter_parameters
from rljob_api.memory.layer_activations import Attending, TreeSizes, cpu_attending, layer_bytes_per_token
from rljob_api.memory.shape import LATENT_TYPES, MAX_INT8_EXPERTS, SHARED_TYPES
from rljob_api.planning.plan import Plan
from rljob_api.rules.model import MIXTURE_MODELS
from rljob_api.v1alpha1 import RLJob
from rljob_api.vocabulary import OptimizerStateDType
from rljob_runtime.engine.vllm import server_settings
from rljob_runtime.routes import route_dtype
from rljob_runtime.training import checkpoint, checkpoint_writing, context_parallel, sharing
from rljob_runtime.training import model as training_model
from rljob_runtime.training.attention import Packing
from rljob_runtime.training.bfloat16_adamw import STRETCH_NUMBERS
from rljob_runtime.training.compiling import compile_layers
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.lora import ADAPTER_NAMES, add_adapters
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.packing import TreePart
from rljob_runtime.training.parallel import Layout, apply_tensor_parallel, local_tensor, make_layout
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.test_trainer import make_batch
from tests.support.pace import HANG_S
from tests.support.ports import free_port
from tests.support.trainers import VOCAB
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import CONFIGS, SMALL

TOKENS = 512
"""Of one micro-batch: one sequence, so long that activations set the peak."""
MIXTURE = {
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80},
    "shared_expert_intermediate_size": 96,
}

SHARED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}


def build(config: dict[str, Any], *, attention: str = "sdpa") -> PreTrainedModel:
    loaded = AutoConfig.for_model(config["model_type"], **{key: value for key, value in config.items() if key != "model_type"})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(loaded, attn_implementation=attention)
    return model


def train_terms(
    config: dict[str, Any], *, checkpointing: bool = False, attention: str = "sdpa", dtype: str = "float32", **training: Any
) -> dict[str, int]:
    """Bytes by name of the phases train and optimizer step, one process, one sequence at a time."""
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "local", "devicesPerNode": 2, "deviceResource": "cpu", "deviceMemory": "1Gi"}]
    document["spec"]["model"] = {"path": "x", "dtype": dtype, "attention": attention}
    document["spec"]["rollout"] = {"maxPromptTokens": TOKENS // 2, "maxResponseTokens": TOKENS // 2}
    document["spec"]["training"] = {"microBatchTokens": TOKENS, "activationCheckpointing": checkpointing} | training
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    plan = planner.plan_or_errors(spec)
    assert isinstance(plan, Plan)
    estimate = memory.estimate(spec, plan, memory.shape_from_config(config))
    trainer = next(pool for pool in estimate.pools if pool.kind is memory.PoolKind.DEVICE and pool.first == 0)
    return {
        term.need.name: term.num_bytes
        for phase in trainer.phases
        for term in phase.terms
        if phase.phase in (memory.Phase.TRAIN, memory.Phase.OPTIMIZER_STEP)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    with torch.device("meta"):
        model = build(CONFIGS[name])
    shape = memory.shape_from_config(CONFIGS[name])
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = model.base_model.layers
    assert shape.decoder is not None
    assert shape.decoder.layer_parameters == max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    experts = [sum(p.numel() for p in layer.parameters() if p.ndim == 3) for layer in layers]
    assert shape.decoder.expert_parameters == sum(experts)
    largest = max(range(len(layers)), key=lambda index: sum(p.numel() for p in layers[index].parameters()))
    assert shape.decoder.layer_expert_parameters == experts[largest]
    assert shape.decoder.root_parameters == shape.parameters - sum(p.numel() for p in layers.parameters())
    assert memory.shape_from_config(json.loads(model.config.to_json_string(use_diff=False))) == shape


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_adapters_are_those_of_the_real_model(kind: str) -> None:
    """Of all linear layers: of dense layers, of shared experts, and of latent attention."""
    config = CONFIGS[kind]
    document = manifest()
    document["spec"]["model"] = {"path": "x", "lora": {"rank": 2}}
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    model = build(config)
    add_adapters(training_model.decoder_layers(model), LoraConfig(rank=2, alpha=4.0), seed=0)
    really = sum(p.numel() for name, p in model.named_parameters() if name.endswith(ADAPTER_NAMES))
    assert adapter_parameters(spec, memory.shape_from_config(config)) == really


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_activations_of_adapters_are_what_autograd_keeps(kind: str) -> None:
    """Norms and experts are frozen."""

    def per_layer(num_layers: int) -> int:
        model = build(divisible(kind) | {"num_hidden_layers": num_layers})
        add_adapters(training_model.decoder_layers(model), LoraConfig(rank=2, alpha=4.0), seed=0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(ADAPTER_NAMES))
        return saved_bytes(model, torch.zeros(1, TOKENS, dtype=torch.long))

    decoder, tree = memory.shape_from_config(divisible(kind)).decoder, TreeSizes(prompt_tokens=1, response_tokens=TOKENS - 1, samples=1)
    assert decoder is not None
    thought = TOKENS * layer_bytes_per_token(decoder, tree, Attending.DIRECT, number=4, trains_all=False, tensor=1)
    really = (per_layer(4) - per_layer(2)) // 2
    assert 0.99 * really <= thought <= 1.02 * really


def divisible(kind: str) -> dict[str, Any]:
    """A model of a type that two ranks can divide; heads are equally wide, for which torch has a kernel without scores."""
    config = {"model_type": kind, **SMALL, "num_key_value_heads": 4, "head_dim": 16} | (MIXTURE if kind in MIXTURE_MODELS else {})
    return config | (SHARED if kind in SHARED_TYPES else {}) | (LATENT | {"v_head_dim": 24} if kind in LATENT_TYPES else {})


@pytest.fixture
def one_of_two_ranks() -> Iterator[Layout]:
    """The layout of a tensor-parallel rank whose collectives exchange nothing: shapes are all that counts."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield make_layout(torch.device("cpu"), tensor_parallel_size=2)
    dist.destroy_process_group()


@pytest.mark.parametrize("divides_tokens", [False, True], ids=["layers", "tokens too"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_activations_of_divided_layers_are_what_autograd_keeps(kind: str, divides_tokens: bool, one_of_two_ranks: Layout) -> None:
    config = divisible(kind)

    def per_layer(num_layers: int) -> int:
        model = build(config | {"num_hidden_layers": num_layers})
        apply_tensor_parallel(model, training_model.decoder_layers(model), one_of_two_ranks, divides_tokens=divides_tokens)
        return saved_bytes(model, torch.zeros(1, TOKENS, dtype=torch.long))

    decoder, tree = memory.shape_from_config(config).decoder, TreeSizes(prompt_tokens=1, response_tokens=TOKENS - 1, samples=1)
    assert decoder is not None
    parts = 2 if divides_tokens else 1
    thought = TOKENS * layer_bytes_per_token(decoder, tree, Attending.DIRECT, number=4, trains_all=True, tensor=2, token_parts=parts)
    really = (per_layer(4) - per_layer(2)) // 2
    assert 0.99 * really <= thought <= 1.02 * really


def saved_bytes(model: PreTrainedModel, input_ids: torch.Tensor, **others: Any) -> int:
    """What autograd keeps of the layers and the final norm, weights left out."""
    weights = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=input_ids, use_cache=False, **others)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "checkpointing"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_activations_are_what_autograd_keeps(kind: str, dtype: str, attention: str, checkpointing: bool) -> None:
    def per_layer(num_layers: int) -> int:
        config = {"model_type": kind, **SMALL, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": num_layers}
        model = build(config, attention=attention).to(getattr(torch, dtype))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in training_model.decoder_layers(model):
                layer.training = True
        return saved_bytes(model, torch.zeros(1, TOKENS, dtype=torch.long))

    def estimated(num_layers: int) -> int:
        config = {"model_type": kind, **SMALL, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": num_layers}
        return train_terms(config, checkpointing=checkpointing, attention=attention, dtype=dtype)["activations"]

    really, thought = per_layer(4) - per_layer(2), estimated(4) - estimated(2)
    assert really == thought if checkpointing else really <= thought <= 1.02 * really


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_activations_are_what_autograd_keeps_of_compiled_layers(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tensors are kept is decided before code is generated, so that no compiler is needed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))

    def config(num_layers: int) -> dict[str, Any]:
        return {"model_type": kind, **SMALL, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": num_layers}

    def per_layer(num_layers: int) -> int:
        model = build(config(num_layers)).to(getattr(torch, dtype))
        training_model.prepare_attention(model)
        compile_layers(training_model.decoder_layers(model))
        return saved_bytes(model, torch.zeros(1, TOKENS, dtype=torch.long))

    def estimated(num_layers: int) -> int:
        return train_terms(config(num_layers), dtype=dtype, layerCompilation="Enabled")["activations"]

    really, thought = per_layer(4) - per_layer(2), estimated(4) - estimated(2)
    assert really <= thought <= 1.02 * really


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        *(("qwen2", 1), ("qwen3", 1), ("qwen3_moe", 1), ("mixtral", 1), ("qwen2", 2), ("qwen3", 4), ("qwen3_moe", 2)),
        *(("deepseek_v3", 1), ("glm4_moe", 1)),
    ],
)
@pytest.mark.parametrize(
    ("prompt", "response", "samples", "attending"),
    [
        (8, 200, 2, Attending.DIRECT),
        (16, 8, 4, Attending.MASKED),
        (194, 64, 2, Attending.BRANCHES),
    ],
)
def test_activations_of_common_prompts_are_what_autograd_keeps(
    kind: str, context: int, prompt: int, response: int, samples: int, attending: Attending, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = SimpleNamespace(size=lambda: context) if context > 1 else None
    monkeypatch.setattr(context_parallel, "all_to_all", lambda blocks, _: blocks.contiguous().clone())  # shapes are all that counts
    config = {"model_type": kind, **SMALL, "head_dim": 16} | (MIXTURE if kind in MIXTURE_MODELS else {})
    config |= (SHARED if kind in SHARED_TYPES else {}) | (LATENT if kind in LATENT_TYPES else {})
    rng = np.random.default_rng(0)
    common, full = rng.integers(0, 500, prompt), prompt + response
    tokens = np.concatenate([np.concatenate([common, rng.integers(0, 500, response)]) for _ in range(samples)]).astype(np.int32)
    wanted = np.tile(np.arange(full) >= prompt, samples).astype(np.float32)

    def per_layer(num_layers: int) -> int:
        model = build(config | {"num_hidden_layers": num_layers})
        training_model.prepare_attention(model)
        costs, lengths = training_model.layer_costs(model, torch.device("cpu")), np.full(samples, full, dtype=np.int32)
        (micro,) = make_micro_batches(tokens, lengths, wanted, samples * full, costs)
        assert micro.packed is not None
        (part,) = micro.packed.parts
        chosen = Attending.BRANCHES if isinstance(part, TreePart) else Attending.MASKED if part.masked else Attending.DIRECT
        assert chosen is attending
        own = context_parallel.part_of(micro, 0, context).micro
        assert own.packed is not None
        packing = Packing(own.packed, torch.device("cpu"), group)
        return saved_bytes(model, torch.from_numpy(own.input_ids), packing=packing, position_ids=packing.position_ids)

    decoder = memory.shape_from_config(config).decoder
    assert decoder is not None
    tree = TreeSizes(prompt_tokens=prompt, response_tokens=response - 1, samples=samples)  # the last token predicts nothing
    assert cpu_attending(decoder, tree) is attending
    rows = -(-(samples * (full - 1) if attending is Attending.DIRECT else tree.tokens) // context)
    thought = rows * layer_bytes_per_token(decoder, tree, attending, number=4, trains_all=True, tensor=1, context=context)
    really = (per_layer(4) - per_layer(2)) // 2
    assert 0.98 * really <= thought <= 1.02 * really


@pytest.fixture(params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PolicyWorker]:
    """A real trainer rank of a small model; one in bfloat16 has its moments in that as well."""
    build({"model_type": "qwen2", **SMALL, "vocab_size": VOCAB}).save_pretrained(tmp_path)
    states = OptimizerStateDType(request.param)
    config = PolicyConfig(model_path=str(tmp_path), dtype=request.param, optimizer_state_dtype=states)
    worker = PolicyWorker(config, rank=0, world_size=1)
    worker.setup("127.0.0.1", free_port(), timeout_s=HANG_S)
    yield worker
    worker.shutdown()


def test_a_trainer_holds_what_the_estimate_says(worker: PolicyWorker) -> None:
    config = json.loads((Path(worker.config.model_path) / "config.json").read_text())
    terms = train_terms(config, dtype=worker.config.dtype, optimizerStateDtype=worker.config.optimizer_state_dtype)
    parameters = list(worker.model.parameters())
    assert terms["float32 weights"] == sum(local_tensor(p.detach()).nbytes for p in parameters)
    ready = worker.ready
    assert ready.optimizer is not None
    states = [local_tensor(t) for state in ready.optimizer.state.values() for name, t in state.items() if name != "step"]
    assert terms["AdamW m and v"] == sum(tensor.nbytes for tensor in states)
    assert worker.checkpoint_bytes() == terms["float32 weights"] + terms["AdamW m and v"]
    (prepared,) = prepare_batches([make_batch()], worker.config, torch.device("cpu"))
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(torch.device("cpu")), fresh=True)
    assert terms["gradients"] == sum(local_tensor(p.grad).nbytes for p in parameters if p.grad is not None)


def test_gradients_of_several_micro_batches_are_whole_on_every_process(worker: PolicyWorker) -> None:
    """Two processes would each hold all of it; here the one keeps it apart from its shards until the last micro-batch."""
    config = json.loads((Path(worker.config.model_path) / "config.json").read_text())
    model = worker.model
    model.set_requires_gradient_sync(False)
    positions = torch.arange(4)
    model.token_logprobs(torch.zeros(2, 8, dtype=torch.long), positions, positions, 1.0, 4)[0].sum().backward()
    assert all(p.grad is None for p in model.parameters())
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    accumulated = [(p.unsharded_accumulated_grad, p._unsharded_param.grad) for p in group.fsdp_params]  # of bfloat16, of float32
    held = [upcast if upcast is not None else own for upcast, own in accumulated]
    assert train_terms(config)["whole gradients of several micro-batches"] == sum(local_tensor(tensor).nbytes for tensor in held)


@pytest.mark.parametrize("each", [False, True], ids=["last", "each"])
def test_gradients_that_are_reduced_with_each_micro_batch_are_never_whole(worker: PolicyWorker, each: bool) -> None:
    model, cpu = worker.model, torch.device("cpu")
    config = dataclasses.replace(worker.config, token_budget=20, reduces_each_micro_batch=each)
    (prepared,) = prepare_batches([make_batch()], config, cpu)
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    whole: list[bool] = []

    def look(*_: Any) -> None:
        """What the micro-batches before this one have left."""
        whole.append(any(p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None for p in group.fsdp_params))

    model.base_model.register_forward_pre_hook(look)
    accumulate_gradients(model, prepared, config, StepMeter(cpu), fresh=True)
    assert whole == [False] + [not each] * (len(prepared.micro_batches) - 1)
    assert len(whole) > 2
    terms = train_terms(json.loads((Path(config.model_path) / "config.json").read_text()), dtype=config.dtype)
    assert terms["gradients"] == sum(local_tensor(p.grad).nbytes for p in model.parameters() if p.grad is not None)


def test_constants_are_those_of_the_runtime() -> None:
    assert training_needs.ONE_UNIT_BYTES == training_model.ONE_UNIT_BYTES
    assert training_needs.CHECKPOINT_FILES == checkpoint.FILES["cuda"]
    assert training_needs.CHECKPOINT_FILE_BYTES == checkpoint_writing.FILE_BYTES
    assert {"cpu": step_needs.CPU_STRETCH_NUMBERS, "cuda": step_needs.CUDA_STRETCH_NUMBERS} == STRETCH_NUMBERS
    assert layer_activations.CPU_CALL_FLOPS == sharing.CPU_CALL_FLOPS
    assert route_dtype(MAX_INT8_EXPERTS) is np.int8
    assert route_dtype(MAX_INT8_EXPERTS + 1) is np.int16
    assert engine_needs.CPU_KV_CACHE_BYTES == server_settings.CPU_KV_CACHE_BYTES
