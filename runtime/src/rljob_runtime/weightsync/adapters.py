"""Adapters on their way to engines that serve them: what they are called, and what fits a model. Pure.

Names are those of peft: ``<layer>.lora_A.weight`` of shape (rank, inputs) and ``<layer>.lora_B.weight`` of shape (outputs, rank). ``B``
travels with the adapters' scale in it, so that an engine computes ``x W^T + (x A^T) B^T`` and needs to know no alpha.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_runtime.records import WeightManifest

LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"


def layer_of(name: str) -> str | None:
    """The layer that an adapter belongs to; None for other names."""
    return next((name.removesuffix(end) for end in (LORA_A, LORA_B) if name.endswith(end)), None)


def fitting(manifest: WeightManifest, weights: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of both adapters of every layer that the manifest has one of, as far as the model has that layer.

    Args:
        manifest: of an update.
        weights: Hugging Face name -> full shape of the model's parameters.
        rank: of all adapters.
    """
    layers = {layer_of(slot.name) for bucket in manifest.buckets for slot in bucket.slots}
    found: dict[str, tuple[int, ...]] = {}
    for layer in sorted(layer for layer in layers if layer is not None):
        shape = weights.get(f"{layer}.weight", ())
        if len(shape) == 2:
            found |= {layer + LORA_A: (rank, shape[1]), layer + LORA_B: (shape[0], rank)}
    return found


def linear_layers(weights: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Last names of all matrices of decoder layers: what may have adapters where none are named."""
    inner = {name for name, shape in weights.items() if len(shape) == 2 and any(part.isdigit() for part in name.split("."))}
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in inner if name.endswith(".weight")})
