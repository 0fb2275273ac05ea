"""The learning rule on small steps: every option against numbers worked out beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rljob_api.vocabulary import AdvantageEstimator, KLEstimator, KLPlacement, NormScope
from rljob_runtime.losses.advantage import group_advantages, leave_one_out
from rljob_runtime.losses.rewards import adapted_coefficient, kl_estimates, overlong_penalty
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import SUMMED_AT_ONCE, Outcome, Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.records import Segment, Trajectory
from rljob_runtime.sampling_mask import SamplingMask
from tests.support.records import ids, make_segment, make_trajectory

SCORES = ((1.0, 0.0, 0.0, 0.5), (0.25, 0.25, 1.0, 2.0))
SIZES = ((3, 1, 2, 4), (2, 2, 5, 1))


def step_of(
    scores: Sequence[Sequence[float]] = SCORES,
    sizes: Sequence[Sequence[int]] = SIZES,
    sources: Sequence[str] = ("sums",) * 9,
    truncated: Sequence[tuple[int, int]] = (),
    **arrays: Any,
) -> StepSamples:
    """Groups of samples with these scores and response lengths; prompts have 3 tokens."""
    groups = []
    for group, (some, lengths, source) in enumerate(zip(scores, sizes, sources, strict=False)):
        members = []
        for index, (score, size) in enumerate(zip(some, lengths, strict=True)):
            one = make_trajectory(group, index, score, tokens=tuple(range(1, size + 1)))
            if (group, index) in truncated:
                one = replace(one, finish_reason="length")
            members.append(replace(one, prompt=replace(one.prompt, source=source)))
        groups.append(Group(group_id=group, trajectories=tuple(members), failed_samples=0))
    return replace(arrange(groups, version=0), **arrays)


def apply(step: StepSamples, **options: Any) -> Outcome:
    return Rule(RuleConfig(**{"max_response_tokens": 8, **options})).apply(step)


def tokens(step: StepSamples, values: np.ndarray) -> list[list[float]]:
    """Values of each sample's sampled tokens."""
    cuts = np.cumsum(step.response_lengths)[:-1]
    return [part.tolist() for part in np.split(values[step.response_mask > 0], cuts)]


def firsts(step: StepSamples, outcome: Outcome) -> list[float]:
    """The advantage of each sample, which all its tokens share."""
    found = tokens(step, outcome.advantages)
    assert all(len(set(part)) == 1 for part in found)
    return [part[0] for part in found]


def flat(nested: Sequence[Sequence[float]]) -> list[float]:
    return [x for part in nested for x in part]


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_is_the_group_advantage_on_every_sampled_token(normalize: bool) -> None:
    step = step_of()
    expected = group_advantages(flat(SCORES), step.group_ids, normalize_std=normalize)
    outcome = apply(step, normalize_std=normalize)
    assert firsts(step, outcome) == expected.tolist()
    assert outcome.trained.tobytes() == step.response_mask.tobytes()
    assert (outcome.returns, outcome.sample_weights, outcome.kl_coefficient) == (None, None, None)
    assert set(outcome.metrics) == {"advantage/mean", "advantage/std", "advantage/min", "advantage/max"}


def test_the_summary_of_the_advantages_is_numpys_to_the_last_bit() -> None:
    generator = np.random.default_rng(0)
    groups = [
        Group(
            group_id=number,
            trajectories=tuple(
                make_trajectory(number, i, float(generator.random()), (7,) * int(generator.integers(1, 3000))) for i in range(4)
            ),
            failed_samples=0,
        )
        for number in range(8)
    ]
    step = arrange(groups, 0)
    outcome = Rule(RuleConfig(max_response_tokens=3000)).apply(step)
    trained = outcome.advantages[step.response_mask > 0].astype(np.float64)
    assert trained.size > 2 * SUMMED_AT_ONCE  # so that parts of it are summed
    found = [outcome.metrics[f"advantage/{name}"] for name in ("mean", "std", "min", "max")]
    assert found == [trained.mean(), trained.std(), trained.min(), trained.max()]


