"""Log-probs of chosen tokens from hidden states, never holding more than one chunk of logits.

Memory is O(chunk * V) instead of O(N * V), in backward too: logits are recomputed chunk by chunk, except those of the last chunk. They are
kept from forward, and backward begins with them, so that the peak is the same.

Why not ``F.linear_cross_entropy``: for bfloat16 inputs it returns bfloat16 (-10.50 for -10.52), too coarse for a ratio between two
policies, and in float32 it took 164 MiB where this takes 19 (4096 tokens, vocabulary 16384, chunks of 256; ``bench.logprob_memory``).
Here logits and log-probs are float32 for any input. For bfloat16 CUDA's kernels, which accumulate in float32 anyway, write that (time not
measured); on the CPU it takes about 1.6 times the time of forward and backward (2.1 to 3.7 s and 3.2 to 4.6 s in two pairs of runs: 1024
tokens, hidden 896, vocabulary 32768, one thread; peak 20 to 50 MiB lower, because no bfloat16 logits exist).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch.autograd.function import once_differentiable

from rljob_runtime.training.logit_kernels import compiled, log_normalizers, logit_gradients

WIDENED_ROWS = 4096
"""Rows of a bfloat16 head that exist in float32 at the same time, on devices that cannot multiply bfloat16 into float32."""
LEAST_LOGPROB = -1e4
"""Stands for minus infinity where it is multiplied by its probability, which is then exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """Which rows of the head a rank has, where the vocabulary is divided over ranks that have equal hidden states."""

    first: int
    """Token of the first row."""
    group: dist.ProcessGroup
    """The ranks that have all rows together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PossibleTokens:
    """Which tokens could be sampled in place of each of N targets; a target without ids is among the whole vocabulary."""

    token_ids: torch.Tensor
    """Shape (M,), int64; with the target itself."""
    rows: torch.Tensor
    """Shape (M,), int64, ascending: which of the N each id belongs to."""


def selected_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    part: VocabularyPart | None = None,
    with_entropy: bool = False,
    possible: PossibleTokens | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``log softmax(hidden @ head_weight^T / temperature)[targets]``; differentiable once in ``hidden`` and ``head_weight``.

    Args:
        hidden: shape (N, H), float32 or bfloat16.
        head_weight: shape (V, H), same dtype; with ``part`` this rank's rows only.
        targets: shape (N,), int64 in [0, V).
        temperature: above 0.
        chunk_tokens: maximum number of rows of logits that exist at the same time; rows are spread evenly over the chunks. If
            chunk_tokens is at least N, nothing is recomputed.
        part: None where this rank has the whole head. Otherwise two small sums per chunk, and in backward one of the hidden states'
            gradient, go over the ranks of the group, which all must call this with equal arguments otherwise.
        possible: None for the softmax over the whole vocabulary, else over these tokens: the log-probs of top-k, top-p and min-p sampling.
        with_entropy: also return the entropy of each whole distribution, ``-sum_v p_v log p_v`` in nats.
        softcap: above 0; logits become ``softcap * tanh(logits / softcap)`` before they are divided by the temperature (Gemma 2,
            arXiv 2408.00118). None leaves them.

    Returns:
        Shape (N,), float32; equal on the ranks of a group. With entropy (2, N): log-probs, then entropies.

    Raises:
        ValueError: temperature or chunk_tokens is not positive.
    """
    if temperature <= 0.0 or chunk_tokens < 1:
        raise ValueError(f"temperature is {temperature} and chunk_tokens {chunk_tokens}; both must be above 0")
    apply = _SelectedLogprobs.apply
    num_chunks = max(1, math.ceil(targets.shape[0] / chunk_tokens))
    rows = max(1, math.ceil(targets.shape[0] / num_chunks))
    result: torch.Tensor = apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, targets, temperature, rows, part, with_entropy, possible, softcap
    )
    return result


