"""Policy loss, KL estimators and aggregation against independent few-line references, and their arithmetic laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.policy_loss import CustomLoss
from rljob_api.vocabulary import Aggregation, KLEstimator
from rljob_runtime.losses.aggregate import token_weights
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.losses.kl import kl_terms
from rljob_runtime.losses.policy import clipped_policy_loss

repeatable = settings(deadline=None, derandomize=True, max_examples=60)


def reference_policy_loss(logp: float, old: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """PPO with dual clip, one token, from the papers' min form (a gain to maximize)."""
    ratio = math.exp(max(-20.0, min(20.0, logp - old)))
    gain = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    if dual is not None and advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


finite = st.floats(-3, 3, width=32)


@repeatable
@given(
    st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 2), st.none() | st.floats(1.5, 5)
)
def test_policy_loss_equals_scalar_reference(tokens: list[tuple[float, float, float]], low: float, high: float, dual: float | None) -> None:
    logp, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    terms = clipped_policy_loss(logp, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    expected = [reference_policy_loss(*token, low, high, dual) for token in tokens]
    np.testing.assert_allclose(terms.loss.numpy(), expected, rtol=1e-9, atol=1e-9)


def gradient_of_token(log_ratio: float, advantage: float, dual: float | None = None) -> tuple[float, bool]:
    logp = torch.tensor([log_ratio], requires_grad=True)
    terms = clipped_policy_loss(logp, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.3, dual_clip=dual)
    terms.loss.sum().backward()
    assert logp.grad is not None
    return float(logp.grad), bool(terms.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "clipped"),
    [
        (1.0, 1.0, None, False),
        (1.25, 1.0, None, False),  # inside the higher upper bound
        (1.35, 1.0, None, True),
        (0.75, 1.0, None, False),  # moving back is always allowed
        (0.75, -1.0, None, True),
        (1.35, -1.0, None, False),
        (4.0, -1.0, 3.0, True),
        (2.0, -1.0, 3.0, False),
    ],
)
def test_clip_removes_exactly_the_gradient_it_reports(ratio: float, advantage: float, dual: float | None, clipped: bool) -> None:
    gradient, reported = gradient_of_token(math.log(ratio), advantage, dual)
    assert reported is clipped
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-5)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    assert gradient_of_token(0.0, 1.7)[0] == pytest.approx(-1.7)


def test_huge_log_ratio_stays_finite() -> None:
    terms = clipped_policy_loss(torch.tensor([500.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(terms.loss).all()
    assert terms.log_ratio.item() == 1000.0


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        (KLEstimator.K1, lambda p, q: p - q),
        (KLEstimator.K2, lambda p, q: (p - q) ** 2 / 2),
        (KLEstimator.K3, lambda p, q: math.exp(q - p) - (q - p) - 1),
        (KLEstimator.ABS, lambda p, q: abs(q - p)),
    ],
)
def test_kl_terms_equal_their_formula(estimator: KLEstimator, formula) -> None:  # type: ignore[no-untyped-def]
    policy, reference = [-1.0, -2.5, -0.1], [-1.5, -2.0, -0.1]
    terms = kl_terms(torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), estimator)
    np.testing.assert_allclose(terms.numpy(), [formula(p, q) for p, q in zip(policy, reference, strict=True)], atol=1e-12)


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_unbiased_kl_estimators_average_to_the_exact_divergence(estimator: KLEstimator) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    expectation = (policy * kl_terms(policy.log(), reference.log(), estimator)).sum()
    assert expectation.item() == pytest.approx(exact.item(), abs=1e-12)


NORM_TOKENS = 7


def reference_aggregate(values: list[list[float]], masks: list[list[int]], aggregation: Aggregation) -> float:
    """The four means written with loops over sequences."""
    kept = [[v for v, m in zip(row, mask, strict=True) if m] for row, mask in zip(values, masks, strict=True)]
    kept = [row for row in kept if row]
    if aggregation is Aggregation.TOKEN_MEAN:
        return sum(sum(row) for row in kept) / sum(len(row) for row in kept)
    if aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return sum(sum(row) / len(row) for row in kept) / len(kept)
    return sum(sum(row) for row in kept) / len(kept) / (NORM_TOKENS if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else 1)


