"""Advantages of turns through the rule: against a few lines of numpy for any episodes, and the numbers that ROLL computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.vocabulary import AdvantageEstimator, EpisodeCount, KLEstimator, KLPlacement, NormScope
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.records import EpisodeRecord, Segment, Trajectory, Turn
from tests.support.records import ids, make_segment, make_trajectory

Played = list[tuple[str, float]]
"""State and reward of each action of an episode."""
Doubles = npt.NDArray[np.float64]
GIGPO, STEP_REINFORCE = AdvantageEstimator.GIGPO, AdvantageEstimator.STEP_REINFORCE
GAMMA = 0.95


def episode(group: int, index: int, played: Played, score: float | None = None) -> Trajectory:
    """Actions of one, two, .. tokens, an observation of two between them."""
    total = sum(reward for _, reward in played)
    segments: list[Segment] = []
    for size, (_, reward) in enumerate(played, start=1):
        segments += [replace(make_segment(range(7, 7 + size)), reward=reward), Segment(token_ids=ids(5, 6), sampled=False)]
    turns = tuple(Turn(observation="", action="", reward=reward, action_valid=True, state_key=state) for state, reward in played)
    record = EpisodeRecord(turns=turns, stop="done", summary={}, environment_s=0.0)
    return replace(make_trajectory(group, index, total if score is None else score), segments=tuple(segments[:-1]), episode=record)


def step_of(groups: list[list[Played]]) -> StepSamples:
    made = [
        Group(group_id=g, trajectories=tuple(episode(g, i, played) for i, played in enumerate(members)), failed_samples=0)
        for g, members in enumerate(groups)
    ]
    return arrange(made, version=0)


def by_turn(step: StepSamples, **options: object) -> list[float]:
    """The advantage of each turn, which all its tokens share."""
    outcome = Rule(RuleConfig(**{"max_response_tokens": 64, "gamma": GAMMA, **options})).apply(step)  # type: ignore[arg-type]
    sampled = outcome.advantages[step.response_mask > 0]
    sizes = [len(segment) for t in step.trajectories for segment in t.segments if segment.sampled]
    parts = np.split(sampled, np.cumsum(sizes)[:-1])
    assert all(np.ptp(part) == 0 for part in parts)
    return [float(part[0]) for part in parts]


def normalized(values: Doubles, keys: list[object], *, std: bool = True) -> Doubles:
    """ROLL's: a value that stands alone, or among equal ones, is 0."""
    result = np.zeros_like(values)
    for i, key in enumerate(keys):
        same = values[[k == key for k in keys]]
        if not std:
            result[i] = values[i] - same.mean()
        elif same.size > 1 and same.std(ddof=1) > 1e-6:
            result[i] = (values[i] - same.mean()) / (same.std(ddof=1) + 1e-6)
    return result


def returns(groups: list[list[Played]]) -> Doubles:
    rewards = [[reward for _, reward in played] for members in groups for played in members]
    return np.array([sum(GAMMA**k * r for k, r in enumerate(row[start:])) for row in rewards for start in range(len(row))])


rewards = st.sampled_from((-1.0, -0.1, 0.0, 0.5, 1.0))
plays = st.lists(st.tuples(st.sampled_from("abc"), rewards), min_size=1, max_size=4)
several = st.lists(st.lists(plays, min_size=2, max_size=4), min_size=1, max_size=3)
scopes = st.sampled_from((None, NormScope.GROUP, NormScope.BATCH))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(groups=several, center=scopes, scale=scopes, clip=st.sampled_from((None, 0.5)))
def test_step_reinforce_is_the_normalized_return(
    groups: list[list[Played]], center: NormScope | None, scale: NormScope | None, clip: float | None
) -> None:
    values = returns(groups)
    of_group: list[object] = [g for g, members in enumerate(groups) for played in members for _ in played]
    keys = {NormScope.GROUP: of_group, NormScope.BATCH: [0] * len(values)}
    expected = values if center is None else normalized(values, keys[center], std=False)
    if scale is not None:
        stds = np.array([np.std(values[[k == key for k in keys[scale]]], ddof=1) for key in keys[scale]])
        expected = np.where(stds > 1e-6, expected / (stds + 1e-6), 0.0)
    if clip is not None:
        expected = np.clip(expected, -clip, clip)
    found = by_turn(step_of(groups), estimator=STEP_REINFORCE, reward_center=center, reward_scale=scale, reward_clip=clip)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(groups=several, count=st.sampled_from(EpisodeCount), std=st.booleans(), clip=st.sampled_from((None, 0.5)))
