"""AdamW that keeps its two moments in bfloat16: half the memory, with the arithmetic of torch's own fused kernel in float32.

torch.optim.AdamW has moments in the type of the parameters, here float32 masters. torchao's low-bit optimizers compute as is done below,
by kernels that torch.compile makes on each node with a compiler that has to be there; here no code is generated::

    a stretch of all moments:  bfloat16 ── copy ──> float32 ── fused AdamW ──> float32 ── stochastic rounding ──> bfloat16

Rounding to the nearest would be wrong for ``exp_avg_sq``. With ``beta2`` 0.999 an update moves it by a thousandth of its distance from the
squared gradient, and numbers of bfloat16 are 1/256 to 1/128 apart: it would never fall again, whatever the gradients are, and rise only
for those several times as large. Stochastic rounding (Gupta et al., arXiv 1502.02551) takes the upper neighbor as often as the number is
near it, so that moments are right in the mean. What is left is noise of 4 % of an ``exp_avg_sq`` (standard deviation, with normal
gradients), which is 2 % of an update.

The noise is sampled from (seed, number of the update), the same on every rank: parameters that several tensor-parallel ranks hold as a
whole stay equal on these, and a run that resumes goes on bit by bit. Within an update all stretches share it; an element only needs noise
that is independent from update to update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rljob_runtime.training.parallel import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""As torch.optim.AdamW names them in its state."""
STRETCH_NUMBERS: Mapping[str, int] = {"cpu": 2**17, "cuda": 2**23}
"""Parameters that are stepped at one time, by type of device: what caches hold, and what a kernel's launch is worth."""
NEAREST_UP_TO = 0.95
"""Decay up to which a moment is rounded to the nearest: an update then moves it by several of bfloat16's numbers."""
_DROPPED_BITS = 16
"""Low bits of a float32 that a bfloat16 lacks."""


class BFloat16AdamW(torch.optim.AdamW):
    """torch.optim.AdamW of float32 parameters with moments in bfloat16, all of them allocated at once."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float, seed: int) -> None:
        """Take memory for the moments; the learning rate is 0 until somebody sets it.

        Args:
            groups: ``params`` and ``weight_decay`` of each group, as torch has them; parameters may be DTensors.
            betas: decays of the moments.
            eps: added to the root of ``exp_avg_sq``.
            seed: of the rounding; equal on all ranks.
        """
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self._seed = seed
        self._updates = 0
        for parameter in self._parameters():
            moments = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure``, for torch's callers, is never given."""
        stepped = [p for p in self._parameters() if p.grad is not None]
        if not stepped:
            return
        self._updates += 1
        torch._foreach_add_([self.state[p]["step"] for p in stepped], 1)
        device = stepped[0].device
        width = min(STRETCH_NUMBERS[device.type], max(local_tensor(p).numel() for p in stepped))
        floats = torch.empty((len(MOMENTS), width), dtype=torch.float32, device=device)
        noise = self.rounding_noise(width, device)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and local_tensor(parameter).numel():
                    self._update(parameter, floats, noise, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would turn the moments into the parameters' type; those given may have any."""
        given = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {index: {"step": state["step"]} for index, state in given.items()}})
        indexes = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indexes, self._parameters(), strict=True):
            for name in MOMENTS:
                self.state[parameter][name] = given[index][name].to(device=parameter.device, dtype=torch.bfloat16)
        self._updates = int(torch.stack([self.state[p]["step"] for p in self._parameters()]).max())

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def rounding_noise(self, width: int, device: torch.device) -> torch.Tensor:
        """What this update adds to the bits that rounding drops: int32 of shape (2, width), uniform; a row for each moment."""
        (seed,) = np.random.SeedSequence((self._seed, self._updates)).generate_state(1)
        generator = torch.Generator(device).manual_seed(int(seed))
        return torch.randint(1 << _DROPPED_BITS, (len(MOMENTS), width), generator=generator, dtype=torch.int32, device=device)

    def _update(self, parameter: torch.nn.Parameter, floats: torch.Tensor, noise: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Step one parameter, stretch by stretch.

        Args:
            parameter: with a gradient.
            floats: float32 of shape (2, width), overwritten: the moments while they are computed with.
            noise: int32 of that shape.
            group: settings of torch's optimizer.
        """
        state, width = self.state[parameter], floats.shape[1]
        settings: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        settings |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        tensors = (parameter, parameter.grad, *(state[name] for name in MOMENTS))
        kept = torch.tensor(-1 << _DROPPED_BITS, dtype=torch.int32)  # once: made of a number in each call it takes longer than the rest
        for own, gradient, *moments in zip(*(local_tensor(tensor).view(-1).split(width) for tensor in tensors), strict=True):
            if own.numel() < width:  # the last one
                floats, noise = floats[:, : own.numel()], noise[:, : own.numel()]
            copies, added = floats.unbind(), noise.unbind()
            torch._foreach_copy_(copies, moments)
            torch._fused_adamw_([own], [gradient], [copies[0]], [copies[1]], [], [state["step"]], **settings)
            for copy, bits, decay in zip(copies, added, group["betas"], strict=True):
                if decay > NEAREST_UP_TO:
                    copy.view(torch.int32).add_(bits).bitwise_and_(kept)
            torch._foreach_copy_(moments, copies)
