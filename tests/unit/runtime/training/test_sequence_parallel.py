"""What a rank makes of the tokens that it gathers from the others of its tensor-parallel group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rljob_runtime.training.sequence_parallel import DividedTokens


@pytest.mark.parametrize(("rows", "tokens", "width", "copies"), [(1, 3, 6, False), (1, 3, 5, True), (2, 3, 6, True), (2, 1, 2, True)])
def test_gathered_tokens_are_in_order_and_no_view(
    rows: int, tokens: int, width: int, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = torch.arange(2.0 * rows * tokens * 4).view(2, rows, tokens, 4)
    arrived: list[int] = []

    def gather(out: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        out.copy_(parts.view(-1))
        arrived.append(out.data_ptr())

    monkeypatch.setattr(dist, "all_gather_single", gather)
    divided = DividedTokens(cast(Any, SimpleNamespace(size=lambda: 2)))
    divided._width = width
    whole = divided.gather(parts[0])
    assert torch.equal(whole, torch.cat(list(parts), dim=1)[:, :width])
    assert whole._base is None
    assert (whole.data_ptr() != arrived[0]) is copies
