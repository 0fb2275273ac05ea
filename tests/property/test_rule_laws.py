"""Laws of the learning rule for any step: against references in plain Python, and whatever order samples arrive in."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.vocabulary import AdvantageEstimator, KLEstimator, KLPlacement, NormScope
from rljob_runtime.losses.normalize import Moments, moments_by, scaled, whitened
from rljob_runtime.losses.returns import discounted_sums, gae, gigpo_advantages, step_returns
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Outcome, Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from tests.support.records import make_trajectory

repeatable = settings(deadline=None, derandomize=True, max_examples=60)
numbers = st.floats(-10, 10).map(lambda x: round(x, 3))
ragged = st.lists(st.lists(numbers, max_size=6), min_size=1, max_size=8)

TOKENWISE = (AdvantageEstimator.REINFORCE, AdvantageEstimator.REINFORCE_PLUS_PLUS, AdvantageEstimator.GAE)
GROUPWISE = (AdvantageEstimator.GRPO, AdvantageEstimator.RLOO)


@st.composite
def groups_of(draw: st.DrawFn) -> list[Group]:
    groups = []
    for group_id in range(draw(st.integers(1, 5))):
        found = draw(st.lists(st.tuples(st.integers(1, 6), numbers, st.booleans()), min_size=1, max_size=4))
        source = draw(st.sampled_from(("sums", "words")))
        members = []
        for index, (size, score, cut) in enumerate(found):
            one = make_trajectory(group_id, index, score, tokens=tuple(range(1, size + 1)))
            members.append(replace(one, prompt=replace(one.prompt, source=source), finish_reason="length" if cut else "stop"))
        groups.append(Group(group_id=group_id, trajectories=tuple(members), failed_samples=0))
    return groups


@st.composite
def rules(draw: st.DrawFn) -> RuleConfig:
    scopes = st.one_of(st.none(), st.sampled_from(NormScope))
    return RuleConfig(
        max_response_tokens=6,
        estimator=draw(st.sampled_from((*TOKENWISE, *GROUPWISE))),
        normalize_std=draw(st.booleans()),
        gamma=draw(st.sampled_from((1.0, 0.9))),
        whiten=draw(st.booleans()),
        advantage_clip=draw(st.sampled_from((None, 0.5))),
        reward_center=draw(scopes),
        reward_scale=draw(scopes),
        reward_clip=draw(st.sampled_from((None, 1.0))),
        overlong_buffer_tokens=draw(st.sampled_from((None, 3))),
        kl_coefficient=draw(st.sampled_from((0.0, 0.1))),
        kl_estimator=draw(st.sampled_from(KLEstimator)),
        kl_placement=draw(st.sampled_from(KLPlacement)),
        kl_target=draw(st.sampled_from((None, 0.05))),
        drop_truncated=draw(st.booleans()),
        min_group_mean=draw(st.sampled_from((None, -2.0))),
        max_group_mean=draw(st.sampled_from((None, 2.0))),
        max_failed_tokens=draw(st.sampled_from((None, 4))),
        weight_by_difficulty=draw(st.booleans()),
        weight_by_length=draw(st.booleans()),
    )


def scored(groups: list[Group], version: int = 1) -> StepSamples:
    """A step with reference log-probs and values that are functions of the place in it."""
    step = arrange(groups, version)
    places = np.arange(step.token_ids.size, dtype=np.float32)
    return replace(step, reference_logprobs=np.sin(places) - 1.5, values=np.cos(places))


def assert_same(one: Outcome, two: Outcome) -> None:
    assert one.metrics == two.metrics
    assert one.kl_coefficient == two.kl_coefficient
    for name in ("advantages", "trained", "returns", "sample_weights"):
        left, right = getattr(one, name), getattr(two, name)
        assert (left is None) == (right is None)
        assert left is None or left.tobytes() == right.tobytes()


@repeatable
@given(groups=groups_of(), config=rules(), seed=st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(groups: list[Group], config: RuleConfig, seed) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(groups)
    seed.shuffle(shuffled)
    shuffled = [replace(g, trajectories=tuple(reversed(g.trajectories))) for g in shuffled]
    one, two = Rule(config), Rule(config)
    assert_same(one.apply(scored(groups)), two.apply(scored(shuffled)))
    assert one.state() == two.state()


@repeatable
@given(first=groups_of(), second=groups_of(), config=rules())
def test_a_restored_rule_goes_on_to_the_bit(first: list[Group], second: list[Group], config: RuleConfig) -> None:
    one, two = Rule(config), Rule(config)
    one.apply(scored(first))
    two.restore(json.loads(json.dumps(one.state())))
    assert two.state() == one.state()
    assert_same(one.apply(scored(second)), two.apply(scored(second)))


@repeatable
@given(groups=groups_of(), config=rules())
def test_what_every_outcome_keeps(groups: list[Group], config: RuleConfig) -> None:
    step = scored(groups)
    outcome = Rule(config).apply(step)
    trained = outcome.trained > 0
    assert not (trained & (step.response_mask == 0)).any()
    assert not outcome.advantages[~trained].any()
    assert np.isfinite(outcome.advantages).all()
    assert (outcome.returns is not None) == (config.estimator is AdvantageEstimator.GAE)
    # A coefficient that the loss already has, and that does not adapt, is not sent with the batch.
    adapts_in_loss = config.measures_kl and config.kl_placement is KLPlacement.LOSS
    assert outcome.kl_coefficient == (config.kl_coefficient if adapts_in_loss else None)
    ends = np.cumsum(step.lengths)
    kept = []
    for index, (start, end, sample) in enumerate(zip(ends - step.lengths, ends, step.trajectories, strict=True)):
        scores = [t.reward.score or 0.0 for t in step.trajectories if t.group_id == sample.group_id]
        mean = statistics.fmean(scores)
        size = sample.num_sampled
        keep = not (config.drop_truncated and sample.finish_reason == "length")
        keep &= config.min_group_mean is None or mean > config.min_group_mean
        keep &= config.max_group_mean is None or mean < config.max_group_mean
        keep &= config.max_failed_tokens is None or sample.reward.passed or size < config.max_failed_tokens
        assert trained[start:end].any() == keep
        assert outcome.trained[start:end].sum() == (size if keep else 0)
        if keep:
            kept.append(index)
    if config.filters:
        assert outcome.metrics["train/masked_samples_fraction"] == pytest.approx(1 - len(kept) / len(step.trajectories))
    if config.advantage_clip is not None:
        assert np.abs(outcome.advantages).max() <= config.advantage_clip
    if outcome.sample_weights is not None and kept:
        assert outcome.sample_weights[kept].mean() == pytest.approx(1.0, rel=1e-5)
        assert (outcome.sample_weights > 0).all()


@repeatable
@given(ragged, st.sampled_from((1.0, 0.9, 0.0)))
def test_discounted_sums_equal_the_formula(rows: list[list[float]], factor: float) -> None:
    expected = [sum(factor**k * row[t + k] for k in range(len(row) - t)) for row in rows for t in range(len(row))]
    result = discounted_sums([x for row in rows for x in row], [len(row) for row in rows], factor)
    np.testing.assert_allclose(result, expected, atol=1e-9)


@repeatable
@given(ragged, st.sampled_from((1.0, 0.95)), st.sampled_from((0.0, 0.7, 1.0)), st.randoms(use_true_random=False))
def test_gae_equals_the_recursion(rows: list[list[float]], gamma: float, lambda_: float, seed) -> None:  # type: ignore[no-untyped-def]
    critic = [[seed.uniform(-3, 3) for _ in row] for row in rows]
    expected = []
    for row, values in zip(rows, critic, strict=True):
        following, after, back = 0.0, 0.0, []
        for reward, value in zip(reversed(row), reversed(values), strict=True):
            following = reward + gamma * after - value + gamma * lambda_ * following
            after = value
            back.append(following)
        expected += reversed(back)
    flat = [v for values in critic for v in values]
    advantages, returns = gae([x for row in rows for x in row], flat, [len(row) for row in rows], gamma=gamma, lambda_=lambda_)
    np.testing.assert_allclose(advantages, expected, atol=1e-9)
    np.testing.assert_allclose(returns, np.array(expected) + flat, atol=1e-9)


@repeatable
@given(ragged)
def test_gae_with_lambda_1_is_the_return_less_the_value(rows: list[list[float]]) -> None:
    flat, lengths = [x for row in rows for x in row], [len(row) for row in rows]
    values = np.arange(len(flat), dtype=np.float64)
    advantages, returns = gae(flat, values, lengths, gamma=1.0, lambda_=1.0)
    np.testing.assert_allclose(returns, discounted_sums(flat, lengths, 1.0), atol=1e-9)
    np.testing.assert_allclose(advantages, returns - values, atol=1e-9)


steps = st.lists(st.tuples(numbers, st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=30)


@repeatable
@given(steps, st.sampled_from((1.0, 0.5)))
def test_step_returns_follow_each_trajectory(found: list[tuple[float, int, int]], gamma: float) -> None:
    result = step_returns([r for r, _, _ in found], [t for _, t, _ in found], gamma)
    for index, (_, trajectory, _) in enumerate(found):
        rest = [r for r, t, _ in found[index:] if t == trajectory]
        assert result[index] == pytest.approx(sum(gamma**k * r for k, r in enumerate(rest)), abs=1e-9)


@repeatable
@given(steps, st.booleans())
def test_gigpo_equals_the_formula(found: list[tuple[float, int, int]], normalize_std: bool) -> None:
    """Trajectories 0, 2, 4 belong to one task, 1, 3, 5 to another; states have the same names in both."""
    gamma, weight = 0.9, 0.5
    gained, trajectories, states = ([step[column] for step in found] for column in range(3))
    names = [f"state {s}" for s in states]
    result = gigpo_advantages(
        gained, trajectories, [t % 2 for t in trajectories], names, gamma=gamma, turn_weight=weight, normalize_std=normalize_std
    )

    def relative(value: float, others: list[float]) -> float:
        if max(others) - min(others) < 1e-9:
            return 0.0
        return (value - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6 if normalize_std else 1.0)

    def ahead(index: int) -> float:
        rest = [r for r, t, _ in found[index:] if t == trajectories[index]]
        return sum(gamma**k * r for k, r in enumerate(rest))

    for index, (_, trajectory, state) in enumerate(found):
        group = sorted({t for t in trajectories if t % 2 == trajectory % 2})
        totals = {t: sum(r for r, other, _ in found if other == t) for t in group}
        same = [ahead(i) for i, (_, t, s) in enumerate(found) if s == state and t % 2 == trajectory % 2]
        expected = relative(totals[trajectory], list(totals.values())) + weight * relative(ahead(index), same)
        assert result[index] == pytest.approx(expected, abs=2e-3)


@repeatable
@given(st.lists(st.lists(numbers, max_size=9), min_size=1, max_size=6))
def test_merged_moments_are_those_of_all_values_together(parts: list[list[float]]) -> None:
    merged = Moments()
    for part in parts:
        merged = merged.merged(Moments.of(part))
    values = [x for part in parts for x in part]
    assert merged.count == len(values)
    if values:
        assert merged.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert merged.std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-7)


@repeatable
@given(st.lists(st.tuples(numbers, st.integers(0, 3)), min_size=1, max_size=30))
def test_moments_by_key(pairs: list[tuple[float, int]]) -> None:
    values, keys = np.array([v for v, _ in pairs]), [k for _, k in pairs]
    mean, std = moments_by(values, keys)
    for index, (_, key) in enumerate(pairs):
        members = [v for v, k in pairs if k == key]
        assert mean[index] == pytest.approx(statistics.fmean(members), abs=1e-9)
        assert std[index] == pytest.approx(statistics.stdev(members) if len(members) > 1 else 0.0, abs=1e-9)


@repeatable
@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_values_are_scaled_to_exactly_nothing(value: float, size: int) -> None:
    values = np.full(size, value)
    mean, std = moments_by(values, np.zeros(size))
    assert not (values - mean).any()
    assert not scaled(values, std).any()


@repeatable
@given(st.lists(st.tuples(numbers, st.booleans()), max_size=30))
def test_whitened_values_have_mean_0_and_variance_1(pairs: list[tuple[float, bool]]) -> None:
    values, counted = np.array([v for v, _ in pairs]), np.array([c for _, c in pairs], dtype=bool)
    result = whitened(values, counted)
    chosen = values[counted]
    if chosen.size < 2:
        assert (result == values).all()
        return
    assert result[counted].mean() == pytest.approx(0.0, abs=1e-6)
    if chosen.std() > 0.01:
        assert statistics.stdev(result[counted]) == pytest.approx(1.0, abs=1e-3)
        order = np.argsort(values, kind="stable")
        assert (np.diff(result[order]) >= 0).all()
