"""Makes a Hugging Face causal language model, shards it with FSDP2, and has each process read its own shard (:mod:`.loading`).

Tensor parallelism (:mod:`.parallel`) and adapters (:mod:`.lora`) come before. Every decoder layer is one FSDP unit, the rest
(embeddings, final norm, head) the root unit; a small model is one unit as a whole. The
policy's only entry is the method ``token_logprobs`` put on the model and registered with FSDP: calling parts of the model directly would
bypass the all-gather hooks. World size 1 takes the same path (about a tenth of a small model's step), so names, checkpoints and code do
not depend on it.
"""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from rljob_api.logits import ATTENTION_CAP, LogitForm, logit_form
from rljob_api.rules.model import MIXTURE_MODELS
from rljob_runtime.cpu_products import lacks_half_products, widen_products
from rljob_runtime.errors import ModelError
from rljob_runtime.training.attention import PACKED, Packing
from rljob_runtime.training.balance import balance_coefficient, routing_sums
from rljob_runtime.training.compiling import compile_layers, compiles_layers
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.expert_parallel import apply_expert_parallel, shard_experts
from rljob_runtime.training.loading import WeightFiles, without_weights
from rljob_runtime.training.logprob import PossibleTokens, VocabularyPart, selected_logprobs
from rljob_runtime.training.lora import add_adapters
from rljob_runtime.training.parallel import Layout, apply_tensor_parallel, layout_of, mixture_tokens_of
from rljob_runtime.training.replay import Replay, replay_of
from rljob_runtime.training.router_bias import check_router_bias
from rljob_runtime.training.routers import Choices, choices_of, find_routers, keep_biases_float32
from rljob_runtime.training.sharing import ACCELERATOR_OVERHEAD_TOKENS, CPU_CALL_FLOPS, CPU_OVERHEAD_TOKENS, LINEAR_ONLY, LayerCosts
from rljob_runtime.weightsync.checkpoint_names import ROUTER_BIAS, checkpoint_parts

logger = logging.getLogger(__name__)

ONE_UNIT_BYTES = 32 * 2**20
"""A model up to this size is gathered as one unit: layer by layer saves little memory, and took a tenth longer per step (quickstart)."""


def resolve_folder(model_path: str) -> Path:
    """The folder of a model.

    Raises:
        ModelError: it is not there, or has no config.json.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(f"model folder {model_path} does not exist; give an existing folder, or mount the volume that holds it")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} has no config.json; point model_path at a folder written by save_pretrained")
    return folder


def load_model(config: PolicyConfig, folder: Path) -> PreTrainedModel:
    """Make the model in eval mode (no dropout: log-probs must be a function of weights and tokens); :func:`shard_model` reads its weights.

    Where the weights are in other files than safetensors, or under other names than the model's, transformers loads the whole model on
    the CPU, in every process.

    Transformers holds the experts of a layer as one parameter and multiplies them by grouped matrix products where torch has these for the
    device (``torch._grouped_mm``), in a loop otherwise. The model carries what its checkpoint calls its parameters (``checkpoint_parts``).

    What is trained is loaded in float32 (its masters), what is frozen in ``config.dtype``: a frozen policy, and all but the adapters with
    ``config.lora``.

    Raises:
        ModelError: not loadable, or of a kind whose log-probs this trainer would get wrong, or without the layers to adapt.
    """
    dtype = torch.float32 if config.trainable and config.lora is None else getattr(torch, config.dtype)
    model = _made(config, folder, dtype)
    balance_coefficient(model, config.load_balancing)
    prepare_attention(model)
    model.replay = Replay(model, decoder_layers(model)) if config.replays_routes else None
    routers = find_routers(decoder_layers(model))
    check_router_bias(model, routers, config.router_bias_update_rate)
    model.choices = Choices(routers) if config.load_balancing is not None or config.router_bias_update_rate > 0 else None
    model.requires_grad_(config.trainable and config.lora is None)
    if config.lora is not None:
        add_adapters(decoder_layers(model), config.lora, config.seed)
    model.eval()
    if config.activation_checkpointing and config.trainable:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in decoder_layers(model):
            _checkpoint_without_dropout(layer)
    return model


def _checkpoint_without_dropout(layer: nn.Module) -> None:
    """A layer of transformers checkpoints in training mode only; what it checkpoints computes in eval mode, as its children do."""
    layer.training = True
    checkpoint: Callable[..., Any] | None = getattr(layer, "_gradient_checkpointing_func", None)
    if checkpoint is None:  # of a model's own code
        return

    def checkpoint_in_eval_mode(function: Callable[..., Any], *args: Any) -> Any:
        def compute(*given: Any) -> Any:
            layer.training = False  # some layers call dropout themselves
            try:
                return function(*given)
            finally:
                layer.training = True

        return checkpoint(compute, *args)

    layer._gradient_checkpointing_func = checkpoint_in_eval_mode  # type: ignore[assignment]


def _made(config: PolicyConfig, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with ``weight_files`` and ``checkpoint_parts``; without files it has its weights.

    Raises:
        ModelError: see :func:`load_model`.
    """
    options: dict[str, Any] = {"attn_implementation": config.attn_implementation, "trust_remote_code": config.trust_remote_code}
    files = WeightFiles.find(folder)
    with _readable(folder), without_weights():
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=dtype, **options)
    _refuse_unsupported(model, folder)
    keep_biases_float32(model.modules())
    parts = checkpoint_parts(model)
    why = _needs_whole(model, parts, files, dtype)
    if why:
        logger.warning("every process loads the whole model of %s: %s", folder, why)
        files = None
        with _readable(folder):
            model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
        if found["missing_keys"]:  # transformers leaves them random
            names = sorted(found["missing_keys"])
            raise ModelError(f"model folder {folder} has no weights for {len(names)} of the model's tensors, {names[0]} among them")
    model.checkpoint_parts, model.weight_files = parts, files
    return model


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"model folder {folder} cannot be loaded as a causal language model: {error}") from error


