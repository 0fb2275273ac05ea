"""Proximal policies, correction weights and masks, and the objective they end in, on numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rljob_api.v1alpha1.policy_loss import TISLoss, VanillaLoss
from rljob_api.vocabulary import CorrectionLevel, KLEstimator, ProximalPolicy
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.losses.correction import correct, level_ratio, proximal_logprobs
from rljob_runtime.losses.objective import LossInputs, objective
from rljob_runtime.losses.spans import TokenSpans, span_index

SPANS = TokenSpans(sequences=(4, 2), segments=(1, 3, 2))
DIFFERENCES = torch.tensor([0.1, 0.2, 0.3, -0.6, 1.0, 2.0], dtype=torch.float64)
EXPONENTS = {
    CorrectionLevel.TOKEN: [0.1, 0.2, 0.3, -0.6, 1.0, 2.0],
    CorrectionLevel.SEQUENCE: [0.0, 0.0, 0.0, 0.0, 3.0, 3.0],
    CorrectionLevel.GEOMETRIC: [0.0, 0.0, 0.0, 0.0, 1.5, 1.5],
    CorrectionLevel.SEGMENT: [0.1, -0.1 / 3, -0.1 / 3, -0.1 / 3, 1.5, 1.5],
}


def inputs(behavior: torch.Tensor, spans: TokenSpans = SPANS, **more: torch.Tensor) -> LossInputs:
    weights = torch.full_like(behavior, 1.0 / behavior.numel())
    defaults = {"advantages": torch.ones_like(behavior), "weights": weights, "policy_weights": weights}
    return LossInputs(behavior_logprobs=behavior, spans=spans, **(defaults | more))


# ---- which tokens belong together -----------------------------------------------------------------------------------


def test_spans_follow_sequences_and_breaks_in_the_mask() -> None:
    lengths = np.array([6, 3, 2, 3], dtype=np.int32)
    mask = np.array([0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0], dtype=np.float32)
    index = span_index(mask, lengths)
    places = np.flatnonzero(mask)
    assert index.of(places) == TokenSpans(sequences=(4, 2, 1), segments=(1, 3, 2, 1))
    assert index.of(places[[4, 5, 0, 1, 2, 3]]) == TokenSpans(sequences=(2, 4), segments=(2, 1, 3))  # rows of a micro-batch


def test_a_sequence_that_ends_trained_does_not_run_into_the_next() -> None:
    index = span_index(np.ones(4, np.float32), np.array([2, 2]))
    assert index.of(np.arange(4)).segments == (2, 2)


# ---- levels, weights and masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", CorrectionLevel)
def test_ratio_of_each_level(level: CorrectionLevel) -> None:
    expected = torch.tensor(EXPONENTS[level], dtype=torch.float64).exp()
    torch.testing.assert_close(level_ratio(DIFFERENCES, level, SPANS), expected)


@pytest.mark.parametrize("level", CorrectionLevel)
def test_exponents_end_at_twenty(level: CorrectionLevel) -> None:
    ratio = level_ratio(torch.tensor([500.0, 700.0, -500.0]), level, TokenSpans(sequences=(2, 1), segments=(2, 1)))
    torch.testing.assert_close(ratio, torch.tensor([20.0, 20.0, -20.0]).exp())


def test_the_weight_is_cut_at_both_ends_and_carries_no_gradient() -> None:
    proximal = DIFFERENCES.clone().requires_grad_()
    config = LossConfig(weight=CorrectionWeightConfig(low=0.9, high=2.0))
    result = correct(proximal, torch.zeros_like(DIFFERENCES), config, SPANS)
    assert result is not None
    ratios = [math.exp(d) for d in (0.1, 0.2, 0.3)]
    torch.testing.assert_close(result.factor, torch.tensor([*ratios, 0.9, 2.0, 2.0], dtype=torch.float64))
    assert result.cut is not None
    assert result.cut.tolist() == [False, False, False, True, True, True]
    assert not result.factor.requires_grad
    assert result.kept is None


def test_a_token_must_pass_every_mask() -> None:
    masks = (CorrectionMaskConfig(low=0.7, high=5.0), CorrectionMaskConfig(level=CorrectionLevel.GEOMETRIC, low=0.5, high=2.0))
    result = correct(DIFFERENCES, torch.zeros_like(DIFFERENCES), LossConfig(masks=masks), SPANS)
    assert result is not None
    assert result.factor.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert result.weight is None


def test_bounds_of_a_mask_are_inside() -> None:
    config = LossConfig(masks=(CorrectionMaskConfig(low=1.0, high=1.0),))
    result = correct(torch.zeros(1), torch.zeros(1), config, TokenSpans(sequences=(1,), segments=(1,)))
    assert result is not None
    assert result.factor.tolist() == [1.0]


def test_without_weight_and_masks_there_is_no_correction() -> None:
    assert correct(DIFFERENCES, DIFFERENCES, LossConfig(), SPANS) is None


# ---- proximal policies ----------------------------------------------------------------------------------------------


def test_proximal_policies() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    behavior, recomputed = torch.tensor([-2.0, -2.0, -2.0, -2.0]), torch.full((4,), -1.5)
    old, corrected = proximal_logprobs(current, behavior, ProximalPolicy.BEHAVIOR)
    assert torch.equal(old, behavior)
    assert torch.equal(corrected, current)
    assert not corrected.requires_grad
    old, corrected = proximal_logprobs(current, behavior, ProximalPolicy.RECOMPUTE, recomputed=recomputed)
    assert torch.equal(old, recomputed)
    assert torch.equal(corrected, recomputed)
    staleness = torch.tensor([0.0, 1.0, 2.0, 4.0])
    old, corrected = proximal_logprobs(current, behavior, ProximalPolicy.INTERPOLATE, staleness=staleness)
    torch.testing.assert_close(old, torch.tensor([-2.0, -2.0, -1.5, -1.25]))
    assert corrected is old
    assert not old.requires_grad


@pytest.mark.parametrize(("proximal", "lacks"), [(ProximalPolicy.RECOMPUTE, "log-probs"), (ProximalPolicy.INTERPOLATE, "staleness")])
def test_proximal_policies_name_what_they_lack(proximal: ProximalPolicy, lacks: str) -> None:
    with pytest.raises(ValueError, match=lacks):
        proximal_logprobs(torch.zeros(1), torch.zeros(1), proximal)


# ---- the objective --------------------------------------------------------------------------------------------------


def test_recomputed_with_a_token_weight_is_decoupled_ppo() -> None:
    """``sg(prox / behavior) * min(u A, clip(u) A)`` with ``u = policy / prox``, written out."""
    generator = torch.Generator().manual_seed(0)
    logp, behavior, proximal, advantages = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    config = LossConfig(proximal=ProximalPolicy.RECOMPUTE, weight=CorrectionWeightConfig(high=1e6))
    result = objective(logp, inputs(behavior, advantages=advantages, proximal_logprobs=proximal), config, kl_coefficient=0.0)
    ratio = (logp - proximal).exp()
    weight = (proximal - behavior).exp()
    expected = -(weight * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).mean()
    torch.testing.assert_close(result.loss, expected)
    got, want = (torch.autograd.grad(value, logp)[0] for value in (result.loss, expected))
    torch.testing.assert_close(got, want)


def test_vanilla_with_a_token_weight_of_the_current_policy_is_truncated_importance_sampling() -> None:
    generator = torch.Generator().manual_seed(1)
    logp, behavior, advantages = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    values = []
    for config in (
        LossConfig(policy=VanillaLoss(), weight=CorrectionWeightConfig(low=0.8, high=1.3)),
        LossConfig(policy=TISLoss(clipLow=0.2, clipHigh=0.3)),
    ):
        result = objective(logp, inputs(behavior, advantages=advantages), config, kl_coefficient=0.0)
        values.append((result.loss, *torch.autograd.grad(result.loss, logp)))
    torch.testing.assert_close(*values)


def test_rejected_tokens_stay_in_the_denominator() -> None:
    config = LossConfig(policy=VanillaLoss(), masks=(CorrectionMaskConfig(low=0.0, high=1.5),))
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    spans = TokenSpans(sequences=(2,), segments=(2,))
    result = objective(logp, inputs(torch.tensor([-1.0, -3.0]), spans), config, kl_coefficient=0.0)
    assert result.loss.item() == pytest.approx(0.5)  # one of two tokens, over two
    (gradient,) = torch.autograd.grad(result.loss, logp)
    assert gradient.tolist() == [-0.5, 0.0]


def test_sample_weights_and_masks_leave_kl_and_entropy_alone() -> None:
    config = LossConfig(
        kl_coefficient=1.0, kl_estimator=KLEstimator.ABS, entropy_coefficient=0.5, masks=(CorrectionMaskConfig(low=9, high=9),)
    )
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    spans = TokenSpans(sequences=(2,), segments=(2,))
    given = inputs(torch.zeros(2), spans, reference_logprobs=torch.tensor([-1.5, -2.5]), policy_weights=torch.full((2,), 100.0))
    result = objective(logp, given, config, kl_coefficient=0.3, entropy=entropy)
    assert result.loss.item() == pytest.approx(0.3 * 0.5 - 0.5 * 2.0)
    logp_gradient, entropy_gradient = torch.autograd.grad(result.loss, (logp, entropy))
    torch.testing.assert_close(logp_gradient, torch.tensor([0.15, 0.15]))
    torch.testing.assert_close(entropy_gradient, torch.tensor([-0.25, -0.25]))


def test_sample_weights_scale_the_policy_loss() -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    spans = TokenSpans(sequences=(1, 1), segments=(1, 1))
    given = inputs(torch.tensor([-1.0, -1.0]), spans, policy_weights=torch.tensor([0.25, 0.75]))
    result = objective(logp, given, LossConfig(), kl_coefficient=0.0)
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == [-0.25, -0.75]
