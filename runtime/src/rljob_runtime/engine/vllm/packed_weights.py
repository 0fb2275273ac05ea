"""The packed copies of weights that vLLM's kernels on CPU multiply with."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from rljob_runtime.cpu_products import HALVES, widen_products

if TYPE_CHECKING:
    import torch

    from rljob_runtime.engine.vllm.layer_group import LayerGroup


@cache
def multiply_halves_in_float32() -> None:
    """Have layers of 16-bit numbers multiply with their weights themselves, through torch, in float32; for models loaded after that.

    For CPUs of which :func:`~rljob_runtime.cpu_products.lacks_half_products` is true: oneDNN has only portable loops there. vLLM 0.32 turns
    to torch where oneDNN refuses a weight, and logs the refusal once.
    """
    from vllm import _custom_ops

    create = _custom_ops.create_onednn_mm

    def create_unless_half(weight: torch.Tensor, *options: Any) -> Any:
        if weight.dtype in HALVES:
            raise RuntimeError(f"{weight.dtype} is multiplied in float32, because oneDNN has only portable loops for it on this CPU")
        return create(weight, *options)

    _custom_ops.create_onednn_mm = create_unless_half
    widen_products()


def has_packed_copy(layer: torch.nn.Module) -> bool:
    """Whether a layer multiplies with a packed copy of its weight: what it calls holds more than the call's arguments."""
    return getattr(getattr(layer, "cpu_linear", None), "__closure__", None) is not None


def repack_shared_weights(model: torch.nn.Module | LayerGroup) -> None:
    """Renew the packed copies of weights that two layers share.

    Tied embeddings are processed through one of their two layers only; on CPU the other keeps multiplying with the old packed
    weight. Layers that gave their weight away to the packed copy (an empty weight) were processed by the reload.
    """
    for layer in model.modules():
        weight: Any = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            quant_method: Any = layer.quant_method
            quant_method.process_weights_after_loading(layer)


def repack_experts(model: torch.nn.Module | LayerGroup) -> None:
    """Pack the experts of a mixture for the CPU kernel after a reload of all its layers; to be called once per reload.

    vLLM 0.32 packs them when it makes a layer's kernel, and takes a reload for one whose kernel needs nothing more
    (``UnquantizedFusedMoEMethod``): on CPU the kernel would read plain weights as packed ones, with no error and log-probs off by nats.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for layer in model.modules():
        if isinstance(layer, MoERunner):
            quant_method: Any = layer.routed_experts.quant_method
            quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer.routed_experts)