def _needs_whole(model: PreTrainedModel, parts: Collection[str], files: WeightFiles | None, dtype: torch.dtype) -> str:
    """Why only transformers can load it; empty where its shards can be read from the files."""
    if files is None:
        return "its weights are not in safetensors files"
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    if dtype != torch.float32 and kept - {ROUTER_BIAS}:
        return f"parts of it stay in float32 where the rest is {dtype}"
    if missing := files.missing(parts, model):
        return f"{len(missing)} of its tensors have other names in the files, {missing[0]} among them"
    return ""


def shard_model(model: PreTrainedModel, config: PolicyConfig, layout: Layout, device: torch.device) -> None:
    """Shard in place, put ``token_logprobs`` and the layout on the model, and read this process's weights.

    Args:
        model: whole, with adapters if there are any.
        config: of the policy.
        layout: from :func:`~rljob_runtime.training.parallel.make_layout`.
        device: where its shards go.

    Raises:
        ModelError: tensor or expert parallelism is asked for and does not fit the model, or weights cannot be read.
    """
    model.layout = layout
    # with adapters every parameter has the dtype it is used in: merged weights are made in float32
    low_precision = config.dtype != "float32" and config.trainable and config.lora is None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low_precision else MixedPrecisionPolicy()
    if device.type == "cpu" and config.dtype == "bfloat16" and lacks_half_products():
        widen_products()
    layers = decoder_layers(model)
    apply_tensor_parallel(model, layers, layout, divides_tokens=config.sequence_parallel)
    experts = apply_expert_parallel(model, layers, layout)
    if compiles_layers(model, config, device):
        compile_layers(layers)
    one_unit = sum(p.numel() * p.element_size() for p in model.parameters()) <= ONE_UNIT_BYTES
    shard_experts(experts, layout, policy)
    if not one_unit:
        for layer in layers:
            fully_shard(layer, mesh=layout.fsdp_mesh, mp_policy=policy)
    fully_shard(model, mesh=layout.fsdp_mesh, mp_policy=policy)
    for name, method in (("token_logprobs", token_logprobs), ("expert_choices", _expert_choices)):
        setattr(model, name, types.MethodType(method, model))
        register_fsdp_forward_method(model, name)
    if model.weight_files is not None:
        model.weight_files.fill(model, device)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as transformers itself names them for sharding.

    Raises:
        ModelError: the model names none.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(f"model class {type(model).__name__} names no blocks in _no_split_modules; it cannot be sharded layer by layer")
    return layers