def test_rloo_leaves_one_out() -> None:
    step = step_of()
    expected = leave_one_out(flat(SCORES), step.group_ids)
    assert firsts(step, apply(step, estimator=AdvantageEstimator.RLOO)) == expected.tolist()


def test_reinforce_discounts_the_score_from_the_last_token() -> None:
    step = step_of()
    found = tokens(step, apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=0.5).advantages)
    expected = [[score * 0.5 ** (size - 1 - t) for t in range(size)] for score, size in zip(flat(SCORES), flat(SIZES), strict=True)]
    assert found == expected


def test_reinforce_plus_plus_normalizes_returns_over_the_trained_tokens() -> None:
    step = step_of(truncated=[(0, 3)])
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE_PLUS_PLUS, drop_truncated=True)
    returns = [score for score, size in zip(flat(SCORES), flat(SIZES), strict=True) for _ in range(size)]
    trained = outcome.trained[step.response_mask > 0] > 0
    counted = [x for x, keep in zip(returns, trained, strict=True) if keep]
    mean, std = statistics.fmean(counted), statistics.stdev(counted)
    expected = [(x - mean) / std if keep else 0.0 for x, keep in zip(returns, trained, strict=True)]
    np.testing.assert_allclose(outcome.advantages[step.response_mask > 0], expected, atol=1e-5)
    assert len(counted) == 16


def test_gae_uses_the_values_and_gives_returns_that_whitening_leaves_alone() -> None:
    step = step_of([[1.0]], [[3]], values=np.array([9, 9, 9, 0.5, 0.25, 0.75], dtype=np.float32))
    outcome = apply(step, estimator=AdvantageEstimator.GAE, gamma=0.9, lambda_=0.5)
    third = 1 - 0.75
    second = 0.9 * 0.75 - 0.25 + 0.45 * third
    first = 0.9 * 0.25 - 0.5 + 0.45 * second
    assert tokens(step, outcome.advantages)[0] == pytest.approx([first, second, third])
    assert tokens(step, outcome.returns)[0] == pytest.approx([first + 0.5, second + 0.25, 1.0])  # type: ignore[arg-type]
    whitened = apply(step, estimator=AdvantageEstimator.GAE, gamma=0.9, lambda_=0.5, whiten=True)
    assert whitened.returns is not None
    assert outcome.returns is not None
    assert whitened.returns.tobytes() == outcome.returns.tobytes()
    assert statistics.fmean(tokens(step, whitened.advantages)[0]) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(tokens(step, whitened.advantages)[0]) == pytest.approx(1.0, abs=1e-5)


def test_whitening_leaves_out_what_is_not_trained_and_needs_two_tokens() -> None:
    step = step_of([[1.0, 5.0]], [[1, 4]], truncated=[(0, 1)])
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, whiten=True, drop_truncated=True)
    assert tokens(step, outcome.advantages) == [[1.0], [0.0] * 4]


def test_advantages_are_cut_after_whitening() -> None:
    step = step_of()
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, whiten=True, advantage_clip=1.0)
    free = apply(step, estimator=AdvantageEstimator.REINFORCE, whiten=True).advantages
    np.testing.assert_array_equal(outcome.advantages, np.clip(free, -1, 1))
    sampled = free[step.response_mask > 0]
    assert outcome.metrics["advantage/clip_fraction"] == (abs(sampled) > 1).mean() > 0
    assert outcome.metrics["advantage/max"] == 1.0
    assert outcome.metrics["advantage/min"] == outcome.advantages.min()


def test_overlong_penalty_grows_over_the_buffer() -> None:
    """Limit 8, buffer 4: nothing up to 4 tokens, then a quarter of the penalty per token."""
    found = overlong_penalty([1, 4, 5, 6, 8, 9], max_tokens=8, buffer_tokens=4, penalty=2.0)
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0, 2.0]
    step = step_of([[1.0, 1.0]], [[4, 6]])
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, overlong_buffer_tokens=4, overlong_penalty=2.0)
    assert tokens(step, outcome.advantages) == [[1.0] * 4, [0.0] * 6]
    assert outcome.metrics["reward/overlong_penalty_mean"] == 0.5
    assert outcome.metrics["reward/shaped_mean"] == 0.5


