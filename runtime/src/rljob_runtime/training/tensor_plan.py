"""Which part of a decoder layer each tensor-parallel rank has: transformers' plans (``base_model_tp_plan``), completed where they gather.

A plan divides linear layers by output channels (``colwise``) or input channels (``rowwise``). Where something between the two needs more
than a rank's channels, plans gather whole outputs and cut them again (``colwise_gather_output``, ``rowwise_split_input``): every rank then
computes the same of it. Here these are divided as well, and what they are gathered for has a style of its own:

* projections above one another in one weight (``qkv_proj``, ``gate_up_proj``): each rank has consecutive rows of the weight, as a
  checkpoint has them, and ranks exchange outputs (:mod:`.tensor_layers`);
* norms over a whole projection (OLMo 2): one sum of squares per token;
* norms within heads with a weight for each head (Cohere): a rank's heads alone;
* learned numbers of an activation function (Apertus), and norms within heads with one weight for all of them (GLM-4-MoE): whole on each
  rank, which sees only its channels or heads;
* latent attention (DeepSeek-V2 and V3, arXiv 2405.04434, section 2.1): what computes latents of queries, keys and values is whole on each
  rank, as plans have it. Each rank expands latents to its heads alone, so that gradients of latents, and of all before them, are parts of
  a sum over tp: of parameters summed once per update, of hidden states with those of the other column layers of the block.

Experts, which plans divide by channels, are not divided here: in the block of a mixture tokens are (:mod:`.expert_parallel`). Its router is
whole on each rank, which sees only its tokens; the linear layers of a shared expert are divided as those of a dense MLP.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import XIELUActivation

from rljob_api.rules.model import MIXTURE_MODELS, TENSOR_PARALLEL_MODELS, UNDIVIDED_MODELS, can_divide, divided_sizes
from rljob_runtime.errors import ModelError
from rljob_runtime.training.mixtures import is_experts, mixture_blocks


class Style(enum.Enum):
    """What tensor parallelism does with a module."""

    COLUMN = "colwise"
    """Linear, divided by output channels; each rank has the whole input."""
    ROW = "rowwise"
    """Linear, divided by input channels; outputs are summed over tp."""
    PARTIAL = "replicated_with_grad_allreduce"
    """Whole on each rank, and sees only this rank's heads or channels, or in the block of a mixture its tokens."""
    WHOLE_NORM = "norm over a whole projection"
    """RMS norm over all heads, of which each rank has its own."""
    HEAD_NORM = "norm with a weight for each head"
    """Divided by heads."""


PLANNED = {
    "colwise": Style.COLUMN,
    "colwise_gather_output": Style.COLUMN,
    "rowwise": Style.ROW,
    "rowwise_split_input": Style.ROW,
    "replicated_with_grad_allreduce": Style.PARTIAL,
}
"""Styles of transformers' plans that are known here."""
FUSED_ATTENTION, FUSED_MLP = "qkv_proj", "gate_up_proj"
"""Linear layers that are several projections above one another: queries, keys and values; gate and up."""
IN_LAYERS = "layers.*."
"""How a plan's names of modules of the decoder layers begin."""
_SHARED = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
"""Linear layers of an expert that all tokens pass."""
_LATENT = {
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), Style.PARTIAL),
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), Style.COLUMN),
    "o_proj": Style.ROW,
}
"""Modules of latent attention. Plans of some types leave them out, because transformers does not sum gradients of whole modules."""
_EXPANSION = "kv_b_proj"
"""Which of them every latent attention has."""
_NORMALIZED = {"q_norm": "q_proj", "k_norm": "k_proj"}
"""Norms and the projections before them."""


def layer_styles(model: PreTrainedModel, layer: nn.Module) -> dict[str, Style]:
    """Style of each module of a decoder layer that has one, by its name in the layer.

    Parameters of other modules have to be the layer's own norms, which see whole hidden states.

    Args:
        model: whole.
        layer: one of its decoder layers.

    Raises:
        ModelError: the plan leaves something within an attention or MLP, whose part of the work is not known.
    """
    config = model.config.get_text_config()
    plan = {name.removeprefix(IN_LAYERS): style for name, style in config.base_model_tp_plan.items() if name.startswith(IN_LAYERS)}
    modules = dict(layer.named_modules())
    styles = {name: PLANNED[style] for name, style in plan.items() if style in PLANNED and not is_experts(_owner(modules, name))}
    styles |= _in_mixtures(layer) | _in_latent_attention(layer)
    styles |= {name: style for name, module in layer.named_modules() if name not in styles and (style := _between(layer, name, module))}
    blocks = {name.rpartition(".")[0] for name in styles}
    owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()} - {n for n, m in modules.items() if is_experts(m)}
    unknown = sorted(owner for owner in owners if owner not in styles and ("." in owner or owner in blocks))
    if unknown:
        raise ModelError(
            f"{type(layer).__name__} has {', '.join(unknown)}, which the tensor-parallel plan of {config.model_type} does not divide; "
            "set tensorParallelSize to 1"
        )
    return styles


