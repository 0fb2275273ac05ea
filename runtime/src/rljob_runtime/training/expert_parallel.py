"""Expert parallelism of mixtures: the ranks of a group have a part each of every layer's experts, and exchange tokens.

Without it FSDP2 gathers all experts of a layer on every rank. With it, each rank of a group of ``ep`` neighbors has ``E / ep`` experts as a
whole while the layer computes, and rows of hidden states travel to the rank of their expert and back (arXiv 2006.16668)::

    rank 0   tokens, router -> rows for experts 0..3 | 4..7  --exchange->  rows for experts 0..3, products  --exchange->  weighted sums
    rank 1   tokens, router -> rows for experts 0..3 | 4..7  --exchange->  rows for experts 4..7, products  --exchange->  weighted sums

The exchange is an all-to-all of as many rows as were routed; none is dropped. An all-gather of tokens and a reduce-scatter of sums would
move ``ep / experts per token`` times as much, which is less in small groups, but ranks have unequally many tokens, which these would have
to pad. The price is that the host waits for the numbers of rows once a layer. Context-parallel ranks have different tokens, as
data-parallel ones have.

Tensor-parallel ranks have the same tokens, and each would send the same rows. In the block of a mixture each therefore takes its part of
every row's tokens, as sequence parallelism divides them (:mod:`.sequence_parallel`), so that all ranks have different tokens there. So a
group is any ``ep`` neighbors of all ranks, whatever else they share: within a tensor-parallel group, the same ranks, or several of these::

    dp 2, tp 2, ep 2: groups (0 1) (2 3), which are the tensor-parallel ones      dp 2, tp 2, ep 4: group (0 1 2 3)
    dp 1, tp 4, ep 2: groups (0 1) (2 3), two within the tensor-parallel one

Experts are whole on one rank and never divided by channels. That is Megatron-Core's parallel folding with expert tensor parallel size 1
(arXiv 2504.14960) and torchtitan's ``etp = 1`` (``ParallelDims``: expert parallelism takes the ranks of tp and cp, and some of dp):
experts of fine-grained mixtures are a few hundred channels wide, which divided make thin products, and rows would have to be summed
besides. Router and shared experts' gate are whole on each rank and see its tokens, so that their gradients are summed over tp
(:func:`~rljob_runtime.training.parallel.sum_partial_gradients`); shared experts are divided by channels.

Parameters of experts are DTensors on the mesh ``("efsdp", "ep")`` of all ranks: a part for each rank of a group, which FSDP2 shards over
the groups; with tensor parallelism and ``ep`` 1 on ``("efsdp",)``, all ranks, so that none has a copy of another's shard. So checkpoints,
the norm and the optimizer see whole tensors in disjoint shards, as of every other parameter. Only averaging differs: the gradient of an
expert is a sum over the tokens of its whole group already, so its sum over the groups is divided by the number of dp times cp ranks, by
which each of these multiplies its loss. The tp ranks of a batch have a part each of the gradient of the same loss, which adds up.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from rljob_runtime.errors import ModelError
from rljob_runtime.training.mixtures import EXPERT_PARAMETERS, is_experts
from rljob_runtime.training.parallel import Layout, divide, local_tensor


def apply_expert_parallel(model: PreTrainedModel, layers: Iterable[nn.Module], layout: Layout) -> list[nn.Module]:
    """Divide the experts over their groups in place, before FSDP; nothing to do without expert parallelism but to find them.

    Args:
        model: whole, on any device.
        layers: its decoder layers.
        layout: of the ranks.

    Returns:
        The modules of experts with a mesh of their own.

    Raises:
        ModelError: the model has no experts, or ``ep`` does not divide them.
    """
    if layout.experts is None:
        return []
    found = [module for layer in layers for module in layer.modules() if is_experts(module)]
    if layout.ep_size == 1:
        return found
    if not found:
        kind = model.config.model_type
        raise ModelError(f"expert_parallel_size is {layout.ep_size}, but model type {kind} has no experts; set expertParallelSize to 1")
    for experts in found:
        num_experts = local_tensor(experts.get_parameter(EXPERT_PARAMETERS[0])).shape[0]
        if num_experts % layout.ep_size != 0:
            raise ModelError(f"expert_parallel_size is {layout.ep_size} but the model has {num_experts} experts; choose a divisor of it")
        for name in EXPERT_PARAMETERS:
            divide(experts, name, 0, layout.experts["ep"])
        experts.ep_group = layout.experts.get_group("ep")  # type: ignore[assignment]
        experts.forward = types.MethodType(_forward, experts)
    return found


def shard_experts(found: Iterable[nn.Module], layout: Layout, policy: MixedPrecisionPolicy) -> None:
    """Make experts with a mesh of their own FSDP units, sharded over the groups.

    Args:
        found: by :func:`apply_expert_parallel`.
        layout: of the ranks.
        policy: dtypes, as of the other units.
    """
    for experts in found:
        assert layout.experts is not None
        groups = layout.experts["efsdp"]
        fully_shard(experts, mesh=groups, mp_policy=policy)
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(float(layout.fsdp_size))
        # a factor is a reduction of NCCL alone otherwise; of one group torch 2.13 divides by it twice if this is on
        experts.set_force_sum_reduction_for_comms(groups.size() > 1)


class _OwnExperts:
    """A module of experts as transformers' code sees it: with this rank's parameters, gathered by FSDP, as plain tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        for name in EXPERT_PARAMETERS:
            setattr(self, name, local_tensor(getattr(module, name)))
        self.num_experts = len(getattr(self, EXPERT_PARAMETERS[0]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _forward(self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums of the chosen experts' outputs, shape (T, H); all ranks of the group must call it.

    Args:
        self: the module of experts.
        hidden_states: shape (T, H), of this rank's tokens.
        top_k_index: shape (T, K), numbers of experts among all of the layer.
        top_k_weights: shape (T, K).
    """
    group, own = self.ep_group, _OwnExperts(self)
    assert isinstance(group, dist.ProcessGroup)
    num_tokens, top_k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = torch.argsort(chosen, stable=True)  # by expert is by rank
    sent = torch.zeros(group.size() * own.num_experts, dtype=torch.int64, device=chosen.device)
    sent = sent.scatter_add_(0, chosen, torch.ones_like(chosen)).view(group.size(), own.num_experts)  # bincount would wait on CUDA
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    outward, inward = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # the host waits here
    # embedding, not an index: tokens repeat, and its backward adds in a fixed order on every device
    rows = _exchange(F.embedding(order // top_k, hidden_states), outward, inward, group)
    experts = torch.arange(own.num_experts, device=rows.device).repeat(group.size())
    experts = experts.repeat_interleave(received.reshape(-1), output_size=sum(inward))
    returned = _exchange(_products(type(self), own, rows, experts), inward, outward, group)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    outputs = returned.index_select(0, places).view(num_tokens, top_k, -1)
    return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _products(kind: Any, own: _OwnExperts, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Outputs of one expert each, shape (N, H), by transformers' code for the module.

    Args:
        kind: class of the module.
        own: this rank's experts.
        rows: shape (N, H); there may be none.
        experts: shape (N,), numbers among the rank's own.
    """
    num_rows = rows.shape[0]
    if num_rows == 0:  # parameters need a gradient here too, and the ranks that sent nothing the backward of the exchange
        rows, experts = rows.sum(0, keepdim=True), experts.new_zeros(1)
    outputs: torch.Tensor = kind.forward(own, rows, experts.unsqueeze(1), rows.new_ones(rows.shape[0], 1))
    return outputs[:num_rows]


def _exchange(rows: torch.Tensor, outward: list[int], inward: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows for each rank of the group, one rank's after the other's, for those from each; differentiable.

    Args:
        rows: shape (sum of ``outward``, H).
        outward: how many go to each rank.
        inward: how many come from each.
        group: all of whose ranks must call it.
    """
    result: torch.Tensor = _Exchange.apply(rows, outward, inward, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all of unequal parts, whose backward is the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, outward: list[int], inward: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.outward, ctx.inward, ctx.group = outward, inward, group
        return _all_to_all(rows, outward, inward, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grad, ctx.inward, ctx.outward, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, outward: list[int], inward: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received = rows.new_empty(sum(inward), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), inward, outward, group=group)
    return received