@pytest.mark.parametrize("center", [None, NormScope.GROUP, NormScope.BATCH])
@pytest.mark.parametrize("scale", [None, NormScope.GROUP, NormScope.BATCH])
def test_scores_are_centered_and_scaled_over_what_is_asked(center: NormScope | None, scale: NormScope | None) -> None:
    step = step_of()
    found = apply(step, estimator=AdvantageEstimator.REINFORCE, reward_center=center, reward_scale=scale)
    members = {NormScope.GROUP: SCORES, NormScope.BATCH: (flat(SCORES),) * 2}
    expected = []
    for group, scores in enumerate(SCORES):
        mean = statistics.fmean(members[center][group]) if center else 0.0
        std = statistics.stdev(members[scale][group]) if scale else 1.0
        expected += [(score - mean) / std for score in scores]
    assert firsts(step, found) == pytest.approx(expected, abs=1e-5)


def test_a_group_that_does_not_vary_gives_nothing_when_scaled() -> None:
    step = step_of([[0.1, 0.1, 0.1], [0.3], [0.0, 1.0]], [[1, 1, 1], [1], [1, 1]])
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, reward_center=NormScope.GROUP, reward_scale=NormScope.GROUP)
    assert firsts(step, outcome)[:4] == [0.0] * 4
    assert firsts(step, outcome)[5] > 0.7


def test_running_statistics_are_of_each_source_over_all_steps() -> None:
    rule = Rule(
        RuleConfig(
            max_response_tokens=8,
            estimator=AdvantageEstimator.REINFORCE,
            reward_center=NormScope.RUNNING,
            reward_scale=NormScope.RUNNING,
        )
    )
    rule.apply(step_of([[1.0, 2.0], [50.0, 70.0]], [[1, 1], [1, 1]], ["sums", "words"]))
    step = step_of([[6.0, 2.0], [90.0, 10.0]], [[1, 1], [1, 1]], ["sums", "words"])
    found = firsts(step, rule.apply(step))
    sums, words = [1.0, 2.0, 6.0, 2.0], [50.0, 70.0, 90.0, 10.0]
    expected = [(x - statistics.fmean(some)) / statistics.stdev(some) for some, now in ((sums, sums[2:]), (words, words[2:])) for x in now]
    assert found == pytest.approx(expected, abs=1e-5)
    assert rule.state()["running_rewards"]["words"] == {"count": 4, "mean": 55.0, "m2": pytest.approx(3500.0)}


def test_scores_are_cut_after_normalization() -> None:
    step = step_of()
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, reward_clip=0.5)
    assert firsts(step, outcome) == [min(x, 0.5) for x in flat(SCORES)]
    assert outcome.metrics["reward/clip_fraction"] == 3 / 8
    assert outcome.metrics["reward/shaped_mean"] == 2.5 / 8


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        (KLEstimator.K1, lambda p, r: p - r),
        (KLEstimator.K2, lambda p, r: (p - r) ** 2 / 2),
        (KLEstimator.K3, lambda p, r: math.exp(r - p) - 1 - (r - p)),
        (KLEstimator.ABS, lambda p, r: abs(p - r)),
    ],
)
def test_kl_estimators(estimator: KLEstimator, formula: Any) -> None:
    policy, reference = [-0.5, -2.0, -1.0], [-1.5, -0.5, -1.0]
    expected = [formula(p, r) for p, r in zip(policy, reference, strict=True)]
    np.testing.assert_allclose(kl_estimates(policy, reference, estimator), expected, atol=1e-12)
    assert np.isfinite(kl_estimates([-1e4], [0.0], estimator)).all()


