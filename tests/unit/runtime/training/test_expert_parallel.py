"""Which rank has which expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.training.parallel import Layout


def layout(ranks: int, ep: int) -> Layout:
    """Of ranks that do not exist."""
    mesh = SimpleNamespace(ndim=1, size=lambda _: ranks)
    experts = None if ep == 1 else SimpleNamespace(ndim=2, size=lambda dimension: (ranks // ep, ep)[dimension])
    return Layout(mesh=cast(Any, mesh), experts=cast(Any, experts))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_an_expert_is_where_torch_cuts_the_experts_of_a_group_and_then_their_part(groups: int, ep: int, each: int) -> None:
    """Also with more ranks than experts, of which some have none."""
    ranks, num_experts = groups * ep, each * ep
    found = {expert: layout(ranks, ep).place_of_expert(expert, num_experts) for expert in range(num_experts)}
    expected = {}
    for ep_rank, part in enumerate(torch.arange(num_experts).chunk(ep)):
        for group, own in enumerate(part.chunk(groups)):
            expected |= {int(expert): (group * ep + ep_rank, local) for local, expert in enumerate(own)}
    assert found == expected
