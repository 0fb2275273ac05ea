"""Muon in float32: the update of torch's, which computes in bfloat16."""

import copy

import pytest
import torch

from rljob_runtime.tiny.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_singular_values_come_near_1_and_the_vectors_stay(shape: tuple[int, int]) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(given, full_matrices=False)
    found = u.T @ orthogonalized(given) @ vh.T
    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-4)
    assert 0.5 < found.diagonal().min() <= found.diagonal().max() < 1.3


def test_steps_are_those_of_torch_but_for_the_rounding() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Linear(24, 40, bias=False)
    theirs = copy.deepcopy(ours)
    start = ours.weight.detach().clone()
    optimizers = [
        Muon(ours.parameters(), lr=0.1, weight_decay=0.5),
        torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(4):
        gradient = torch.randn(40, 24, generator=torch.Generator().manual_seed(step))
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    moved, difference = (ours.weight - start).norm(), (ours.weight - theirs.weight).norm()
    assert difference < 0.02 * moved
