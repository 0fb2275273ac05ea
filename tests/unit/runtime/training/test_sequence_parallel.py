"""What a block of layers returns whose tokens the ranks of a tensor-parallel group divide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rljob_runtime.training.sequence_parallel import DividedTokens


class Doubled(nn.Module):
    """Stands for the layers."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


@pytest.mark.parametrize(("rows", "width", "copies"), [(1, 6, False), (1, 5, True), (2, 6, True), (2, 2, True)])
def test_gathered_tokens_are_in_order_and_no_view(rows: int, width: int, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(4.0 * rows * width).view(rows, width, 4)
    arrived: list[int] = []

    def gather(out: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        parts = torch.stack(F.pad(whole, (0, 0, 0, width % 2)).chunk(2, dim=1))
        assert torch.equal(own, 2 * parts[0].flatten())
        out.copy_(2 * parts.flatten())
        arrived.append(out.data_ptr())

    monkeypatch.setattr(dist, "all_gather_single", gather)
    layers = Doubled()
    DividedTokens(cast(Any, SimpleNamespace(size=lambda: 2, rank=lambda: 0))).attach(layers, layers)
    found = layers(whole)
    assert torch.equal(found, 2 * whole)
    assert found._base is None
    assert (found.data_ptr() != arrived[0]) is copies