def reshard(model: nn.Module) -> None:
    """Free gathered root parameters after forwards without backward, so that shards can be read. At least one forward must have run.

    Also clears FSDP2's record of the forward order, which otherwise grows until a backward; a frozen model has none.
    """
    assert isinstance(model, FSDPModule)
    model.reset_iter_state()


def prepare_attention(model: PreTrainedModel) -> None:
    """Let the model compute packed rows (:mod:`.attention`) if it can, which :func:`layer_costs` then says."""
    if _attends_to_all(model) and model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(PACKED)


def layer_costs(model: PreTrainedModel, device: torch.device) -> LayerCosts:
    """What the decoder layers cost, for deciding what stands in a micro-batch and whether sequences share a prompt.

    Packing needs a model that hands :mod:`.attention` its keywords and honors given positions: transformers' own code, attention by
    ``sdpa`` over all earlier tokens in every layer (no sliding window, no chunks, no recurrent state), and rotary positions. Of other
    models than these, whatever computes the attention, only the number of positions counts.

    Args:
        model: not yet sharded, which changes its class.
        device: where it will compute; sets what a micro-batch costs whatever is in it.
    """
    config, on_cpu = model.config.get_text_config(), device.type == "cpu"
    overhead_tokens = CPU_OVERHEAD_TOKENS if on_cpu else ACCELERATOR_OVERHEAD_TOKENS
    if not _attends_to_all(model):
        return dataclasses.replace(LINEAR_ONLY, overhead_tokens=overhead_tokens)
    layers = decoder_layers(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pair = getattr(config, "qk_head_dim", head_dim) + getattr(config, "v_head_dim", head_dim)  # latent attention has both
    return LayerCosts(
        linear_flops=2.0 * sum(_used_share(p, config) * p.numel() for layer in layers for p in layer.parameters()),
        attention_flops=2.0 * config.num_attention_heads * pair * len(layers),
        call_flops=CPU_CALL_FLOPS * len(layers) if on_cpu else 0.0,
        by_blocks=not on_cpu,
        overhead_tokens=overhead_tokens,
        may_pack=config._attn_implementation == PACKED,
        may_share=config._attn_implementation == PACKED,
    )


def _attends_to_all(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all earlier tokens, wherever positions say that these are, and nothing else joins tokens."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    whole = set(kinds) == {"full_attention"} if kinds else getattr(config, "sliding_window", None) is None
    own_code = type(model).__module__.startswith("transformers.")
    return whole and own_code and hasattr(model.base_model, "rotary_emb") and not model._is_stateful


def _used_share(parameter: nn.Parameter, config: PretrainedConfig) -> float:
    """Share of a parameter that one token is multiplied with: of a layer's experts those it is routed to."""
    return float(config.num_experts_per_tok) / parameter.shape[0] if parameter.ndim == 3 else 1.0


def token_logprobs(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
    packing: Packing | None = None,
    with_entropy: bool = False,
    possible_ids: torch.Tensor | None = None,
    possible_rows: torch.Tensor | None = None,
    with_routing: bool = False,
    routes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (N,) float32 of ``targets`` (N,) after the :func:`hidden_states` at ``positions`` (N,); with entropies below: (2, N).

    With ``possible_ids`` (M,) and their ``possible_rows`` (M,) of a micro-batch, among these tokens only. With ``with_routing`` also what
    the routers chose at these positions, see :func:`~rljob_runtime.training.balance.routing_sums`; None without.
    With ``routes`` (rows * width, L, K) these are the experts, see :mod:`.replay`.
    """
    chosen, routing = _pass(self, input_ids, positions, packing, with_routing=with_routing, routes=routes)
    weight = self.get_output_embeddings().weight
    part = None
    if isinstance(weight, DTensor):  # gathered by FSDP here, so that it is one only where the vocabulary is divided over tp
        weight, layout = weight.to_local(), layout_of(self)
        part = VocabularyPart(first=layout.tp_rank * weight.shape[0], group=layout.tp_group)
    possible = None if possible_ids is None or possible_rows is None else PossibleTokens(token_ids=possible_ids, rows=possible_rows)
    form = form_of_logits(self)
    logprobs = selected_logprobs(
        chosen,
        weight,
        targets,
        temperature=temperature / form.scale,
        softcap=form.softcap,
        chunk_tokens=chunk_tokens,
        part=part,
        with_entropy=with_entropy,
        possible=possible,
    )
    return logprobs, routing


def _expert_choices(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    packing: Packing | None = None,
    routes: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the routers choose at ``positions`` (N,): :func:`~rljob_runtime.training.balance.routing_sums`, without the head."""
    routing = _pass(self, input_ids, positions, packing, with_routing=True, routes=routes)[1]
    assert routing is not None
    return routing


def hidden_states(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    packing: Packing | None = None,
) -> torch.Tensor:
    """Last hidden states (N, H) at flat ``positions`` (N,) of ``input_ids`` (rows, width); only inside a method registered with FSDP.

    Without ``packing`` rows are padded right and attention is causal. No cache: with one, transformers takes packed-sequence guesses.
    """
    return _pass(model, input_ids, positions, packing, with_routing=False)[0]


def _pass(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    packing: Packing | None,
    *,
    with_routing: bool,
    routes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states (N, H) of :func:`hidden_states`, and routing sums (2, E) if they are asked for."""
    replay, tokens, rows = replay_of(model), mixture_tokens_of(model), input_ids.shape[0]
    if replay is not None:
        replay.set(routes if routes is None or tokens is None else tokens.cut_routes(routes, rows))
    asked: dict[str, Any] = {"output_router_logits": True} if with_routing else {}
    if packing is not None:
        asked |= {"packing": packing, "position_ids": packing.position_ids}
    output = model.base_model(input_ids=input_ids, use_cache=False, **asked)
    hidden = output.last_hidden_state
    # embedding, not hidden[positions] or index_select: positions repeat where prompts are shared, and its backward adds in a fixed order
    # on the CPU and on CUDA (there it sorts first; the others use atomics on one of the two), so losses are bit-identical over runs
    chosen = F.embedding(positions, hidden.reshape(-1, hidden.shape[-1]))
    if not with_routing:
        return chosen, None
    choices = choices_of(model)
    assert choices is not None
    logits, experts = output.router_logits, choices.experts()
    if tokens is not None:
        logits, experts = ([tokens.join_numbers(own, rows) for own in numbers] for numbers in (logits, experts))
    return chosen, routing_sums(choices.routers, experts, logits, positions)


def form_of_logits(model: PreTrainedModel) -> LogitForm:
    """What the model does to its logits after the head.

    Raises:
        ModelError: it is not known.
    """
    config = model.config.get_text_config()
    form = logit_form(config.model_type, lambda key: getattr(config, key, None))
    if isinstance(form, str):
        raise ModelError(
            f"model type {config.model_type} with {form} {getattr(config, form)}: what it does to logits after the head is not known; "
            "use another model"
        )
    return form


def _refuse_unsupported(model: PreTrainedModel, folder: Path) -> None:
    """Refuse models for which log-probs or weight names would be silently wrong.

    Raises:
        ModelError: saying what is not supported.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"model in {folder} has the head {head}; only a linear head without bias is supported")
    text_config = model.config.get_text_config()
    form_of_logits(model)
    cap, attention = getattr(text_config, ATTENTION_CAP, None), text_config._attn_implementation
    if cap is not None and attention == "sdpa":
        raise ModelError(f"model in {folder} has {ATTENTION_CAP} {cap}, which sdpa does not compute; set model.attention to eager")
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renames_alone = all(isinstance(conversion, WeightRenaming) for conversion in conversions)
    if not renames_alone and text_config.model_type not in MIXTURE_MODELS:
        raise ModelError(
            f"model in {folder} ({model.config.model_type}) stores other tensors than it computes with "
            f"({len(conversions)} conversions); of models that do, {', '.join(MIXTURE_MODELS)} are supported"
        )
