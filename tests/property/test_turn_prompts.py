"""Episodes whose turns are prompts of their own: each action a sequence behind its own prompt, with the credit that it has in any case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.vocabulary import AdvantageEstimator, KLPlacement
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.batching import BatchingConfig, gather_scores, score_batches, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.records import EpisodeRecord, Segment, Trajectory, Turn
from tests.support.records import ids, make_segment, make_trajectory

GIVEN = 1000
VERSION = 2
repeatable = settings(deadline=None, derandomize=True, max_examples=60)


@st.composite
def groups_of(draw: st.DrawFn) -> list[Group]:
    """Every given token is unique, and so is every sampled one."""
    groups = []
    for group_id in range(draw(st.integers(1, 3))):
        members = []
        for index in range(draw(st.integers(1, 3))):
            sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
            members.append(episode(group_id, index, sizes, own_prompts=draw(st.booleans())))
        groups.append(Group(group_id=group_id, trajectories=tuple(members), failed_samples=0))
    return groups


def episode(group: int, index: int, sizes: list[tuple[int, int]], *, own_prompts: bool) -> Trajectory:
    """Of each turn the tokens given before and sampled."""
    segments, turns = [], []
    for number, (before, sampled) in enumerate(sizes):
        first = 100 * group + 30 * index + 10 * number
        reward = (first % 7) / 4
        segments += [
            Segment(token_ids=ids(*range(GIVEN + first, GIVEN + first + before)), sampled=False, is_prompt=own_prompts),
            replace(make_segment(range(first, first + sampled), version=number % 2), reward=reward),
        ]
        turns.append(Turn(observation="", action="", reward=reward, action_valid=True, state_key=str(number)))
    one = make_trajectory(group, index, sum(turn.reward for turn in turns))
    record = EpisodeRecord(turns=tuple(turns), stop="done", summary={}, environment_s=0.0)
    prompt = replace(one.prompt, token_ids=segments[0].token_ids)
    return replace(one, prompt=prompt, segments=tuple(segments[1:]), episode=record)


def expected(groups: list[Group]) -> list[tuple[int, ...]]:
    """The tokens of each sequence, by definition."""
    found = []
    for trajectory in (t for g in groups for t in g.trajectories):
        row = tuple(trajectory.prompt.token_ids.tolist())
        for segment in trajectory.segments:
            new = tuple(segment.token_ids.tolist())
            if segment.is_prompt:
                found.append(row)
            row = new if segment.is_prompt else row + new
        found.append(row)
    return found


def rows(token_ids: np.ndarray, lengths: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(part.tolist()) for part in np.split(token_ids, np.cumsum(lengths)[:-1])] if lengths.size else []


@repeatable
@given(groups=groups_of(), ranks=st.integers(1, 3), mini=st.integers(1, 2))
def test_each_action_is_trained_once_behind_its_own_prompt(groups: list[Group], ranks: int, mini: int) -> None:
    step = arrange(groups, VERSION)
    assert rows(step.token_ids, step.lengths) == expected(groups)
    np.testing.assert_array_equal(step.response_mask, step.token_ids < GIVEN)
    config = BatchingConfig(num_ranks=ranks, mini_batches=mini, epochs=1, temperature=1.0, include_scores=True)
    outcome = Rule(RuleConfig(max_response_tokens=60, weight_by_length=True)).apply(step)
    batches = train_batches(step, split(step, config), outcome, config).by_rank
    every = [batch for share in batches for batch in share]
    assert Counter(row for b in every for row in rows(b.token_ids, b.lengths)) == Counter(expected(groups))
    score_of = {token: t.reward.score for g in groups for t in g.trajectories for s in t.segments if s.sampled for token in s.token_ids}
    for batch in every:
        assert batch.scores is not None
        assert batch.sample_weights is not None
        assert [np.float32(score_of[row[-1]] or 0.0) for row in rows(batch.token_ids, batch.lengths)] == batch.scores.tolist()
        assert batch.sample_weights.shape == batch.lengths.shape
    for updates in zip(*batches, strict=True):
        assert {batch.global_sequences for batch in updates} == {sum(batch.lengths.size for batch in updates)}
    shares = score_batches(step, ranks, config)
    answers = [batch.token_ids.astype(np.float32) for batch in shares]
    np.testing.assert_array_equal(gather_scores(step, shares, answers), step.token_ids)


@repeatable
@given(
    groups=groups_of(),
    estimator=st.sampled_from([each for each in AdvantageEstimator if each is not AdvantageEstimator.CUSTOM]),
    penalized=st.booleans(),
    dropped=st.booleans(),
)
def test_credit_does_not_depend_on_what_turns_are_shown(
    groups: list[Group], estimator: AdvantageEstimator, penalized: bool, dropped: bool
) -> None:
    kept = [replace(g, trajectories=tuple(as_one(t) for t in g.trajectories)) for g in groups]
    config = RuleConfig(
        max_response_tokens=60,
        estimator=estimator,
        gamma=0.9,
        kl_coefficient=0.1 if penalized else 0.0,
        kl_placement=KLPlacement.REWARD,
        max_group_mean=0.8 if dropped else None,
    )
    found = []
    for step in (arrange(groups, VERSION), arrange(kept, VERSION)):
        outcome = Rule(config).apply(scored(step))
        sampled = step.response_mask > 0
        found.append((outcome.advantages[sampled].tolist(), outcome.trained[sampled].tolist(), outcome.metrics))
    assert found[0] == found[1]


def as_one(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, segments=tuple(replace(segment, is_prompt=False) for segment in trajectory.segments))


def scored(step: StepSamples) -> StepSamples:
    """With forward passes that are functions of the token."""
    return replace(step, reference_logprobs=np.sin(step.token_ids) - 1.5, values=np.cos(step.token_ids))
