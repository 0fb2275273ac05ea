"""Sequence parallelism beside tensor parallelism (Korthikanti et al., arXiv 2205.05198): tokens between attention and MLP are divided.

A tensor-parallel rank has ``ceil(width / tp)`` consecutive tokens of each row where layers add and normalize hidden states. They are
gathered before column layers, and the sums after row layers go to each rank for its own tokens alone, the same traffic as one sum of all
tokens::

    embedding -> cut -> | norm -> gather -> q, k, v, attention, o -> sum and cut -> add -> norm -> gather -> ... | -> gather -> norm, head
                          tokens / tp        heads / tp                            tokens / tp

Rows are padded to a multiple of tp where they are divided, and attention and MLP never see the padding. Every parameter that a rank has
as a whole, such as a norm's weight or the bias of a row layer, sees its tokens alone, so that its gradient is a part of a sum over tp
(:func:`~rljob_runtime.training.parallel.sum_partial_gradients`). Embedding, last norm and head compute all tokens on each rank.

Blocks of experts divide tokens in the same way, also where nothing else does (:mod:`.expert_parallel`): they take a rank's own tokens, and
only shared experts, whose layers tp divides, gather them::

    ... -> norm -> | router, exchange, experts                          | -> add        cut before and joined behind the block
                   | gather -> gate, up, down of shared -> sum and cut  |               without sequence parallelism
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn

from rljob_runtime.routes import NO_ROUTE


class DividedTokens:
    """How the layers of a model divide the rows of the present micro-batch; one for all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group``: the tensor-parallel ranks."""
        self._group = group
        self._width = 0

    def attach(self, first: nn.Module, last: nn.Module) -> None:
        """Cut the hidden states that enter the first of some consecutive blocks, and gather those that leave the last."""
        first.register_forward_pre_hook(self._enter, with_kwargs=True)
        last.register_forward_hook(self._leave)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = args[0] if args else kwargs["hidden_states"]
        self._width = whole.shape[1]
        own: torch.Tensor = _Cut.apply(whole, self._width, self._group)  # type: ignore[no-untyped-call]
        return ((own, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": own})

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = _Join.apply(output, self._width, self._group)  # type: ignore[no-untyped-call]
        return whole

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All tokens (rows, width, H) from each rank's (rows, ceil(width / tp), H), for work that ranks divide; gradients are summed.

        Where a block has flattened them, (tp * N, H) from (N, H): those of one rank after the other's, padding included.
        """
        if own.ndim == 2:
            flat: torch.Tensor = _Gather.apply(own.unsqueeze(0), self._group.size() * own.shape[0], self._group)  # type: ignore[no-untyped-call]
            return flat.squeeze(0)
        whole: torch.Tensor = _Gather.apply(own, self._width, self._group)  # type: ignore[no-untyped-call]
        return whole

    def sum_and_cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens (rows, ceil(width / tp), H) of the sum over ranks of (rows, width, H); or (N, H) of (tp * N, H)."""
        if whole.ndim == 2:
            flat: torch.Tensor = _SumAndCut.apply(whole.unsqueeze(0), whole.shape[0], self._group)  # type: ignore[no-untyped-call]
            return flat.squeeze(0)
        own: torch.Tensor = _SumAndCut.apply(whole, self._width, self._group)  # type: ignore[no-untyped-call]
        return own

    def join_numbers(self, own: torch.Tensor, rows: int) -> torch.Tensor:
        """Numbers (rows * width, E) of all tokens, with which all ranks go on alike, from each rank's (rows * ceil(width / tp), E)."""
        whole: torch.Tensor = _Join.apply(own.unflatten(0, (rows, -1)), self._width, self._group)  # type: ignore[no-untyped-call]
        return whole.flatten(0, 1)

    def own_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Of flat positions (N,) in all tokens (rows * width) those of this rank's, as positions in (rows * ceil(width / tp))."""
        share = -(-self._width // self._group.size())
        rows, places = positions // self._width, positions % self._width - self._group.rank() * share
        is_own = (places >= 0) & (places < share)
        return (rows * share + places)[is_own]

    def cut_routes(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        """Routes of this rank's tokens (rows * ceil(width / tp), L, K) from those of all, (rows * width, L, K); no route for padding."""
        by_row = whole.flatten(1).unflatten(0, (rows, -1))
        own = _by_rank(by_row, self._group, NO_ROUTE)[self._group.rank()]
        return own.flatten(0, 1).unflatten(1, whole.shape[1:])


class _Cut(torch.autograd.Function):
    """This rank's tokens of what all ranks have; they all get the whole gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, width: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.width, ctx.group = width, group
        return _own(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.width, ctx.group), None, None


class _Join(torch.autograd.Function):
    """All tokens, with which all ranks go on alike, so that each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, width: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(own, width, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(grad, ctx.group), None, None


class _Gather(_Join):
    """All tokens, with which each rank does a part of the work, so that gradients are summed."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed_own(grad, ctx.group), None, None


class _SumAndCut(torch.autograd.Function):
    """The opposite of :class:`_Gather`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, width: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.width, ctx.group = width, group
        return _summed_own(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.width, ctx.group), None, None


def _by_rank(whole: torch.Tensor, group: dist.ProcessGroup, filling: int = 0) -> torch.Tensor:
    """(rows, width, H), padded with ``filling``, as (tp, rows, ceil(width / tp), H); a view where it can be."""
    size = group.size()
    tokens = -(-whole.shape[1] // size)
    padding = tokens * size - whole.shape[1]
    padded = whole if padding == 0 else F.pad(whole, (0, 0, 0, padding), value=filling)  # which copies, whatever the padding
    return padded.unflatten(1, (size, tokens)).transpose(0, 1)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _by_rank(whole, group)[group.rank()].clone(memory_format=torch.contiguous_format)  # lets go of the whole


def _summed_own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = _by_rank(whole, group).contiguous()
    own = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_single(own.view(-1), parts.view(-1), group=group)
    return own


def _gathered(own: torch.Tensor, width: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens (rows, width, H), which are no view of another tensor, as FSDP2 wants it of what a layer returns.

    One row without padding arrives as it is to be; others are copied.
    """
    (rows, tokens), size = own.shape[:2], group.size()
    whole = own.new_empty(rows, size * tokens, *own.shape[2:])
    dist.all_gather_single(whole.view(-1), own.contiguous().view(-1), group=group)
    if rows > 1:  # they arrive rank by rank
        whole = whole.view(size, *own.shape).transpose(0, 1).flatten(1, 2)
    return whole if whole.shape[1] == width and whole._base is None else whole[:, :width].clone()