def distant(step: StepSamples, **options: Any) -> StepSamples:
    """References that are 0.1, 0.2, ... less likely than what was sampled; nonsense where nothing was sampled."""
    sampled = step.response_mask > 0
    away = np.cumsum(sampled).astype(np.float32) * np.float32(0.1)
    reference = np.where(sampled, step.behavior_logprobs - away, 77.0).astype(np.float32)
    return replace(step, reference_logprobs=reference, **options)


IN_REWARD = {"kl_coefficient": 0.5, "kl_placement": KLPlacement.REWARD, "kl_estimator": KLEstimator.K1}


def test_kl_in_the_reward_lowers_each_tokens_own() -> None:
    step = distant(step_of([[1.0, 2.0]], [[2, 1]]))
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, **IN_REWARD)
    assert flat(tokens(step, outcome.advantages)) == pytest.approx([1 - 0.05 - 0.1, 1 - 0.1, 2 - 0.15], abs=1e-6)
    assert outcome.metrics["train/kl_reward_mean"] == pytest.approx(0.2)
    assert outcome.metrics["train/kl_coefficient"] == 0.5
    assert outcome.kl_coefficient is None


@pytest.mark.parametrize("estimator", [AdvantageEstimator.GRPO, AdvantageEstimator.RLOO])
def test_group_estimators_see_the_sum_of_token_rewards(estimator: AdvantageEstimator) -> None:
    step = distant(step_of([[1.0, 2.0]], [[2, 1]]))
    totals = [1 - 0.5 * 0.3, 2 - 0.5 * 0.3]
    expected = leave_one_out(totals, [0, 0]) if estimator is AdvantageEstimator.RLOO else group_advantages(totals, [0, 0])
    assert firsts(step, apply(step, estimator=estimator, **IN_REWARD)) == pytest.approx(expected.tolist(), abs=1e-5)


def test_kl_is_of_the_proximal_policy_where_it_is_known() -> None:
    step = distant(step_of([[1.0]], [[2]]))
    step = replace(step, proximal_logprobs=step.reference_logprobs + np.float32(1.0))  # type: ignore[operator]
    assert apply(step, estimator=AdvantageEstimator.REINFORCE, **IN_REWARD).metrics["train/kl_reward_mean"] == pytest.approx(1.0, abs=1e-5)


def unlisted(step: StepSamples, place: int) -> StepSamples:
    """Sampling left tokens out, and at one sampled token the engine could not list what was left."""
    sampled = step.response_mask > 0
    counts = sampled.astype(np.int32)
    counts[np.flatnonzero(sampled)[place]] = 0
    return replace(step, sampling_mask=SamplingMask(token_ids=step.token_ids[counts > 0], counts=counts))


def test_tokens_whose_logprob_is_not_known_have_no_kl() -> None:
    step = distant(step_of([[1.0, 2.0]], [[3, 1]]))  # KL 0.1, 0.2, 0.3 and 0.4
    step = unlisted(step, 1)
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, **IN_REWARD)
    assert flat(tokens(step, outcome.advantages)) == pytest.approx([1 - 0.05 - 0.15, 0.0, 1 - 0.15, 2 - 0.2], abs=1e-6)
    assert outcome.metrics["train/kl_reward_mean"] == pytest.approx((0.1 + 0.3 + 0.4) / 3)
    summed = tokens(step, apply(step, estimator=AdvantageEstimator.RLOO, **IN_REWARD).advantages)
    assert [part[0] for part in summed] == pytest.approx(leave_one_out([1 - 0.5 * 0.4, 2 - 0.5 * 0.4], [0, 0]).tolist(), abs=1e-6)


def test_tokens_whose_logprob_is_not_known_do_not_move_the_coefficient() -> None:
    rule = Rule(RuleConfig(max_response_tokens=8, kl_coefficient=0.1, kl_target=0.3, kl_horizon=10, kl_estimator=KLEstimator.K1))
    rule.apply(unlisted(distant(step_of([[1.0, 2.0]], [[2, 1]])), 0))
    known = adapted_coefficient(0.1, kl=(0.2 + 0.3) / 2, target=0.3, samples=2, horizon=10)
    assert rule.state()["kl_coefficient"] == pytest.approx(known, rel=1e-6)


