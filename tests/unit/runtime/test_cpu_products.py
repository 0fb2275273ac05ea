"""Products of 16-bit numbers in float32: the rounded exact numbers, gradients too, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from rljob_runtime.cpu_products import register


@pytest.fixture
def widened() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        register(library)
        yield


HALVES = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_the_exact_ones_rounded_once(widened: None, dtype: torch.dtype, rows: int) -> None:
    left, right, start = random(rows, 64, dtype=dtype), random(64, 9, dtype=dtype), random(9, dtype=dtype)
    found = (left @ right, torch.addmm(start, left, right, beta=0.5, alpha=2), torch.bmm(left[None], right[None]))
    exact = left.double() @ right.double()
    for product, expected in zip(found, (exact, 0.5 * start.double() + 2 * exact, exact[None]), strict=True):
        # float32 in between moves a number to its neighbor only where it lies in the middle of two
        torch.testing.assert_close(product, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
        assert rows == 0 or (product == expected.to(dtype)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_a_layer_are_computed_so_too(widened: None, dtype: torch.dtype) -> None:
    layer = [random(*shape, dtype=dtype).requires_grad_() for shape in ((3, 7, 64), (9, 64), (9,))]
    weights = random(3, 7, 9, dtype=dtype)
    (linear(*layer) * weights).sum().backward()  # type: ignore[no-untyped-call]
    hidden, weight, _ = (tensor.detach().double() for tensor in layer)
    exact = (weights.double() @ weight, torch.einsum("bto,bti->oi", weights.double(), hidden))
    for tensor, expected in zip(layer, exact, strict=False):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_products_of_other_types_have_the_same_bits(dtype: torch.dtype) -> None:
    left, right, start = random(5, 64, dtype=dtype), random(64, 9, dtype=dtype), random(9, dtype=dtype)

    def products() -> list[torch.Tensor]:
        found = [left @ right, torch.addmm(start, left, right, beta=2, alpha=3), torch.bmm(left[None], right[None])]
        if dtype.is_floating_point:
            leaves = [tensor.clone().requires_grad_() for tensor in (left, right, start)]
            found += torch.autograd.grad(torch.addmm(leaves[2], *leaves[:2]).square().sum(), leaves)
        return found

    before = products()
    with torch.library._scoped_library("aten", "IMPL") as library:
        register(library)
        after = products()
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
