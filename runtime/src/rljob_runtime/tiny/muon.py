"""Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) in float32.

``torch.optim.Muon`` orthogonalizes in bfloat16, which processors without bfloat16 instructions emulate: two thirds of the
processor time of a warm start on one with AVX2 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration; they maximize the slope at zero."""
_ITERATIONS = 5
_EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose matrices, or stacks of them, are made nearly orthogonal, with decoupled weight decay.

    A step is scaled by ``0.2 * sqrt(max(shape))``, so that one learning rate suits AdamW too (Liu et al. 2025, "Muon is scalable
    for LLM training").
    """

    def __init__(self, matrices: Iterable[torch.Tensor], *, lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # the base has overloads
        """Apply the gradients; returns what ``closure`` does."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(average, group["momentum"])
                update = orthogonalized(ahead) if ahead.ndim == 2 else torch.stack([orthogonalized(expert) for expert in ahead])
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape[-2:]) ** 0.5)
        return loss


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return (R, C) ``matrix`` with singular values near 1 (0.7 to 1.2) and the singular vectors that it had."""
    a, b, c = _COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=_EPSILON)  # the spectral norm is at most 1
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
