"""Some layers of a model, for vLLM's reload layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class LayerGroup:
    """Some layers of a model, in the place of the model where vLLM reloads layer by layer."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        """Keep them."""
        self._layers = layers

    def modules(self) -> Iterator[torch.nn.Module]:
        """All of them, as of a model."""
        return iter(self._layers)


def group_of(model: torch.nn.Module, names: Collection[str]) -> LayerGroup:
    """The layers of these names, those that run experts among them, and attention layers, which may compute something from others."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    chosen = [layer for name, layer in model.named_modules() if name in names]
    ids = {id(layer) for layer in chosen}
    for layer in model.modules():
        runs = getattr(layer, "routed_experts", None)
        if id(layer) not in ids and (is_deferred_attention_layer(layer) or (runs is not None and id(runs) in ids)):
            chosen.append(layer)
    return LayerGroup(chosen)
