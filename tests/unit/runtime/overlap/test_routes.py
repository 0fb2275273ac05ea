"""Routes stay at their tokens: over parts of a response, turns of an episode, batches of ranks, and packed or padded micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.batching import BatchingConfig, score_batches, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.overlap.samples import Sample, first_tokens
from rljob_runtime.records import Completion, IntArray, Sampling, Segment
from rljob_runtime.routes import NO_ROUTE, route_dtype
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.sharing import LayerCosts
from tests.support.records import ids, make_prompt, make_segment, make_trajectory
from tests.support.routes import routed, routed_trajectory, routes_of

OWNER: Any = object()
SAMPLING = Sampling(max_tokens=8, returns_routes=True)
SHARING = LayerCosts(linear_flops=1.0, attention_flops=1e-6)
CONFIG = BatchingConfig(num_ranks=1, mini_batches=1, epochs=1, temperature=1.0)


def part(tokens: tuple[int, ...], before: IntArray, known: int, finish: str) -> Completion:
    segment = make_segment(tokens)
    return Completion(request_id="part", segment=routed(segment, before, known) if tokens else segment, finish_reason=finish)


def test_a_response_in_parts_asks_for_what_is_missing_and_has_all() -> None:
    sample = Sample(owner=OWNER, group_id=0, index=0, prompt=make_prompt(0))  # three tokens
    assert sample.request(SAMPLING, 0).num_routed_before == 0
    assert sample.take(part((), ids(1, 2, 3), 0, "abort")) is None
    assert sample.request(SAMPLING, 0).num_routed_before == 0
    assert sample.take(part((4, 5), ids(1, 2, 3), 0, "abort")) is None
    assert sample.request(SAMPLING, 0).num_routed_before == 4
    whole = sample.take(part((6, 7), ids(1, 2, 3, 4, 5), 4, "stop"))
    assert whole is not None
    assert whole.segment == replace(routed(make_segment((4, 5, 6, 7)), ids(1, 2, 3)), logprobs=whole.segment.logprobs)


def test_an_engine_that_leaves_routes_out_is_a_fault() -> None:
    for found in (make_segment((4, 5)), routed(make_segment((4, 5)), ids(1, 2, 3), 1)):
        sample = Sample(owner=OWNER, group_id=0, index=0, prompt=make_prompt(0))
        sample.request(SAMPLING, 0)
        with pytest.raises(RuntimeFault, match=r"routes of [03] tokens, and 4 are missing, which training\.routerReplay needs"):
            sample.take(Completion(request_id="part", segment=found, finish_reason="stop"))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_tokens_keep_their_routes(count: int) -> None:
    cut = first_tokens(routed(make_segment((4, 5, 6)), ids(1, 2, 3)), count)
    expected = routed(make_segment((4, 5, 6)[:count]), ids(1, 2, 3)).routes
    assert cut.routes is not None
    np.testing.assert_array_equal(cut.routes, expected)


def episode(group_id: int, index: int, sizes: list[int], prompt: tuple[int, ...]) -> Any:
    """Sampled and given segments in turn, then one more sequence."""
    segments: list[Segment] = []
    for number, size in enumerate(sizes):
        tokens = tuple(5 + (number + index * place) % 3 for place in range(size))
        segments.append(make_segment(tokens) if number % 2 == 0 else Segment(token_ids=ids(*tokens), sampled=False))
    segments += [Segment(token_ids=ids(9, 8), sampled=False, is_prompt=True), make_segment((7, 6))]
    plain = make_trajectory(group_id, index, float(index % 2), prompt_tokens=prompt)
    return routed_trajectory(replace(plain, segments=tuple(segments)))


@st.composite
def groups_of(draw: st.DrawFn) -> list[Group]:
    groups = []
    for group_id in range(draw(st.integers(1, 3))):
        prompt = tuple(range(1, 2 + draw(st.integers(0, 4))))
        sizes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3))
        members = tuple(episode(group_id, index, each, prompt) for index, each in enumerate(sizes))
        groups.append(Group(group_id=group_id, trajectories=members, failed_samples=0))
    return groups


@settings(deadline=None, derandomize=True, max_examples=60)
@given(groups_of(), st.integers(1, 3), st.integers(4, 40), st.sampled_from([SHARING, None]))
def test_every_computed_token_before_a_trained_one_has_its_own_route(groups: list[Group], ranks: int, budget: int, costs: Any) -> None:
    step, config = arrange(groups, 0), replace(CONFIG, num_ranks=ranks)
    outcome = Rule(RuleConfig(max_response_tokens=99)).apply(step)
    batches = [batch for rank in train_batches(step, split(step, config), outcome, config).by_rank for batch in rank]
    found = [(b.token_ids, b.lengths, b.response_mask, b.routes) for b in batches]
    found += [(b.token_ids, b.lengths, b.wanted, b.routes) for b in score_batches(step, ranks, config, with_routes=True)]
    for token_ids, lengths, wanted, routes in found:
        for micro in make_micro_batches(token_ids, lengths, wanted, budget, costs, None, routes):
            assert micro.routes is not None
            width = micro.input_ids.shape[1]
            places = np.tile(np.arange(width), len(micro.input_ids)) if micro.packed is None else micro.packed.position_ids.reshape(-1)
            expected = routes_of(micro.input_ids.reshape(-1), places)
            routed_here = (micro.routes != NO_ROUTE).all(axis=(1, 2))
            np.testing.assert_array_equal(micro.routes[routed_here], expected[routed_here])
            last = np.zeros(micro.input_ids.size, dtype=np.bool_)
            last[micro.positions] = True
            assert routed_here[last].all()  # what predicts a trained token was computed by the engine too
    assert all(b.routes is None for b in score_batches(step, ranks, config))


def test_tokens_without_a_route_are_marked() -> None:
    plain = make_trajectory(0, 0)
    other = replace(plain, sample_index=1, segments=(routed(plain.segments[0], plain.prompt.token_ids),))
    step = arrange([Group(group_id=0, trajectories=(plain, other), failed_samples=0)], 0)
    assert step.routes is not None
    marked = (step.routes == NO_ROUTE).all(axis=(1, 2)).tolist()
    assert marked == [True] * 5 + [False] * 4 + [True]  # none of the first sample, all but the last token of the second
    assert arrange([Group(group_id=0, trajectories=(plain,), failed_samples=0)], 0).routes is None


def test_routes_of_more_tokens_than_there_are_are_refused() -> None:
    plain = make_trajectory(0, 0)
    long = replace(plain, segments=(replace(plain.segments[0], routes=np.zeros((5, 2, 2), dtype=np.int8)),))
    with pytest.raises(ValueError, match=r"routes of shape \(5, 2, 2\) for the tokens before the last of 5"):
        arrange([Group(group_id=0, trajectories=(long,), failed_samples=0)], 0)


def test_routes_are_as_small_as_the_number_of_experts_allows() -> None:
    assert [route_dtype(count) for count in (8, 128, 129, 512)] == [np.int8, np.int8, np.int16, np.int16]