def test_tokens_whose_logprob_is_not_known_have_no_distance_to_the_teacher() -> None:
    step = unlisted(taught(step_of([[0.0]], [[3]])), 0)
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=1.0, **IN_ADVANTAGE)
    assert outcome.metrics["distillation/kl"] == pytest.approx(-(1.0 + 1.5) / 2)
    assert flat(tokens(step, outcome.advantages)) == pytest.approx([0.0, 2.0, 3.0], abs=1e-6)


def taught(step: StepSamples) -> StepSamples:
    """Teachers that are 0.5, 1.0, ... more likely to say what was sampled; nonsense where nothing was."""
    sampled = step.response_mask > 0
    away = np.cumsum(sampled).astype(np.float32) * np.float32(0.5)
    return replace(step, teacher_logprobs=np.where(sampled, step.behavior_logprobs + away, -77.0).astype(np.float32))


IN_ADVANTAGE = {"distillation_coefficient": 2.0, "distillation_placement": KLPlacement.REWARD}


def test_a_teacher_adds_each_tokens_own_log_ratio_to_the_advantages_of_rewards() -> None:
    step = taught(step_of([[1.0, 2.0]], [[2, 1]]))
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=1.0, **IN_ADVANTAGE)
    assert flat(tokens(step, outcome.advantages)) == pytest.approx([1 + 2 * 0.5, 1 + 2 * 1.0, 2 + 2 * 1.5], abs=1e-6)
    assert outcome.metrics["distillation/kl"] == pytest.approx(-1.0)


def test_without_scores_the_log_ratio_is_the_advantage_whatever_the_estimator() -> None:
    step = taught(step_of([[0.0, 0.0, 0.0, 0.0]], [[1, 2, 1, 1]]))
    assert flat(tokens(step, apply(step, **IN_ADVANTAGE).advantages)) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0], abs=1e-6)


def test_the_distance_to_the_teacher_is_of_the_proximal_policy_and_cut_with_the_advantages() -> None:
    step = taught(step_of([[0.0]], [[2]]))
    step = replace(step, proximal_logprobs=step.teacher_logprobs + np.float32(0.25))  # type: ignore[operator]
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, advantage_clip=0.4, **IN_ADVANTAGE)
    assert outcome.metrics["distillation/kl"] == pytest.approx(0.25, abs=1e-5)
    assert flat(tokens(step, outcome.advantages)) == pytest.approx([-0.4, -0.4])


def test_a_teacher_in_the_loss_leaves_advantages_alone() -> None:
    step = taught(step_of())
    outcome = apply(step, distillation_coefficient=2.0, distillation_placement=KLPlacement.LOSS)
    assert outcome.advantages.tobytes() == apply(step).advantages.tobytes()
    assert outcome.metrics["distillation/kl"] < 0


def test_kl_in_the_loss_leaves_advantages_alone() -> None:
    step = distant(step_of())
    outcome = apply(step, kl_coefficient=0.5)
    assert outcome.advantages.tobytes() == apply(step).advantages.tobytes()
    assert outcome.kl_coefficient is None
    assert outcome.metrics["train/kl_coefficient"] == 0.5
    assert "train/kl_reward_mean" not in outcome.metrics


def test_the_coefficient_follows_its_target() -> None:
    assert adapted_coefficient(0.1, kl=0.055, target=0.05, samples=64, horizon=640) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted_coefficient(0.1, kl=9.0, target=0.05, samples=64, horizon=640) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert adapted_coefficient(0.1, kl=0.0, target=0.05, samples=64, horizon=640) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert adapted_coefficient(0.1, kl=0.0, target=0.05, samples=10_000, horizon=10) == pytest.approx(0.08)


