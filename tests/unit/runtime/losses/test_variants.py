"""Every policy-loss variant against its formula written out in plain Python, value and gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.crd.docstrings import attribute_docs
from rljob_api.v1alpha1.policy_loss import (
    LOSS_SETTINGS,
    CISPOLoss,
    CustomLoss,
    GSPOLoss,
    Kimi15Loss,
    LossInput,
    LossSettings,
    PolicyLoss,
    PolicyLossVariant,
    PPOLoss,
    TISLoss,
    TOPRLoss,
    VanillaLoss,
    readers,
)
from rljob_runtime.losses.policy import clipped_policy_loss
from rljob_runtime.losses.tokens import LossTokens, PolicyTerms
from rljob_runtime.losses.variants import LOSSES, policy_terms

repeatable = settings(deadline=None, derandomize=True, max_examples=60)
LOW, HIGH = 0.2, 0.3
BUILT_IN = [kind for kind in LOSS_SETTINGS.values() if kind is not CustomLoss]


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

ONE_BY_ONE: dict[str, tuple[LossSettings, Callable[[float, float, float, bool], tuple[float, float]]]] = {
    "Vanilla": (VanillaLoss(), lambda p, q, a, good: (-a * p, -a)),
    "TIS": (
        TISLoss(clipLow=LOW, clipHigh=HIGH),
        lambda p, q, a, good: (-cut(as_ratio(p, q), 0.8, 1.3) * a * p, -cut(as_ratio(p, q), 0.8, 1.3) * a),
    ),
    "TIS as ROLL bounds it": (
        TISLoss(clipLow=1.0, clipHigh=0.0),
        lambda p, q, a, good: (-cut(as_ratio(p, q), 0, 1) * a * p, -cut(as_ratio(p, q), 0, 1) * a),
    ),
    "CISPO": (
        CISPOLoss(clipLow=LOW, clipHigh=HIGH),
        lambda p, q, a, good: (-cut(as_ratio(p, q), 0.8, 1.3) * a * p, -cut(as_ratio(p, q), 0.8, 1.3) * a),
    ),
    "CISPO masked": (
        CISPOLoss(clipLow=LOW, clipHigh=HIGH, maskClipped=True),
        lambda p, q, a, good: (
            -cut(as_ratio(p, q), 0.8, 1.3) * a * p * cispo_mask(as_ratio(p, q), a),
            -cut(as_ratio(p, q), 0.8, 1.3) * a * cispo_mask(as_ratio(p, q), a),
        ),
    ),
    "TOPR": (
        TOPRLoss(positiveWeight=2.0, negativeWeight=0.5),
        lambda p, q, a, good: (
            (-2.0 * a * p, -2.0 * a) if good else (-0.5 * cut(as_ratio(p, q), 0, 1) * a * p, -0.5 * cut(as_ratio(p, q), 0, 1) * a)
        ),
    ),
    "Kimi15": (
        Kimi15Loss(tau=0.4),
        lambda p, q, a, good: (-a * p + 0.2 * (p - q) ** 2, -a + 0.4 * (p - q)),
    ),
}


def tokens_of(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, lengths: list[int], scores: torch.Tensor | None = None
) -> LossTokens:
    return LossTokens(logprobs=logprobs, old_logprobs=old, advantages=advantages, sequence_lengths=lengths, scores=scores)


def evaluate(rows: list[Token], settings: LossSettings, lengths: list[int] | None = None) -> tuple[PolicyTerms, torch.Tensor]:
    """Terms, and the gradient of their plain sum."""
    logp, old, advantages = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    logp.requires_grad_()
    scores = torch.tensor([float(row[3]) for row in rows])
    terms = policy_terms(tokens_of(logp, old, advantages, lengths or [len(rows)], scores), settings)
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
    config = PPOLoss(clipLow=LOW, clipHigh=HIGH, dualClip=2.0)
    terms, _ = evaluate(rows, config)
    logp, old, advantages = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    plain = clipped_policy_loss(logp, old, advantages, clip_low=LOW, clip_high=HIGH, dual_clip=2.0)
    assert torch.equal(terms.loss.detach(), plain.loss)


@repeatable
@given(
    st.lists(st.tuples(st.lists(st.tuples(finite, finite), min_size=1, max_size=5), finite), min_size=1, max_size=5),
    st.just(0.0) | st.just(1.5),
)
def test_gspo_equals_the_clipped_ratio_of_sequences(sequences: list[tuple[list[tuple[float, float]], float]], dual: float) -> None:
    """As in the paper: one advantage a sequence, mean over its tokens; the gradient runs through the geometric mean itself."""
    config = GSPOLoss(clipLow=LOW, clipHigh=HIGH, dualClip=dual)
    lengths = [len(pairs) for pairs, _ in sequences]
    logp = torch.tensor([p for pairs, _ in sequences for p, _ in pairs], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([q for pairs, _ in sequences for _, q in pairs], dtype=torch.float64)
    advantages = torch.tensor([a for pairs, a in sequences for _ in pairs], dtype=torch.float64)
    terms = policy_terms(tokens_of(logp, old, advantages, lengths), config)
    loss = torch.stack([part.mean() for part in terms.loss.split(lengths)]).sum()

    expected = torch.zeros((), dtype=torch.float64)
    for part, part_old, (_, advantage) in zip(logp.split(lengths), old.split(lengths), sequences, strict=True):
        ratio = (part - part_old).mean().exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        if dual and advantage < 0:
            gain = torch.maximum(gain, torch.tensor(dual * advantage, dtype=torch.float64))
        expected = expected - gain
    torch.testing.assert_close(loss, expected)
    got, want = (torch.autograd.grad(value, logp)[0] for value in (loss, expected))
    torch.testing.assert_close(got, want)


def test_gspo_keeps_one_advantage_per_token() -> None:
    rows = [(-1.0, -1.2, 1.0, True), (-2.0, -2.1, 0.5, True)]
    terms, gradient = evaluate(rows, GSPOLoss(clipLow=LOW, clipHigh=HIGH))
    ratio = math.exp((0.2 + 0.1) / 2)
    torch.testing.assert_close(terms.ratio, torch.full((2,), ratio, dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-ratio, -0.5 * ratio], dtype=torch.float64))


def test_all_variants_have_the_policy_gradient_on_policy() -> None:
    rows = [(-1.0, -1.0, 0.7, True), (-2.0, -2.0, -0.3, False)]
    for kind in BUILT_IN:
        _, gradient = evaluate(rows, kind())
        torch.testing.assert_close(gradient, torch.tensor([-0.7, 0.3], dtype=torch.float64), msg=kind.__name__)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_absurd_log_ratios_stay_finite(kind: type[LossSettings]) -> None:
    rows = [(0.0, -400.0, -1.0, False), (-400.0, 0.0, 1.0, False)]
    terms, gradient = evaluate(rows, kind())
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("variant", "clipped"),
    [
        (PolicyLossVariant.VANILLA, [False, False, False]),
        (PolicyLossVariant.KIMI15, [False, False, False]),
        (PolicyLossVariant.TIS, [True, True, False]),
        (PolicyLossVariant.CISPO, [False, False, False]),  # e, and the bound is 5
        (PolicyLossVariant.TOPR, [True, False, False]),  # the second one's score is good, the bound of the others is 1
        (PolicyLossVariant.PPO, [False, True, False]),
    ],
)
def test_reports_where_a_bound_acted(variant: PolicyLossVariant, clipped: list[bool]) -> None:
    rows = [(-1.0, -2.0, -1.0, False), (-1.0, -2.0, 1.0, True), (-1.0, -1.0, 1.0, False)]
    assert evaluate(rows, LOSS_SETTINGS[variant]())[0].clipped.tolist() == clipped


def test_topr_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="TOPR needs the score"):
        policy_terms(tokens_of(torch.zeros(1), torch.zeros(1), torch.zeros(1), [1]), TOPRLoss())


def test_every_variant_has_settings_and_a_formula() -> None:
    assert set(LOSS_SETTINGS) == set(PolicyLossVariant)
    assert set(LOSSES) == set(LOSS_SETTINGS.values())


def test_a_loss_without_a_ratio_reads_no_old_log_probs() -> None:
    rows = [(-1.0, -1.5, 0.7, True), (-2.0, -1.0, -0.3, False)]
    others = [(p, q + 0.5, a, good) for p, q, a, good in rows]
    for kind in BUILT_IN:
        reads = not torch.equal(evaluate(rows, kind())[1], evaluate(others, kind())[1])
        assert reads == (LossInput.OLD_LOGPROBS in kind.needs), kind.__name__


def test_the_section_has_the_settings_of_every_loss_and_says_who_reads_them_and_their_defaults() -> None:
    docs = attribute_docs(PolicyLoss)
    for kind in LOSS_SETTINGS.values():
        for name, info in kind.model_fields.items():
            reading = readers(str(info.alias))
            assert docs[name].split(":")[0].split(", ") == [str(variant) for variant in reading], name
            if kind is not CustomLoss:
                found = dict(re.findall(r"(\w+) ([\d.]+|true|false)(?=[,.])", docs[name].split("When not set ")[1]))
                defaults = {str(variant): LOSS_SETTINGS[variant]().model_dump()[name] for variant in reading}
                assert {variant: yaml.safe_load(value) for variant, value in found.items()} == defaults, name


def test_the_negative_side_is_bounded_by_default() -> None:
    rows = [(-1.0, -6.0, -1.0, False)]  # 5 nats of mismatch: the ratio is 148
    for kind in (PPOLoss, GSPOLoss):
        terms, gradient = evaluate(rows, kind())
        assert terms.loss.tolist() == [3.0]
        assert gradient.tolist() == [0.0]
        _, unbounded = evaluate(rows, kind(dualClip=0.0))
        assert unbounded.tolist() == pytest.approx([math.exp(5.0)])
