"""Moments in bfloat16 against torch's AdamW in float32, and against rounding to the nearest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rljob_runtime.training import bfloat16_adamw
from rljob_runtime.training.bfloat16_adamw import MOMENTS, BFloat16AdamW

SHAPES = ((40, 3), (7,), (1,), (25, 2))
"""Matrices, which are decayed, and vectors."""
BETAS, EPS = (0.9, 0.999), 1e-8
Make = Callable[[list[torch.nn.Parameter]], torch.optim.AdamW]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(tensors: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [p for p in tensors if p.ndim == 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in tensors if p.ndim < 2], "weight_decay": 0.0}]


def half(tensors: list[torch.nn.Parameter], seed: int = 0, kind: type[BFloat16AdamW] = BFloat16AdamW) -> BFloat16AdamW:
    return kind(groups(tensors), betas=BETAS, eps=EPS, seed=seed)


def full(tensors: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(tensors), lr=0.0, betas=BETAS, eps=EPS, fused=True)


class ToNearest(BFloat16AdamW):
    """Half of what is dropped is always added."""

    def rounding_noise(self, width: int, device: torch.device) -> torch.Tensor:
        return torch.full((2, width), 1 << 15, dtype=torch.int32)


def to_nearest(tensors: list[torch.nn.Parameter]) -> BFloat16AdamW:
    return half(tensors, kind=ToNearest)


def update(optimizer: torch.optim.AdamW, number: int, rate: float = 0.01) -> None:
    """One update by gradients that depend on its number alone."""
    generator = torch.Generator().manual_seed(100 + number)
    for group in optimizer.param_groups:
        group["lr"] = rate
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def moments(optimizer: torch.optim.AdamW, *names: str) -> list[torch.Tensor]:
    return [optimizer.state[p][name] for group in optimizer.param_groups for p in group["params"] for name in names or MOMENTS]


def everything(optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    """Copies of parameters and states."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return [t.detach().clone() for t in (*tensors, *(state for p in tensors for state in optimizer.state[p].values()))]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("stretch", [2**17, 16], ids=["whole parameters", "parts of them"])
def test_an_update_is_torchs_and_its_moments_are_a_neighbor(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update starts from zeros in both, so that parameters are equal to the bit."""
    monkeypatch.setattr(bfloat16_adamw, "STRETCH_NUMBERS", {"cpu": stretch})
    ours, theirs = parameters(), parameters()
    optimizer, reference = half(ours), full(theirs)
    update(optimizer, 0)
    update(reference, 0)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    kept, exact = (torch.cat([m.view(-1) for m in moments(one, "exp_avg")]) for one in (optimizer, reference))
    assert torch.equal(kept, exact.bfloat16()), "the nearest does no harm to what moves by a tenth"
    kept, exact = (torch.cat([m.view(-1) for m in moments(one, "exp_avg_sq")]) for one in (optimizer, reference))
    below = (exact.view(torch.int32) & -65536).view(torch.float32)
    above = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((kept == below) | (kept == above)).all()
    assert 0.1 < (kept != exact.bfloat16()).float().mean() < 0.4, "a quarter is rounded to the neighbor that is not the nearest"


def test_moments_are_right_in_the_mean_where_the_nearest_never_moves() -> None:
    """A squared gradient that is gone decays by 0.999 an update."""
    found = {}
    for name, make in (("stochastic", half), ("nearest", to_nearest), ("float32", full)):
        tensor = torch.nn.Parameter(torch.zeros(4096))
        optimizer = make([tensor])
        for gradient in (1.0, *[0.0] * 1000):
            tensor.grad = torch.full_like(tensor, gradient)
            optimizer.step()
        found[name] = optimizer.state[tensor]["exp_avg_sq"].float().mean().item()
    assert found["float32"] == pytest.approx(1e-3 * 0.999**1000, rel=1e-3)
    assert found["stochastic"] == pytest.approx(found["float32"], rel=0.02)
    assert found["nearest"] == pytest.approx(1e-3, rel=0.01), "stays where the first update put it"


def noisy_quadratic(make: Make) -> float:
    """Loss after gradients that were large and got small, which exp_avg_sq has to follow; curvatures from 0.1 to 10."""
    generator = torch.Generator().manual_seed(3)
    curvature = torch.logspace(-1, 1, 512)
    position = torch.nn.Parameter(torch.full((512,), 5.0))
    optimizer = make([position])
    for number in range(3000):
        noise = torch.randn(512, generator=generator) * (3.0 if number < 500 else 0.03)
        position.grad = curvature * position.detach() + noise
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
        optimizer.step()
    return float((0.5 * curvature * position.detach().square()).mean())


def test_a_noisy_quadratic_is_learned_as_in_float32_and_not_with_rounding_to_the_nearest() -> None:
    exact, stochastic, nearest = (noisy_quadratic(make) for make in (full, half, to_nearest))
    assert stochastic == pytest.approx(exact, rel=0.1)
    assert nearest > 2 * exact


def test_a_run_that_resumes_goes_on_bit_by_bit() -> None:
    tensors = parameters()
    optimizer = half(tensors)
    for number in range(3):
        update(optimizer, number)
    resumed = half([torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 5):
        update(optimizer, number)
        update(resumed, number)
    assert are_equal(everything(optimizer), everything(resumed))
    other = half(parameters(), seed=1)
    for number in range(5):
        update(other, number)
    assert not are_equal(moments(other), moments(optimizer)), "the seed decides how it is rounded"


def test_states_of_the_other_type_are_taken_over() -> None:
    exact = full(parameters())
    update(exact, 0)
    optimizer = half(parameters())
    optimizer.load_state_dict(exact.state_dict())
    assert all(torch.equal(ours, theirs.bfloat16()) for ours, theirs in zip(moments(optimizer), moments(exact), strict=True))
    update(optimizer, 1)
    exact.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(ours.float(), theirs) for ours, theirs in zip(moments(optimizer), moments(exact), strict=True))
    assert {float(state["step"]) for state in exact.state.values()} == {2.0}


def test_only_what_has_a_gradient_is_updated() -> None:
    optimizer = half(parameters())
    update(optimizer, 0)
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    before = everything(optimizer)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert are_equal(everything(optimizer), before)
    tensors[1].grad = torch.ones_like(tensors[1])
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in tensors] == [1.0, 2.0, 1.0, 1.0]


def test_moments_take_half_the_memory() -> None:
    ours, theirs = half(parameters()), full(parameters())
    update(theirs, 0)
    assert 2 * sum(t.nbytes for t in moments(ours)) == sum(t.nbytes for t in moments(theirs))
