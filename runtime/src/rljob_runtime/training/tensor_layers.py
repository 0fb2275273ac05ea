"""What tensor parallelism computes in place of a layer's modules: forwards of divided modules and their collectives.

Parameters are DTensors, the arithmetic is on plain local tensors. Which module gets which forward is said in :mod:`.tensor_plan`.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn
from torch.distributed.tensor import DTensor

from rljob_runtime.training.lora import LoraLinear, merged_linear


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, or the tensor itself; shares memory, gradients flow back."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
        return local
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """From consecutive output channels of a fused projection on each rank to each rank's part of every projection in it.

    ``tp`` ranks have ``n / tp`` of the n channels each. Rank r wants the r-th ``1 / tp`` of every projection, one after the other::

        gate and up, tp 2:  rank 0 has g0 g1, rank 1 has u0 u1  ->  rank 0 gets g0 u0, rank 1 gets g1 u1
    """

    order: torch.Tensor
    """This rank's channels, int64, in the order in which they are sent: those for rank 0 first."""
    sent: tuple[int, ...]
    """Number of channels for each rank."""
    received: tuple[int, ...]
    """Number of channels from each rank."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, sizes: Sequence[int], rank: int, tp_size: int, group: dist.ProcessGroup, device: str) -> Regrouping:
        """For projections of these numbers of output channels, each divisible by ``tp_size``.

        Args:
            sizes: of the whole projections, in their order in the weight.
            rank: this one, in the group.
            tp_size: ranks of the group.
            group: of the ranks that have all channels together.
            device: where the layer computes.
        """
        wanted_by = [place * tp_size // size for size in sizes for place in range(size)]
        share = len(wanted_by) // tp_size
        mine = wanted_by[rank * share : (rank + 1) * share]
        return cls(
            order=torch.tensor(sorted(range(share), key=mine.__getitem__), device=device),
            sent=tuple(mine.count(other) for other in range(tp_size)),
            received=tuple(wanted_by[other * share : (other + 1) * share].count(rank) for other in range(tp_size)),
            group=group,
        )


def column_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """This rank's output channels; the gradient of ``x`` is this rank's part of a sum, which :func:`copy_input` makes."""
    result = _product(self, x, None if self.bias is None else local_tensor(self.bias))
    regrouping = getattr(self, "tp_regrouping", None)
    if regrouping is None:
        return result
    regrouped: torch.Tensor = _Regroup.apply(result, regrouping)  # type: ignore[no-untyped-call]
    return regrouped


def row_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """All output channels from this rank's input channels and the other ranks' sums; with sequence parallelism of its tokens alone."""
    product = _product(self, x, None)
    result = sum_over(product, self.tp_group) if self.tp_tokens is None else self.tp_tokens.sum_and_cut(product)
    return result if self.bias is None else result + self.bias


def _product(module: nn.Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = local_tensor(module.weight)
    if isinstance(module, LoraLinear) and module.is_adapted:
        return merged_linear(x, weight, bias, local_tensor(module.lora_a), local_tensor(module.lora_b), module.scale)
    return F.linear(x, weight, bias)


def whole_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """RMS norm over the channels of all ranks, of which ``x`` (..., channels / tp) has this rank's; float32 inside, as transformers'."""
    wide = x.float()
    squares: torch.Tensor = _SumOfParts.apply(wide.square().sum(-1, keepdim=True), self.tp_group)  # type: ignore[no-untyped-call]
    normal = wide * torch.rsqrt(squares / self.tp_channels + self.variance_epsilon)
    return (local_tensor(self.weight) * normal).to(x.dtype)


def head_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The module's own norm within heads, with the weights of this rank's heads."""
    mine = types.SimpleNamespace(weight=local_tensor(self.weight), variance_epsilon=self.variance_epsilon)
    result: torch.Tensor = self.tp_norm(mine, x)
    return result


def copy_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook: pass hidden states on; their gradient is summed over tp. One sum for all the column layers of an attention or MLP.

    With sequence parallelism they come as this rank's tokens and are gathered.
    """
    whole = args[0] if args else kwargs["hidden_states"]
    if module.tp_tokens is not None:
        whole = module.tp_tokens.gather(whole)
    else:
        whole = _Copy.apply(whole, module.tp_group)  # type: ignore[no-untyped-call]
    return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})


class _Copy(torch.autograd.Function):
    """Identity whose gradient is summed over tp (``f`` of arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over tp in place, whose gradient is that of every summand."""
    result: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    """Sum over tp in place, whose gradient is that of every summand (``g`` of arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumOfParts(torch.autograd.Function):
    """Sum over tp that each rank uses for its own channels, so that gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # autograd may hand the same gradient to others
    dist.all_reduce(total, group=group)
    return total


class _Regroup(torch.autograd.Function):
    """All-to-all of output channels (..., n / tp), whose backward is the way back. Who gets what: :class:`Regrouping`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Regrouping) -> torch.Tensor:
        ctx.plan = plan
        channels = x.reshape(-1, x.shape[-1]).t()
        sent = channels.index_select(0, plan.order)
        received = sent.new_empty(sum(plan.received), sent.shape[1])
        dist.all_to_all_single(received, sent, list(plan.received), list(plan.sent), group=plan.group)
        return received.t().reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        plan: Regrouping = ctx.plan
        sent = grad.reshape(-1, grad.shape[-1]).t().contiguous()
        received = sent.new_empty(sum(plan.sent), sent.shape[1])
        dist.all_to_all_single(received, sent, list(plan.sent), list(plan.received), group=plan.group)
        channels = torch.empty_like(received)
        channels[plan.order] = received
        return channels.t().reshape(*grad.shape[:-1], -1), None
