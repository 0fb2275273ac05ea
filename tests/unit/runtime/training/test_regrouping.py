"""Which output channels of a fused projection go to which tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_runtime.training.tensor_layers import Regrouping

NO_GROUP: Any = None


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(8, 8), (16, 4, 4)], ids=["gate and up", "queries, keys, and values"])
def test_every_rank_gets_its_part_of_each_projection(sizes: tuple[int, ...], tp_size: int) -> None:
    share = sum(sizes) // tp_size
    plans = [Regrouping.of(sizes, rank, tp_size, NO_GROUP, "cpu") for rank in range(tp_size)]
    for rank, plan in enumerate(plans):
        received: list[int] = []
        for other, sender in enumerate(plans):
            begin = sum(sender.sent[:rank])
            sent = sender.order[begin : begin + sender.sent[rank]]
            assert len(sent) == plan.received[other]
            received += (sent + other * share).tolist()
        wanted: list[int] = []
        for index, size in enumerate(sizes):
            first = sum(sizes[:index])
            wanted += range(first + rank * size // tp_size, first + (rank + 1) * size // tp_size)
        assert received == wanted