@pytest.mark.parametrize("placement", KLPlacement)
def test_the_coefficient_of_a_step_comes_from_the_steps_before(placement: KLPlacement) -> None:
    config = RuleConfig(
        max_response_tokens=8,
        kl_coefficient=0.5,
        kl_placement=placement,
        kl_estimator=KLEstimator.K1,
        kl_target=0.01,
        kl_horizon=16,
    )
    rule, step = Rule(config), distant(step_of())
    first, second = rule.apply(step), rule.apply(step)
    assert first.metrics["train/kl_coefficient"] == 0.5
    assert second.metrics["train/kl_coefficient"] == pytest.approx(0.5 * (1 + 0.2 * 8 / 16))
    in_loss = placement is KLPlacement.LOSS
    assert [first.kl_coefficient, second.kl_coefficient] == ([0.5, pytest.approx(0.55)] if in_loss else [None, None])
    resumed = Rule(config)
    resumed.restore(rule.state())
    assert resumed.apply(step).metrics["train/kl_coefficient"] == pytest.approx(0.5 * 1.1**2)


def test_a_coefficient_that_does_not_adapt_is_that_of_the_spec_after_a_restart() -> None:
    rule = Rule(RuleConfig(max_response_tokens=8, kl_coefficient=0.25))
    rule.restore({"kl_coefficient": 0.5, "running_rewards": {}})
    assert rule.state()["kl_coefficient"] == 0.25


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"drop_truncated": True}, [1, 0, 1, 1, 1, 1, 1, 1]),
        ({"min_group_mean": 0.375}, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"min_group_mean": 0.374}, [1, 1, 1, 1, 1, 1, 1, 1]),
        ({"max_group_mean": 0.875}, [1, 1, 1, 1, 0, 0, 0, 0]),
        ({"max_failed_tokens": 2}, [1, 1, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_filters_leave_out_samples_but_not_their_scores(options: dict[str, Any], kept: list[int]) -> None:
    """Group means are 0.375 and 0.875; a bound that equals a mean leaves the group out."""
    step = step_of(truncated=[(0, 1)])
    outcome = apply(step, **options)
    everything = tokens(step, apply(step).advantages)
    assert [part[0] for part in tokens(step, outcome.trained)] == kept
    expected = [part if keep else [0.0] * len(part) for part, keep in zip(everything, kept, strict=True)]
    assert tokens(step, outcome.advantages) == expected
    assert outcome.metrics["train/masked_samples_fraction"] == 1 - sum(kept) / 8


def test_a_bound_that_float32_rounds_is_still_strict() -> None:
    assert not apply(step_of([[0.1, 0.1, 0.1]], [[1, 1, 1]]), min_group_mean=0.1).trained.any()


def test_nothing_left_to_train_is_no_error() -> None:
    outcome = apply(step_of(), min_group_mean=5.0, whiten=True, weight_by_length=True)
    assert not outcome.trained.any()
    assert not outcome.advantages.any()
    assert outcome.metrics["advantage/max"] == 0.0
    assert outcome.metrics["train/masked_samples_fraction"] == 1.0


def test_difficult_prompts_weigh_more() -> None:
    """Pass rates 1/4 and 2/4: weights 1.625 and 1.25 before they are scaled."""
    weights = apply(step_of(), weight_by_difficulty=True).sample_weights
    assert weights is not None
    assert weights.tolist() == pytest.approx([1.625 / 1.4375] * 4 + [1.25 / 1.4375] * 4)


def test_short_responses_weigh_more() -> None:
    weights = apply(step_of(), weight_by_length=True).sample_weights
    assert weights is not None
    plain = [1.5 - (size - 1) / 4 for size in flat(SIZES)]
    assert weights.tolist() == pytest.approx([x / statistics.fmean(plain) for x in plain])
    even = apply(step_of([[1.0, 0.0]], [[2, 2]]), weight_by_length=True).sample_weights
    assert even is not None
    assert even.tolist() == [1.0, 1.0]


def test_weights_multiply_and_have_mean_1_over_the_trained_samples() -> None:
    step = step_of(truncated=[(0, 0), (1, 3)])
    weights = apply(step, weight_by_length=True, weight_by_difficulty=True, drop_truncated=True).sample_weights
    assert weights is not None
    product = [(1.5 - (n - 1) / 4) * hard for n, hard in zip(flat(SIZES), [1.625] * 4 + [1.25] * 4, strict=True)]
    mean = statistics.fmean(product[1:7])
    assert weights.tolist() == pytest.approx([x / mean for x in product])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (IN_REWARD, "no reference_logprobs"),
        ({"kl_coefficient": 0.1, "kl_target": 0.1}, "no reference_logprobs"),
        (IN_ADVANTAGE, "no teacher_logprobs; run the teacher first"),
        ({"estimator": AdvantageEstimator.GAE}, "the step has none; run the critic first"),
    ],
)
def test_a_missing_forward_pass_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply(step_of(), **options)