class _SelectedLogprobs(torch.autograd.Function):
    """Keeps hidden states, the log-normalizer and the entropy (N numbers each), and the last chunk's logits; recomputes the others."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        part: VocabularyPart | None,
        with_entropy: bool,
        possible: PossibleTokens | None,
        softcap: float | None,
    ) -> torch.Tensor:
        log_normalizer = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        result = torch.empty_like(log_normalizer)
        entropy = torch.empty_like(log_normalizer) if with_entropy else None
        columns, here = _columns(targets, head_weight, part)
        bounds = _bounds(possible, hidden.shape[0], chunk_tokens)
        logits: torch.Tensor | None = None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            del logits  # before the next chunk is made
            logits = _scaled_logits(hidden[rows], head_weight, temperature, softcap)
            chosen = logits.gather(1, columns[rows, None]).squeeze(1)
            impossible = _impossible(possible, bounds, start, chunk_tokens, logits, part)
            if impossible is not None:
                logits.masked_fill_(impossible, -torch.inf)
            if here is None or part is None:
                log_normalizer[rows] = (compiled(log_normalizers) if logits.is_cuda else log_normalizers)(logits)
            else:
                chosen.mul_(here[rows])
                log_normalizer[rows] = _log_normalizer(logits, chosen, part)
            result[rows] = chosen - log_normalizer[rows]
            if entropy is not None:
                logits.sub_(log_normalizer[rows, None])
                if impossible is not None:
                    logits.masked_fill_(impossible, LEAST_LOGPROB)
                entropy[rows] = _entropy(logits, part)
        ctx.save_for_backward(hidden, head_weight, targets, log_normalizer, entropy)
        # With entropy these are log-probs already: the normalizer was subtracted in place.
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        ctx.temperature, ctx.chunk_tokens, ctx.part, ctx.possible, ctx.softcap = temperature, chunk_tokens, part, possible, softcap
        return result if entropy is None else torch.stack([result, entropy])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None, None, None, None]:
        """``d logp_t / d logits = (onehot(target) - p) / temperature`` and ``d H / d logits = -p (log p + H) / temperature``."""
        hidden, head_weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad, grad_entropy = (grad, None) if entropy is None else (grad[0], grad[1] / ctx.temperature)
        grad_hidden = torch.empty_like(hidden)
        # float32, because the head's gradient is a sum over every chunk
        grad_weight = torch.zeros(head_weight.shape, dtype=torch.float32, device=head_weight.device) if ctx.needs_input_grad[1] else None
        columns, here = _columns(targets, head_weight, ctx.part)
        bounds = _bounds(ctx.possible, hidden.shape[0], ctx.chunk_tokens)
        for start in reversed(range(0, hidden.shape[0], ctx.chunk_tokens)):
            rows = slice(start, start + ctx.chunk_tokens)
            scale = (grad[rows] / ctx.temperature).unsqueeze(1)
            kept, ctx.last_logits = ctx.last_logits, None
            logits = _scaled_logits(hidden[rows], head_weight, ctx.temperature, ctx.softcap) if kept is None else kept
            if logits.is_cuda and here is None and ctx.possible is None and grad_entropy is None and ctx.softcap is None:
                grad_logits = compiled(logit_gradients)(logits, log_normalizer[rows], columns[rows], scale, hidden.dtype)
            else:
                is_subtracted = kept is not None and entropy is not None  # forward needed the log-probs
                grad_logits = logits if is_subtracted else logits.sub_(log_normalizer[rows, None])
                slope = _cap_slope(grad_logits, log_normalizer[rows], ctx.temperature, ctx.softcap)
                impossible = _impossible(ctx.possible, bounds, start, ctx.chunk_tokens, grad_logits, ctx.part)
                if impossible is not None:
                    grad_logits.masked_fill_(impossible, LEAST_LOGPROB)
                if grad_entropy is None:
                    grad_logits.exp_().mul_(-scale)
                else:
                    towards = (grad_logits + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(scale)  # one chunk, not two
                    grad_logits.exp_().mul_(towards.neg_())
                    del towards
                grad_logits.scatter_add_(1, columns[rows, None], scale if here is None else scale * here[rows, None])
                grad_logits = (grad_logits if slope is None else grad_logits.mul_(slope)).to(hidden.dtype)
                del slope
            torch.mm(grad_logits, head_weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])
            del kept, logits, grad_logits  # before the next chunk is made
        if ctx.part is not None:
            dist.all_reduce(grad_hidden, group=ctx.part.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(head_weight.dtype), *(None,) * 7


def _columns(targets: torch.Tensor, head_weight: torch.Tensor, part: VocabularyPart | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Columns of the targets in this rank's logits, 0 for those of other ranks, and which are this rank's; None: all."""
    if part is None:
        return targets, None
    columns = targets - part.first
    here = (columns >= 0) & (columns < head_weight.shape[0])
    return columns * here, here


