"""torch.compile of decoder layers: norms, rotary positions, activations, and residuals as a few kernels instead of dozens.

Each layer's ``forward`` is compiled where it stands, so FSDP's hooks and activation checkpointing, which call it, stay as they are, and all
layers share one compilation. Attention is left out, since it compiles a kernel of its own (:mod:`.attention`) and holds the collectives of
context parallelism: compiled collectives can deadlock with FSDP's. Divided layers and experts hold collectives as well, and are not
compiled. Shapes are symbolic from the start, because micro-batches seldom have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rljob_api import layer_compilation as rule
from rljob_api.vocabulary import LayerCompilation
from rljob_runtime.errors import ModelError
from rljob_runtime.training.config import PolicyConfig

MOST_VARIANTS = 16
"""Compilations of each function that torch keeps: with and without gradients and packed rows, one padded row and several. It goes on
uncompiled beyond that, and logs it."""


def compiles_layers(model: PreTrainedModel, config: PolicyConfig, device: torch.device) -> bool:
    """Whether the layers of this policy are compiled on this device.

    Raises:
        ModelError: ``config`` asks for it, and the model is a mixture of experts.
    """
    wanted, kind = config.layer_compilation, model.config.model_type
    is_mixture = getattr(model.config.get_text_config(), "num_experts_per_tok", None) is not None
    if wanted is LayerCompilation.ENABLED and is_mixture:
        raise ModelError(
            f"layer_compilation is Enabled, but model type {kind} is a mixture of experts; set training.layerCompilation to Auto"
        )
    return rule.compiles_layers(
        wanted,
        on_cuda=device.type == "cuda",
        tensor_parallel_size=config.tensor_parallel_size,
        is_mixture=is_mixture,
        may_be_custom=config.trust_remote_code,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile in place, which the first passes then do: tens of seconds.

    Numbers of modules, such as the scale of adapters, become constants in this process. By default torch passes them in as tensors on the
    CPU, which on a GPU makes it compile C++ code beside each layer's kernels.

    Args:
        layers: decoder layers, before ``fully_shard``.
    """
    torch._dynamo.config.specialize_float = True
    make: Any = torch.compile  # whose declared overloads lack recompile_limit
    for layer in layers:
        layer.forward = make(layer.forward, dynamic=True, recompile_limit=MOST_VARIANTS)