@pytest.mark.parametrize("estimator", [AdvantageEstimator.GRPO, AdvantageEstimator.REINFORCE, AdvantageEstimator.GAE])
def test_scores_that_are_not_finite_are_refused(estimator: AdvantageEstimator) -> None:
    with pytest.raises(ValueError, match="score nan is not finite"):
        apply(step_of([[float("nan"), 1.0]], [[1, 1]]), estimator=estimator)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"kl_coefficient": 0.1},
        {"kl_coefficient": None, "running_rewards": {}},
        {"kl_coefficient": 0.1, "running_rewards": {"sums": {"count": 1}}},
        {"kl_coefficient": 0.1, "running_rewards": []},
        {"kl_coefficient": float("nan"), "running_rewards": {}},
    ],
)
def test_a_foreign_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="state of the learning rule"):
        Rule(RuleConfig(max_response_tokens=8)).restore(state)


def test_the_kl_is_measured_where_it_counts_here() -> None:
    plain = RuleConfig(max_response_tokens=8)
    assert not plain.measures_kl
    assert not replace(plain, kl_coefficient=0.1).measures_kl
    assert replace(plain, kl_coefficient=0.1, kl_target=0.1).measures_kl


def test_rewards_of_turns_count_where_they_were_earned_and_group_estimators_see_their_sum() -> None:
    def episode(index: int, rewards: tuple[float, float]) -> Trajectory:
        one = make_trajectory(0, index, sum(rewards))
        first, second = (replace(make_segment((7, 8)), reward=reward) for reward in rewards)
        return replace(one, segments=(first, Segment(token_ids=ids(5, 6, 7), sampled=False), second))

    members = (episode(0, (1.0, 0.5)), episode(1, (0.0, -1.0)))
    step = arrange([Group(group_id=0, trajectories=members, failed_samples=0)], version=0)
    outcome = apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=0.5)
    assert tokens(step, outcome.advantages) == [[0.5 + 0.5 / 8, 1.0 + 0.5 / 4, 0.25, 0.5], [-1 / 8, -1 / 4, -0.5, -1.0]]
    assert (outcome.advantages[step.response_mask == 0] == 0).all()
    clipped = apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=1.0, reward_clip=1.0)
    assert tokens(step, clipped.advantages)[0] == pytest.approx([1.0, 1.0, 1 / 3, 1 / 3])  # from each in its share
    scaled = apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=1.0, reward_center=NormScope.BATCH, reward_scale=NormScope.BATCH)
    plain = apply(step, estimator=AdvantageEstimator.REINFORCE, gamma=1.0).advantages[step.response_mask > 0]
    unit = np.std([1.5, -1.0], ddof=1)
    assert scaled.advantages[step.response_mask > 0] == pytest.approx((plain - 0.25) / unit, abs=1e-5)  # another unit and one baseline
    summed = apply(step, estimator=AdvantageEstimator.RLOO)
    assert firsts(step, summed) == [2.5, -2.5]
