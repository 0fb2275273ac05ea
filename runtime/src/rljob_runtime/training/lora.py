"""Low-rank adapters (LoRA, arXiv 2106.09685) in the form ``y = x (W + scale * B A)^T``, with ``W`` frozen.

The sum of weights is made in float32 and rounded once to the dtype of ``x``, which is what an engine gets as the layer's plain weight: so
trainer and engine compute the same function also in bfloat16, where ``x W^T + scale * (x A^T) B^T`` would differ by its roundings. It
exists only while a layer computes; backward makes it again, and no gradient of ``W``'s size ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn
from torch.autograd.function import once_differentiable

from rljob_runtime.errors import ModelError
from rljob_runtime.training.config import LoraConfig

ADAPTER_NAMES = ("lora_a", "lora_b")
"""Parameters of :class:`LoraLinear` that a plain model lacks."""


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight and bias, under their old names, and a trained pair of float32 adapters."""

    lora_a: nn.Parameter
    """Shape (rank, in_features)."""
    lora_b: nn.Parameter
    """Shape (out_features, rank)."""
    is_adapted: bool = True
    """False inside :func:`without_adapters`."""
    tp_partial: tuple[str, ...] = ()
    """Adapters whose gradients tensor parallelism sums up over its ranks."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        """Take over the base layer's tensors; ``B`` is zero, so that the layer starts as its base.

        Args:
            base: its parameters become frozen.
            rank: of the adapters.
            alpha: the product is scaled by ``alpha / rank``.
            generator: for ``A``, uniform as in :func:`torch.nn.init.kaiming_uniform_` with ``a = sqrt(5)``, which is the default of peft.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.scale = alpha / rank
        first = torch.empty(rank, base.in_features, dtype=torch.float32)
        self.lora_a = nn.Parameter(nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (..., in_features) to (..., out_features)."""
        if not self.is_adapted:
            return F.linear(input, self.weight, self.bias)
        return merged_linear(input, self.weight, self.bias, self.lora_a, self.lora_b, self.scale)


def add_adapters(layers: Sequence[nn.Module], config: LoraConfig, seed: int) -> None:
    """Replace linear layers of decoder layers by :class:`LoraLinear`, in place. All else stays; freeze the model before.

    Args:
        layers: decoder layers, not yet sharded.
        config: rank, scale, and which layers.
        seed: of the adapters; equal seeds give equal adapters in every process.

    Raises:
        ModelError: a target is the name of no linear layer, or there is none at all.
    """
    available = {name.rpartition(".")[2] for layer in layers for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    unknown = sorted(set(config.target_modules) - available)
    if unknown or not available:
        raise ModelError(
            f"lora.target_modules names {', '.join(unknown) or 'all linear layers'}, but the linear layers of {type(layers[0]).__name__} "
            f"are {', '.join(sorted(available)) or 'none (of type torch.nn.Linear)'}; name some of these, or none for all"
        )
    wanted = set(config.target_modules) or available
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        found = [(name, module) for name, module in layer.named_modules() if name.rpartition(".")[2] in wanted]
        for name, module in found:
            if isinstance(module, nn.Linear):
                layer.set_submodule(name, LoraLinear(module, config.rank, config.alpha, generator))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes as its base: the frozen weights alone, in the same way as a plain linear layer."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.is_adapted = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_adapted = True


def merged_weight(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    """``W + scale * B A`` in float32, a fresh tensor shaped as ``weight``; rows of ``W`` and ``B`` may be a part of all."""
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale)


def merged_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float
) -> torch.Tensor:
    """``x (W + scale * B A)^T + bias``, the weight rounded to the dtype of ``x``; once differentiable in ``x``, ``A`` and ``B``.

    Args:
        x: shape (..., I).
        weight: shape (O, I), frozen.
        bias: shape (O,), frozen, or None.
        lora_a: shape (R, I).
        lora_b: shape (O, R).
        scale: of the product.

    Returns:
        Shape (..., O), dtype of ``x``. The rounding counts as identity in gradients.
    """
    result: torch.Tensor = _MergedLinear.apply(x, weight, bias, lora_a, lora_b, scale)  # type: ignore[no-untyped-call]
    return result


class _MergedLinear(torch.autograd.Function):
    """Keeps ``x``, which a plain linear layer keeps too, and the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, lora_a, lora_b)
        ctx.scale = scale
        return F.linear(x, merged_weight(weight, lora_a, lora_b, scale).to(x.dtype), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, torch.Tensor, torch.Tensor, None]:
        """With the merged weight's gradient ``G = grad^T x``: ``dA = scale * B^T G`` and ``dB = scale * G A^T``, never making ``G``."""
        x, weight, lora_a, lora_b = ctx.saved_tensors
        grad_x = torch.matmul(grad, merged_weight(weight, lora_a, lora_b, ctx.scale).to(grad.dtype)) if ctx.needs_input_grad[0] else None
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_a = torch.mm(torch.mm(grads, lora_b.to(grad.dtype)).t(), rows).to(lora_a.dtype).mul_(ctx.scale)
        grad_b = torch.mm(grads.t(), torch.mm(rows, lora_a.to(x.dtype).t())).to(lora_b.dtype).mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None