def _owner(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module that has a planned module or parameter; an empty one where this layer has none of that name."""
    return modules.get(name.rpartition(".")[0], nn.Module())


def _in_mixtures(layer: nn.Module) -> dict[str, Style]:
    """Of the modules of a mixture's block that have parameters, but for the experts."""
    found = {}
    for begin, block in mixture_blocks(layer).items():
        for name, module in block.named_modules():
            owner, _, last = name.rpartition(".")
            if is_experts(module) or not any(True for _ in module.parameters(recurse=False)):
                continue
            found[f"{begin}.{name}"] = _SHARED.get(last, Style.PARTIAL) if owner and isinstance(module, nn.Linear) else Style.PARTIAL
    return found


def _in_latent_attention(layer: nn.Module) -> dict[str, Style]:
    """Of the modules of a layer's latent attention; empty where it has another."""
    blocks = {name: block for name, block in layer.named_modules() if isinstance(getattr(block, _EXPANSION, None), nn.Linear)}
    return {f"{begin}.{name}": _LATENT[name] for begin, block in blocks.items() for name, _ in block.named_children() if name in _LATENT}


def _between(layer: nn.Module, name: str, module: nn.Module) -> Style | None:
    """Style of what stands between divided linear layers and is in no plan; None: not known."""
    block, _, last = name.rpartition(".")
    if isinstance(module, XIELUActivation):
        return Style.PARTIAL
    projection = getattr(layer.get_submodule(block), _NORMALIZED.get(last, ""), None) if block else None
    weight = getattr(module, "weight", None)
    if weight is None or not isinstance(projection, nn.Linear):
        return None
    if weight.ndim == 1 and weight.numel() == getattr(layer.get_submodule(block), "head_dim", None):
        return Style.PARTIAL
    if weight.numel() != projection.out_features:
        return None
    if weight.ndim == 2:
        return Style.HEAD_NORM
    return Style.WHOLE_NORM if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") else None


def check_plan(model: PreTrainedModel, tp_size: int) -> None:
    """Refuse a model whose layers cannot be divided.

    Raises:
        ModelError: naming what does not fit.
    """
    config = model.config.get_text_config()
    kind, remedy = config.model_type, "set tensorParallelSize to 1"
    if kind in UNDIVIDED_MODELS:
        raise ModelError(f"model type {kind} cannot be divided by tensor parallelism: {UNDIVIDED_MODELS[kind]}; {remedy}")
    if not can_divide(kind) or not _is_plain(model.get_input_embeddings()):
        known = ", ".join((*TENSOR_PARALLEL_MODELS, *MIXTURE_MODELS))
        raise ModelError(f"model type {kind} has no tensor-parallel plan (there is one for {known}); {remedy}")
    for name, size in divided_sizes(kind, lambda key: getattr(config, key, None)).items():
        if size % tp_size != 0:
            raise ModelError(f"tensor_parallel_size is {tp_size} but the model has {name} {size}; choose a divisor of it")


def fused_sizes(config: PretrainedConfig, name: str, module: nn.Linear) -> tuple[int, ...] | None:
    """Output channels of each projection of a fused linear layer; None for a layer that is one projection.

    Args:
        config: of the text model.
        name: of the module in its layer.
        module: whole.
    """
    last = name.rpartition(".")[2]
    if last == FUSED_MLP:
        return (module.out_features // 2,) * 2
    if last == FUSED_ATTENTION:
        head_dim = module.out_features // (config.num_attention_heads + 2 * config.num_key_value_heads)
        return config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim, config.num_key_value_heads * head_dim
    return None


def _is_plain(embedding: Any) -> bool:
    """Whether it looks rows up and, as Gemma's, multiplies them by one number."""
    return type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_scale"))
