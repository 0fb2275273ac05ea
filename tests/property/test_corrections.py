"""Laws of the loss for any lengths, masks, log-probs and settings: splitting changes nothing, and corrections keep their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.policy_loss import CISPOLoss, GSPOLoss, Kimi15Loss, PPOLoss, TISLoss, TOPRLoss, VanillaLoss
from rljob_api.vocabulary import Aggregation, CorrectionLevel, KLEstimator, ProximalPolicy
from rljob_runtime.losses.aggregate import token_weights
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.losses.correction import correct, level_ratio
from rljob_runtime.losses.objective import LossInputs, objective
from rljob_runtime.losses.spans import TokenSpans, span_index

repeatable = settings(deadline=None, derandomize=True, max_examples=80)

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6).filter(lambda rows: any(map(any, rows)))
levels = st.sampled_from(CorrectionLevel)
bounds = st.tuples(st.floats(0, 1), st.floats(1, 5))
clips = {"clipLow": st.floats(0, 1), "clipHigh": st.floats(0, 2)}
dual_clips = clips | {"dualClip": st.just(0.0) | st.floats(1.5, 5)}
policies = st.one_of(
    st.builds(PPOLoss, **dual_clips),
    st.builds(GSPOLoss, **dual_clips),
    st.builds(VanillaLoss),
    st.builds(TISLoss, **clips),
    st.builds(CISPOLoss, **clips, maskClipped=st.booleans()),
    st.builds(TOPRLoss, positiveWeight=st.floats(0, 2), negativeWeight=st.floats(0, 2)),
    st.builds(Kimi15Loss, tau=st.floats(0, 1)),
)
configs = st.builds(
    LossConfig,
    policy=policies,
    aggregation=st.sampled_from(Aggregation),
    norm_tokens=st.just(11),
    proximal=st.sampled_from(ProximalPolicy),
    weight=st.none() | st.builds(lambda level, b: CorrectionWeightConfig(level=level, low=b[0], high=b[1]), levels, bounds),
    masks=st.lists(st.builds(lambda level, b: CorrectionMaskConfig(level=level, low=b[0], high=b[1]), levels, bounds), max_size=2).map(
        tuple
    ),
    kl_coefficient=st.sampled_from((0.0, 0.3)),
    kl_estimator=st.sampled_from(KLEstimator),
    entropy_coefficient=st.sampled_from((0.0, 0.2)),
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sequences of a whole update: a mask a sequence, and random numbers a token or sequence."""

    rows: list[list[bool]]
    columns: torch.Tensor
    """Shape (6, T): log-probs, behavior, proximal, reference, advantages, entropies."""
    staleness: torch.Tensor
    scores: torch.Tensor
    sample_weights: torch.Tensor

    def part(self, rows: list[int]) -> Data:
        """Some of the sequences, in the given order."""
        ends = np.cumsum([len(row) for row in self.rows])
        tokens = [t for r in rows for t in range(ends[r] - len(self.rows[r]), ends[r])]
        return replace(
            self,
            rows=[self.rows[r] for r in rows],
            columns=self.columns[:, tokens],
            staleness=self.staleness[tokens],
            scores=self.scores[rows],
            sample_weights=self.sample_weights[rows],
        )


