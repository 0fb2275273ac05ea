"""Every policy-loss variant against its formula written out in plain Python, value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.vocabulary import PolicyLossVariant
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.policy import PolicyTerms, clipped_policy_loss
from rljob_runtime.losses.variants import policy_terms

repeatable = settings(deadline=None, derandomize=True, max_examples=60)
LOW, HIGH = 0.2, 0.3


def cut(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def as_ratio(logp: float, old: float) -> float:
    return math.exp(cut(logp - old, -20, 20))


def cispo_mask(ratio: float, advantage: float) -> float:
    return 0.0 if (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW) else 1.0


Token = tuple[float, float, float, bool]
"""Log-prob, old log-prob, advantage, whether the score is above 0."""
finite = st.floats(-3, 3, width=32)
tokens = st.lists(st.tuples(finite, finite, finite, st.booleans()), min_size=1, max_size=20)

ONE_BY_ONE: dict[str, tuple[LossConfig, Callable[[float, float, float, bool], tuple[float, float]]]] = {
    "Vanilla": (LossConfig(variant=PolicyLossVariant.VANILLA), lambda p, q, a, good: (-a * p, -a)),
    "TIS": (
        LossConfig(variant=PolicyLossVariant.TIS, clip_low=LOW, clip_high=HIGH),
        lambda p, q, a, good: (-cut(as_ratio(p, q), 0.8, 1.3) * a * p, -cut(as_ratio(p, q), 0.8, 1.3) * a),
    ),
    "TIS as ROLL bounds it": (
        LossConfig(variant=PolicyLossVariant.TIS, clip_low=1.0, clip_high=0.0),
        lambda p, q, a, good: (-cut(as_ratio(p, q), 0, 1) * a * p, -cut(as_ratio(p, q), 0, 1) * a),
    ),
    "CISPO": (
        LossConfig(variant=PolicyLossVariant.CISPO, clip_low=LOW, clip_high=HIGH),
        lambda p, q, a, good: (-cut(as_ratio(p, q), 0.8, 1.3) * a * p, -cut(as_ratio(p, q), 0.8, 1.3) * a),
    ),
    "CISPO masked": (
        LossConfig(variant=PolicyLossVariant.CISPO, clip_low=LOW, clip_high=HIGH, mask_clipped=True),
        lambda p, q, a, good: (
            -cut(as_ratio(p, q), 0.8, 1.3) * a * p * cispo_mask(as_ratio(p, q), a),
            -cut(as_ratio(p, q), 0.8, 1.3) * a * cispo_mask(as_ratio(p, q), a),
        ),
    ),
    "TOPR": (
        LossConfig(variant=PolicyLossVariant.TOPR, positive_weight=2.0, negative_weight=0.5),
        lambda p, q, a, good: (
            (-2.0 * a * p, -2.0 * a) if good else (-0.5 * cut(as_ratio(p, q), 0, 1) * a * p, -0.5 * cut(as_ratio(p, q), 0, 1) * a)
        ),
    ),
    "Kimi15": (
        LossConfig(variant=PolicyLossVariant.KIMI15, tau=0.4),
        lambda p, q, a, good: (-a * p + 0.2 * (p - q) ** 2, -a + 0.4 * (p - q)),
    ),
}


def evaluate(rows: list[Token], config: LossConfig, lengths: list[int] | None = None) -> tuple[PolicyTerms, torch.Tensor]:
    """Terms, and the gradient of their plain sum."""
    logp, old, advantages = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    logp.requires_grad_()
    positive = torch.tensor([row[3] for row in rows])
    terms = policy_terms(logp, old, advantages, config, sequence_lengths=lengths or [len(rows)], positive=positive)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logp)
    return terms, gradient


@pytest.mark.parametrize("name", ONE_BY_ONE)
@repeatable
@given(rows=tokens)
def test_value_and_gradient_equal_the_formula(name: str, rows: list[Token]) -> None:
    config, formula = ONE_BY_ONE[name]
    terms, gradient = evaluate(rows, config)
    expected = torch.tensor([formula(*row) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(terms.loss.detach(), expected[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, expected[:, 1], rtol=1e-9, atol=1e-9)
    ratios = torch.tensor([as_ratio(p, q) for p, q, _, _ in rows], dtype=torch.float64)
    torch.testing.assert_close(terms.ratio, ratios)


@repeatable
@given(rows=tokens)
def test_ppo_is_the_clipped_loss_to_the_bit(rows: list[Token]) -> None:
    config = LossConfig(clip_low=LOW, clip_high=HIGH, dual_clip=2.0)
    terms, _ = evaluate(rows, config)
    logp, old, advantages = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    plain = clipped_policy_loss(logp, old, advantages, clip_low=LOW, clip_high=HIGH, dual_clip=2.0)
    assert torch.equal(terms.loss.detach(), plain.loss)


@repeatable
@given(
    st.lists(st.tuples(st.lists(st.tuples(finite, finite), min_size=1, max_size=5), finite), min_size=1, max_size=5),
    st.none() | st.just(1.5),
)
def test_gspo_equals_the_clipped_ratio_of_sequences(sequences: list[tuple[list[tuple[float, float]], float]], dual: float | None) -> None:
    """As in the paper: one advantage a sequence, mean over its tokens; the gradient runs through the geometric mean itself."""
    config = LossConfig(variant=PolicyLossVariant.GSPO, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    lengths = [len(pairs) for pairs, _ in sequences]
    logp = torch.tensor([p for pairs, _ in sequences for p, _ in pairs], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([q for pairs, _ in sequences for _, q in pairs], dtype=torch.float64)
    advantages = torch.tensor([a for pairs, a in sequences for _ in pairs], dtype=torch.float64)
    terms = policy_terms(logp, old, advantages, config, sequence_lengths=lengths)
    loss = torch.stack([part.mean() for part in terms.loss.split(lengths)]).sum()

    expected = torch.zeros((), dtype=torch.float64)
    for part, part_old, (_, advantage) in zip(logp.split(lengths), old.split(lengths), sequences, strict=True):
        ratio = (part - part_old).mean().exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        if dual is not None and advantage < 0:
            gain = torch.maximum(gain, torch.tensor(dual * advantage, dtype=torch.float64))
        expected = expected - gain
    torch.testing.assert_close(loss, expected)
    got, want = (torch.autograd.grad(value, logp)[0] for value in (loss, expected))
    torch.testing.assert_close(got, want)


def test_gspo_keeps_one_advantage_per_token() -> None:
    rows = [(-1.0, -1.2, 1.0, True), (-2.0, -2.1, 0.5, True)]
    terms, gradient = evaluate(rows, LossConfig(variant=PolicyLossVariant.GSPO))
    ratio = math.exp((0.2 + 0.1) / 2)
    torch.testing.assert_close(terms.ratio, torch.full((2,), ratio, dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-ratio, -0.5 * ratio], dtype=torch.float64))


def test_all_variants_have_the_policy_gradient_on_policy() -> None:
    rows = [(-1.0, -1.0, 0.7, True), (-2.0, -2.0, -0.3, False)]
    for variant in PolicyLossVariant:
        _, gradient = evaluate(rows, LossConfig(variant=variant))
        torch.testing.assert_close(gradient, torch.tensor([-0.7, 0.3], dtype=torch.float64), msg=variant)


@pytest.mark.parametrize("variant", PolicyLossVariant)
def test_absurd_log_ratios_stay_finite(variant: PolicyLossVariant) -> None:
    rows = [(0.0, -400.0, -1.0, False), (-400.0, 0.0, 1.0, False)]
    terms, gradient = evaluate(rows, LossConfig(variant=variant))
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("variant", "clipped"),
    [
        (PolicyLossVariant.VANILLA, [False, False, False]),
        (PolicyLossVariant.KIMI15, [False, False, False]),
        (PolicyLossVariant.TIS, [True, True, False]),
        (PolicyLossVariant.CISPO, [True, True, False]),
        (PolicyLossVariant.TOPR, [True, False, False]),  # the second one's score is good, the bound of the others is 1
        (PolicyLossVariant.PPO, [False, True, False]),
    ],
)
def test_reports_where_a_bound_acted(variant: PolicyLossVariant, clipped: list[bool]) -> None:
    rows = [(-1.0, -2.0, -1.0, False), (-1.0, -2.0, 1.0, True), (-1.0, -1.0, 1.0, False)]
    assert evaluate(rows, LossConfig(variant=variant))[0].clipped.tolist() == clipped


def test_topr_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="TOPR asks for the sign"):
        policy_terms(torch.zeros(1), torch.zeros(1), torch.zeros(1), LossConfig(variant=PolicyLossVariant.TOPR), sequence_lengths=[1])