def test_gigpo_is_two_normalized_terms(groups: list[list[Played]], count: EpisodeCount, std: bool, clip: float | None) -> None:
    episodes = [(g, sum(r for _, r in played)) for g, members in enumerate(groups) for played in members]
    sizes = [len(played) for members in groups for played in members]
    states: list[object] = [(g, state) for g, members in enumerate(groups) for played in members for state, _ in played]
    if count is EpisodeCount.ONCE:
        first = np.repeat(normalized(np.array([x for _, x in episodes]), [g for g, _ in episodes], std=std), sizes)
    else:
        entries = [pair for pair, size in zip(episodes, sizes, strict=True) for _ in range(size)]
        first = normalized(np.array([x for _, x in entries]), [g for g, _ in entries], std=std)
    expected = 0.5 * first + 2.0 * normalized(returns(groups), states, std=std)
    found = by_turn(
        step_of(groups),
        estimator=GIGPO,
        episode_weight=0.5,
        turn_weight=2.0,
        episode_count=count,
        normalize_std=std,
        reward_clip=clip,
    )
    np.testing.assert_allclose(found, expected if clip is None else np.clip(expected, -clip, clip), atol=1e-5)


TWO: list[list[Played]] = [[[("s0", 0.0), ("s1", 1.0)], [("s0", 0.0), ("s2", 0.0)]]]
GROUP = {"reward_center": NormScope.GROUP, "reward_scale": NormScope.GROUP}


@pytest.mark.parametrize(
    ("groups", "options", "expected"),
    [
        (TWO, {"estimator": STEP_REINFORCE}, [0.95, 1.0, 0.0, 0.0]),
        (TWO, {"estimator": STEP_REINFORCE} | GROUP, [0.8211, 0.9098, -0.8655, -0.8655]),
        ([[[("a", -0.1), ("b", -0.1), ("c", 10.9)]]], {"estimator": STEP_REINFORCE}, [9.64225, 10.255, 10.9]),
        (TWO, {"estimator": GIGPO, "episode_count": EpisodeCount.PER_TURN}, [1.5731, 0.8660, -1.5731, -0.8660]),
        (TWO, {"estimator": GIGPO}, [1.4142, 0.7071, -1.4142, -0.7071]),
        (
            [[[("a", 1.0)], [("b", 0.0), ("c", 0.0), ("d", 0.0)]]],
            {"estimator": GIGPO, "episode_count": EpisodeCount.PER_TURN},
            [1.5, -0.5, -0.5, -0.5],
        ),
    ],
)
def test_the_numbers_that_roll_computes(groups: list[list[Played]], options: dict[str, object], expected: list[float]) -> None:
    np.testing.assert_allclose(by_turn(step_of(groups), **options), expected, atol=6e-5)


@pytest.mark.parametrize("estimator", [GIGPO, STEP_REINFORCE])
def test_a_turn_has_the_kl_of_its_own_tokens_after_its_credit(estimator: AdvantageEstimator) -> None:
    step = step_of(TWO)
    step = replace(step, reference_logprobs=step.behavior_logprobs - np.float32(0.5))
    options = {"max_response_tokens": 64, "gamma": GAMMA, "estimator": estimator}
    plain = Rule(RuleConfig(**options)).apply(step).advantages[step.response_mask > 0]  # type: ignore[arg-type]
    in_rewards = {"kl_coefficient": 0.2, "kl_placement": KLPlacement.REWARD, "kl_estimator": KLEstimator.K1}
    penalized = Rule(RuleConfig(**options | in_rewards)).apply(step)  # type: ignore[arg-type]
    taken = plain - penalized.advantages[step.response_mask > 0]
    np.testing.assert_allclose(taken, [0.1, 0.2, 0.1, 0.1, 0.2, 0.1], atol=1e-6)  # one token, then two, of each episode


def test_what_a_score_is_besides_rewards_counts_in_the_last_turn() -> None:
    """An episode that failed has a score of its own, and an action that its environment never answered no turn."""
    failed = episode(0, 0, [("a", 0.5), ("b", 0.0)], score=-1.0)
    assert failed.episode is not None
    unanswered = replace(failed, episode=replace(failed.episode, turns=failed.episode.turns[:1]))
    step = arrange([Group(group_id=0, trajectories=(unanswered,), failed_samples=0)], version=0)
    np.testing.assert_allclose(by_turn(step, estimator=STEP_REINFORCE, gamma=0.5), [-0.25, -1.5])
    assert by_turn(step, estimator=GIGPO) == [0.0, 0.0]