def _bounds(possible: PossibleTokens | None, num_rows: int, chunk_tokens: int) -> list[int]:
    """Where the ids of each chunk of rows begin, and the end; empty without any."""
    if possible is None:
        return []
    starts = torch.arange(0, num_rows + chunk_tokens, chunk_tokens, device=possible.rows.device)
    found: list[int] = torch.searchsorted(possible.rows, starts).tolist()
    return found


def _impossible(
    possible: PossibleTokens | None, bounds: list[int], start: int, chunk_tokens: int, logits: torch.Tensor, part: VocabularyPart | None
) -> torch.Tensor | None:
    """Which of a chunk's logits (C, V of this rank) are of tokens that could not be sampled, bool; None: all could be."""
    if possible is None:
        return None
    ids = slice(*bounds[start // chunk_tokens : start // chunk_tokens + 2])
    num_rows, width = logits.shape
    columns, rows = possible.token_ids[ids] - (0 if part is None else part.first), possible.rows[ids] - start
    columns = columns.where((columns >= 0) & (columns < width), width)  # those of other ranks go into a column of their own
    restricted = torch.zeros(num_rows, dtype=torch.bool, device=logits.device)
    restricted[rows] = True
    impossible = restricted[:, None].repeat(1, width + 1)
    impossible[rows, columns] = False
    return impossible[:, :width]


def _log_normalizer(logits: torch.Tensor, chosen: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """Log of the sum of exponentials over all ranks' logits (N, V of this rank); completes ``chosen`` (N,) too, in place."""
    highest = logits.amax(dim=-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=part.group)
    sums = torch.stack([(logits - highest[:, None]).exp_().sum(dim=-1), chosen])
    dist.all_reduce(sums, group=part.group)
    chosen.copy_(sums[1])
    return sums[0].log() + highest


def _entropy(logprobs: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """``-sum p log p`` (N,) of log-probs (N, V of this rank) over all ranks' columns."""
    entropy = logprobs.exp().mul_(logprobs).sum(dim=-1).neg_()  # one chunk beside the log-probs, not two
    if part is not None:
        dist.all_reduce(entropy, group=part.group)
    return entropy


def _cap_slope(logprobs: torch.Tensor, log_normalizer: torch.Tensor, temperature: float, softcap: float | None) -> torch.Tensor | None:
    """Derivative of capped logits by what they were before, ``1 - tanh^2``, from a chunk's log-probs (C, V); None without a cap."""
    if softcap is None:
        return None
    return (logprobs + log_normalizer[:, None]).mul_(temperature / softcap).square_().neg_().add_(1.0).clamp_(min=0.0)


def _scaled_logits(hidden: torch.Tensor, head_weight: torch.Tensor, temperature: float, softcap: float | None) -> torch.Tensor:
    """float32 logits of a chunk, never rounded to a shorter type; a fresh tensor the caller may overwrite.

    A logit of 20 in bfloat16 is off by up to 0.06, as much as two healthy implementations differ in a log-prob.
    """
    if hidden.dtype == torch.float32:
        logits = F.linear(hidden, head_weight)
    elif hidden.is_cuda:
        logits = torch.mm(hidden, head_weight.t(), out_dtype=torch.float32)  # as the kernel accumulates it
    else:
        logits = _float32_product(hidden, head_weight)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _float32_product(hidden: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
    """``hidden @ head_weight^T`` in float32 where no kernel does that for shorter inputs; few rows of the head are widened at a time."""
    wide = hidden.float()
    logits = torch.empty(hidden.shape[0], head_weight.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, head_weight.shape[0], WIDENED_ROWS):
        rows = slice(start, start + WIDENED_ROWS)
        logits[:, rows] = wide @ head_weight[rows].float().t()
    return logits


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, in one kernel where dtypes allow."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
