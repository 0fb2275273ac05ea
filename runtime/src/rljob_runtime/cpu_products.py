"""Matrix products of 16-bit numbers on a CPU without instructions for them: computed in float32 and rounded once.

oneDNN's kernels for bfloat16 need AVX-512. With AVX2 alone torch computes such products in portable loops, which take many times as long as
those of float32 (``python -m bench.cpu_products``). The product of two 16-bit numbers is exact in float32, and sums of them
are rounded once, as by the kernels of processors that have the instructions.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.library import Library

HALVES = (torch.bfloat16, torch.float16)


def lacks_half_products() -> bool:
    """Whether torch has only portable loops for this CPU.

    oneDNN says so of bfloat16. Nothing else is asked for float16: with AVX-512 it is computed as torch does.
    """
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def widen_products() -> Library:
    """Compute all such products of this process in float32, from now on."""
    library = Library("aten", "IMPL")
    register(library)
    return library


def register(library: Library) -> None:
    """Put them in the place of torch's for the CPU, as long as the library exists.

    Products of other types are left to torch's kernels, through the overloads that write into a given tensor.
    """
    for name, product in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm)):
        library.impl(name, product, "CPU")


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype in HALVES:
        return torch.mm(left.float(), right.float()).to(left.dtype)
    return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def _addmm(start: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: complex = 1, alpha: complex = 1) -> torch.Tensor:
    if left.dtype in HALVES:
        return torch.addmm(start.float(), left.float(), right.float(), beta=beta, alpha=alpha).to(left.dtype)
    return torch.addmm(start, left, right, beta=beta, alpha=alpha, out=left.new_empty(left.shape[0], right.shape[1]))


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype in HALVES:
        return torch.bmm(left.float(), right.float()).to(left.dtype)
    return torch.bmm(left, right, out=left.new_empty(left.shape[0], left.shape[1], right.shape[2]))
