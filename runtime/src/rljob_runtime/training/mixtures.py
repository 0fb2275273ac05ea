"""Where the experts of a mixture are in a decoder layer, as transformers 5 builds them."""

from __future__ import annotations

from torch import nn

EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Of a module with all experts of a layer, as transformers 5 names them: shapes (E, 2 I, H) and (E, H, I)."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module has all experts of a layer."""
    return EXPERT_PARAMETERS == tuple(name for name, _ in module.named_parameters(recurse=False))


def mixture_blocks(layer: nn.Module) -> dict[str, nn.Module]:
    """The block of a layer with router, experts and shared experts, by its name in the layer; empty for a layer without experts."""
    names = (name.rpartition(".")[0] for name, module in layer.named_modules() if is_experts(module))
    return {name: layer.get_submodule(name) for name in names}
