"""Episodes of sampled and given segments as flat arrays, against a reference that writes token after token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.loop.step_metrics import group_metrics
from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.batching import BatchingConfig, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.records import Segment, VersionSpan
from tests.support.records import ids, make_group, make_segment, make_trajectory

VERSION = 5
tokens = st.lists(st.integers(0, 50), max_size=6)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    row = draw(tokens)
    if not draw(st.booleans()):
        return Segment(token_ids=ids(*row), sampled=False)
    versions = sorted(draw(st.lists(st.integers(0, VERSION), min_size=len(row), max_size=len(row))))
    logprobs = draw(st.lists(st.floats(-9.0, -0.125, width=32), min_size=len(row), max_size=len(row)))
    return make_segment(row, logprobs=logprobs, versions=versions)


@st.composite
def episodes(draw: st.DrawFn) -> list[Group]:
    groups = []
    for group_id in range(draw(st.integers(1, 3))):
        members = []
        for index in range(draw(st.integers(1, 3))):
            plain = make_trajectory(group_id, index, float(index), prompt_tokens=tuple(draw(st.lists(st.integers(0, 50), min_size=1))))
            found = (make_segment([9], version=VERSION), *draw(st.lists(segments(), max_size=4)))
            members.append(replace(plain, segments=found))
        groups.append(Group(group_id=group_id, trajectories=tuple(members), failed_samples=0))
    return groups


@settings(max_examples=80, deadline=None)
@given(groups=episodes(), ranks=st.integers(1, 3))
def test_holes_are_where_tokens_were_given(groups: list[Group], ranks: int) -> None:
    step = arrange(groups, VERSION)
    rows = []  # (token, mask, log-prob, age) of every token
    for trajectory in step.trajectories:
        rows += [(token, 0.0, 0.0, 0) for token in trajectory.prompt.token_ids.tolist()]
        for segment in trajectory.segments:
            ages = [VERSION - span.version for span in segment.version_spans for _ in range(span.start, span.end)]
            for place, token in enumerate(segment.token_ids.tolist()):
                rows.append((token, 1.0, segment.logprobs[place], ages[place]) if segment.sampled else (token, 0.0, 0.0, 0))
    arrays = (step.token_ids, step.response_mask, step.behavior_logprobs, step.staleness)
    for array, expected in zip(arrays, zip(*rows, strict=True), strict=True):
        np.testing.assert_array_equal(array, np.array(expected, dtype=array.dtype))
    assert step.lengths.tolist() == [t.prompt.token_ids.size + sum(map(len, t.segments)) for t in step.trajectories]
    assert step.response_lengths.tolist() == [sum(len(s) for s in t.segments if s.sampled) for t in step.trajectories]
    outcome = Rule(RuleConfig(max_response_tokens=60)).apply(step)
    np.testing.assert_array_equal(outcome.trained, step.response_mask)
    assert not outcome.advantages[step.response_mask == 0].any()
    config = BatchingConfig(num_ranks=ranks, mini_batches=1, epochs=1, temperature=1.0)
    shares = split(step, config)
    for share, (batch,) in zip(shares[0], train_batches(step, shares, outcome, config).by_rank, strict=True):
        places = step.places(share)
        np.testing.assert_array_equal(batch.token_ids, step.token_ids[places])
        np.testing.assert_array_equal(batch.response_mask, step.response_mask[places])
        np.testing.assert_array_equal(batch.behavior_logprobs, step.behavior_logprobs[places])


@settings(max_examples=80, deadline=None)
@given(groups=episodes())
def test_metrics_count_sampled_tokens_alone_and_sum_one_after_another(groups: list[Group]) -> None:
    """Sums are those of Python floats, to the last bit: metrics did not change when log-probs became arrays."""
    metrics = group_metrics(groups, trainer_version=VERSION)
    samples = [t for g in groups for t in g.trajectories]
    sampled = [[s for s in t.segments if s.sampled] for t in samples]
    count = sum(len(s) for found in sampled for s in found)
    total = 0.0
    for segment in (s for found in sampled for s in found):
        one = 0.0
        for value in segment.logprobs.tolist():
            one += value
        total += one
    assert metrics["rollout/tokens"] == count
    assert metrics["rollout/logprob_mean"] == total / count
    assert metrics["response/max_tokens"] == max(sum(map(len, found)) for found in sampled)


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((1, 2),), ((0, 1), (0, 2)), ((0, 3),)])
def test_versions_of_other_tokens_than_the_segments_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    (one, other) = make_group(0).trajectories
    wrong = tuple(VersionSpan(start=start, end=end, version=0) for start, end in spans)
    broken = replace(other, segments=(replace(other.segments[0], version_spans=wrong),))
    group = Group(group_id=0, trajectories=(one, broken), failed_samples=0)
    with pytest.raises(ValueError, match="sample 0/1: a segment of 2 tokens has versions for other ones"):
        arrange([group], VERSION)