rows = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 1)), min_size=1, max_size=6), min_size=1, max_size=6).filter(
    lambda all_rows: any(mask for row in all_rows for _, mask in row)
)


def weights_of(masks: list[list[int]], aggregation: Aggregation, tokens: int, sequences: int) -> torch.Tensor:
    return token_weights(
        torch.tensor([m for row in masks for m in row], dtype=torch.float32),
        torch.tensor([len(row) for row in masks]),
        aggregation,
        global_tokens=tokens,
        global_sequences=sequences,
        norm_tokens=NORM_TOKENS,
    )


@repeatable
@given(rows, st.sampled_from(Aggregation))
def test_aggregation_equals_loops_over_sequences(all_rows: list[list[tuple[float, int]]], aggregation: Aggregation) -> None:
    values = [[v for v, _ in row] for row in all_rows]
    masks = [[m for _, m in row] for row in all_rows]
    weights = weights_of(masks, aggregation, sum(map(sum, masks)), sum(1 for row in masks if any(row)))
    flat = torch.tensor([v for row in values for v in row], dtype=torch.float64)
    assert float((flat * weights).sum()) == pytest.approx(reference_aggregate(values, masks, aggregation), abs=1e-4)


@repeatable
@given(rows, st.sampled_from(Aggregation), st.integers(0, 6))
def test_aggregation_does_not_depend_on_how_sequences_are_split(
    all_rows: list[list[tuple[float, int]]], aggregation: Aggregation, cut: int
) -> None:
    masks = [[m for _, m in row] for row in all_rows]
    tokens, sequences = sum(map(sum, masks)), sum(1 for row in masks if any(row))
    whole = weights_of(masks, aggregation, tokens, sequences)
    parts = [weights_of(part, aggregation, tokens, sequences) for part in (masks[:cut], masks[cut:]) if part]
    assert torch.equal(whole, torch.cat(parts))


def test_aggregation_refuses_local_instead_of_global_denominators() -> None:
    with pytest.raises(ValueError, match="holds 3 trained tokens in 2 sequences"):
        weights_of([[0, 1, 1], [1]], Aggregation.TOKEN_MEAN, 2, 2)
    with pytest.raises(ValueError, match="global_tokens=0"):
        weights_of([[0, 0]], Aggregation.TOKEN_MEAN, 0, 1)


def test_aggregation_by_a_constant_length_asks_for_it() -> None:
    with pytest.raises(ValueError, match="norm_tokens"):
        token_weights(
            torch.ones(1), torch.tensor([1]), Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, global_tokens=1, global_sequences=1, norm_tokens=None
        )
    with pytest.raises(ValueError, match="SeqMeanTokenSumNorm with norm_tokens None"):
        LossConfig(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kl_coefficient", -1.0),
        ("entropy_coefficient", -1.0),
        ("norm_tokens", 0),
    ],
)
def test_loss_config_names_the_bad_setting(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} is {value}"):
        LossConfig(**{setting: value})


def test_a_custom_loss_without_its_function_is_refused() -> None:
    with pytest.raises(ValueError, match="CustomLoss with function None"):
        LossConfig(policy=CustomLoss())


@pytest.mark.parametrize("bounds", [(-0.1, 2.0), (3.0, 2.0), (float("nan"), 2.0)])
def test_correction_configs_refuse_bounds_without_a_ratio_between(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=f"weight has low {bounds[0]} and high {bounds[1]}"):
        CorrectionWeightConfig(low=bounds[0], high=bounds[1])
    with pytest.raises(ValueError, match=f"mask has low {bounds[0]} and high {bounds[1]}"):
        CorrectionMaskConfig(low=bounds[0], high=bounds[1])