def make_data(rows: list[list[bool]], seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    total = sum(map(len, rows))
    return Data(
        rows=rows,
        columns=torch.randn(6, total, generator=generator, dtype=torch.float64),
        staleness=torch.randint(0, 4, (total,), generator=generator).double(),
        scores=torch.randn(len(rows), generator=generator),
        sample_weights=torch.rand(len(rows), generator=generator).double() * 2,
    )


def loss_and_gradient(data: Data, config: LossConfig, *, global_tokens: int, global_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This part's share of the loss, and its gradient in the log-probs and entropies, shape (2, T)."""
    mask = np.array([m for row in data.rows for m in row], dtype=np.float32)
    lengths = np.array([len(row) for row in data.rows])
    weights = token_weights(
        torch.from_numpy(mask),
        torch.from_numpy(lengths),
        config.aggregation,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        norm_tokens=config.norm_tokens,
    ).double()
    spans = span_index(mask, lengths)
    places = np.flatnonzero(mask)
    rows = torch.from_numpy(spans.sequence_ids[places])
    leaves = data.columns[[0, 5]].clone().requires_grad_()
    chosen = data.columns[:, places]
    inputs = LossInputs(
        behavior_logprobs=chosen[1],
        proximal_logprobs=chosen[2],
        reference_logprobs=chosen[3],
        advantages=chosen[4],
        weights=weights[places],
        policy_weights=weights[places] * data.sample_weights[rows],
        staleness=data.staleness[places],
        scores=data.scores[rows],
        spans=spans.of(places),
    )
    logprobs, entropy = leaves[:, places]
    entropy_used = entropy if config.entropy_coefficient else None
    result = objective(logprobs, inputs, config, kl_coefficient=config.kl_coefficient, entropy=entropy_used)
    (gradient,) = torch.autograd.grad(result.loss, leaves)
    return result.loss.detach(), gradient


@repeatable
@given(masks, configs, st.integers(0, 10**6), st.data())
def test_any_split_gives_the_same_loss_and_gradient(rows: list[list[bool]], config: LossConfig, seed: int, draw: st.DataObject) -> None:
    """Over ranks and micro-batches alike: both only hold some of the sequences, in some order."""
    data = make_data(rows, seed)
    denominators = {"global_tokens": sum(map(sum, rows)), "global_sequences": sum(map(any, rows))}
    whole_loss, whole_gradient = loss_and_gradient(data, config, **denominators)
    order = draw.draw(st.permutations(range(len(rows))))
    cut = draw.draw(st.integers(0, len(rows)))
    ends = np.cumsum([len(row) for row in rows])
    loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole_gradient)
    for part in (order[:cut], order[cut:]):
        if not any(any(rows[r]) for r in part):
            continue
        tokens = [t for r in part for t in range(ends[r] - len(rows[r]), ends[r])]
        part_loss, gradient[:, tokens] = loss_and_gradient(data.part(part), config, **denominators)
        loss += part_loss
    torch.testing.assert_close(loss, whole_loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-9, atol=1e-9)


@repeatable
@given(masks, configs, st.integers(0, 10**6))
def test_tokens_that_are_not_trained_get_no_gradient(rows: list[list[bool]], config: LossConfig, seed: int) -> None:
    _, gradient = loss_and_gradient(make_data(rows, seed), config, global_tokens=sum(map(sum, rows)), global_sequences=sum(map(any, rows)))
    untrained = ~torch.tensor([m for row in rows for m in row])
    assert torch.isfinite(gradient).all()
    assert not gradient[:, untrained].any()


def spans_of(lengths: list[int]) -> TokenSpans:
    return TokenSpans(sequences=tuple(lengths), segments=tuple(lengths))


sequences = st.lists(st.lists(st.floats(-30, 30), min_size=1, max_size=5), min_size=1, max_size=5)


@repeatable
@given(sequences, levels, bounds, levels, bounds)
def test_factors_lie_in_their_bounds_or_are_zero(
    rows: list[list[float]], level: CorrectionLevel, low_high: tuple[float, float], mask_level: CorrectionLevel, inside: tuple[float, float]
) -> None:
    spans = spans_of([len(row) for row in rows])
    difference = torch.tensor([d for row in rows for d in row], dtype=torch.float64)
    config = LossConfig(
        weight=CorrectionWeightConfig(level=level, low=low_high[0], high=low_high[1]),
        masks=(CorrectionMaskConfig(level=mask_level, low=inside[0], high=inside[1]),),
    )
    result = correct(difference, torch.zeros_like(difference), config, spans)
    assert result is not None
    assert result.weight is not None
    assert result.kept is not None
    assert ((result.weight >= low_high[0]) & (result.weight <= low_high[1])).all()
    ratio = level_ratio(difference, mask_level, spans)
    assert torch.equal(result.kept, (ratio >= inside[0]) & (ratio <= inside[1]))
    assert torch.equal(result.factor, torch.where(result.kept, result.weight, 0.0))


@repeatable
@given(sequences)
def test_levels_agree_where_they_must(rows: list[list[float]]) -> None:
    lengths = [len(row) for row in rows]
    spans = spans_of(lengths)
    difference = torch.tensor([d / 10 for row in rows for d in row], dtype=torch.float64)
    ratio = {level: level_ratio(difference, level, spans) for level in CorrectionLevel}
    torch.testing.assert_close(ratio[CorrectionLevel.SEGMENT], ratio[CorrectionLevel.GEOMETRIC])  # one stretch a sequence
    counts = torch.tensor([float(n) for n in lengths for _ in range(n)], dtype=torch.float64)
    torch.testing.assert_close(ratio[CorrectionLevel.GEOMETRIC] ** counts, ratio[CorrectionLevel.SEQUENCE])
    for tokens, mean in zip(ratio[CorrectionLevel.TOKEN].split(lengths), ratio[CorrectionLevel.GEOMETRIC].split(lengths), strict=True):
        assert tokens.min() * (1 - 1e-9) <= mean[0] <= tokens.max() * (1 + 1e-9)


@pytest.mark.parametrize("level", CorrectionLevel)
@repeatable
@given(sequences)
def test_on_policy_nothing_is_corrected(level: CorrectionLevel, rows: list[list[float]]) -> None:
    logprobs = torch.tensor([d for row in rows for d in row])
    config = LossConfig(weight=CorrectionWeightConfig(level=level), masks=(CorrectionMaskConfig(level=level),))
    result = correct(logprobs, logprobs, config, spans_of([len(row) for row in rows]))
    assert result is not None
    assert (result.factor == 1.0).all()
