"""A trainer rank with every option of the loss: gradients against a loss on full logits, metrics of options that are on, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_api.v1alpha1.policy_loss import LOSS_SETTINGS, CustomLoss, GSPOLoss, LossSettings, PPOLoss, TOPRLoss
from rljob_api.vocabulary import Aggregation, CorrectionLevel, ProximalPolicy
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.records import TrainBatch
from rljob_runtime.report.names import require_registered
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from tests.support.rounding import assert_gradients_equal
from tests.support.trainers import VOCAB, StartPolicy, one_at_a_time, policy, save_model, tiny_qwen2

OPTIONAL = {
    "train/entropy",
    "train/correction_weight_mean",
    "train/correction_weight_clipped_fraction",
    "train/correction_masked_fraction",
    "train/effective_sample_size",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen2(), seed=3)


@pytest.fixture
def start(model_folder: Path) -> Iterator[StartPolicy]:
    with one_at_a_time(lambda loss, **settings: policy(model_folder, loss=loss, **settings)) as start:
        yield start


def make_batch(seed: int = 0) -> TrainBatch:
    """Random sequences with two turns each, one of them without a trained token; behavior log-probs near uniform."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 15, 9).astype(np.int32)
    total = int(lengths.sum())
    mask = np.zeros(total, np.float32)
    for begin, length in zip((np.cumsum(lengths) - lengths)[:-1], lengths[:-1], strict=True):
        mask[begin + 2 : begin + length] = 1.0
        mask[begin + 3] = 0.0
    noise = rng.normal(0, 0.4, (3, total)).astype(np.float32)
    behavior, proximal, reference = (noise - np.float32(np.log(VOCAB))) * mask
    return TrainBatch(
        token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        lengths=lengths,
        response_mask=mask,
        behavior_logprobs=behavior,
        proximal_logprobs=proximal,
        reference_logprobs=reference,
        staleness=(rng.integers(0, 4, total) * mask).astype(np.float32),
        advantages=rng.normal(0, 1, total).astype(np.float32) * mask,
        scores=rng.normal(0, 1, 9).astype(np.float32),
        sample_weights=rng.uniform(0.5, 2, 9).astype(np.float32),
        temperature=0.8,
        global_tokens=int(mask.sum()),
        global_sequences=8,
        version=0,
    )


def gradients(worker: PolicyWorker, batch: TrainBatch) -> dict[str, torch.Tensor]:
    device = torch.device("cpu")
    (prepared,) = prepare_batches([batch], worker.config, device)
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(device), fresh=True)
    result = {name: p.grad.full_tensor().clone() for name, p in worker.model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    worker.model.zero_grad(set_to_none=True)
    return result


EVERYTHING = LossConfig(
    policy=GSPOLoss(clipLow=0.2, clipHigh=0.2),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
    norm_tokens=10,
    proximal=ProximalPolicy.RECOMPUTE,
    weight=CorrectionWeightConfig(level=CorrectionLevel.SEGMENT, low=0.7, high=1.2),
    masks=(CorrectionMaskConfig(level=CorrectionLevel.GEOMETRIC, low=0.8, high=1.25),),
    kl_coefficient=0.2,
    entropy_coefficient=0.1,
)


def test_gradients_equal_a_loss_written_out_on_full_logits(start: StartPolicy, model_folder: Path) -> None:
    batch = dataclasses.replace(make_batch(), kl_coefficient=0.5)
    assert batch.proximal_logprobs is not None
    assert batch.reference_logprobs is not None
    assert batch.sample_weights is not None
    got = gradients(start(EVERYTHING, token_budget=30, logprob_chunk_tokens=7), batch)
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loss, begin, rejected = torch.zeros(()), 0, 0
    for length, sample_weight in zip(batch.lengths.tolist(), batch.sample_weights.tolist(), strict=True):
        part = slice(begin, begin + length)
        begin += length
        keep = torch.from_numpy(batch.response_mask[part])[1:] > 0
        if not keep.any():
            continue
        tokens = torch.from_numpy(batch.token_ids[part]).long()
        everything = (plain(tokens[None], use_cache=False).logits[0, :-1] / 0.8).log_softmax(-1)
        logp = everything.gather(1, tokens[1:, None]).squeeze(1)[keep]
        entropy = -(everything.exp() * everything).sum(-1)[keep]
        behavior, proximal, advantage, reference = (
            torch.from_numpy(a[part])[1:][keep]
            for a in (batch.behavior_logprobs, batch.proximal_logprobs, batch.advantages, batch.reference_logprobs)
        )
        ratio = (logp - proximal).mean().exp().detach() * (logp - logp.detach()).exp()
        terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        shift = proximal - behavior
        turns = torch.cat([shift[:1], shift[1:].mean().expand(len(shift) - 1)])  # one token, the gap, the rest
        inside = 0.8 <= float(shift.mean().exp()) <= 1.25
        rejected += 0 if inside else len(shift)
        terms = terms * turns.exp().clamp(0.7, 1.2) * sample_weight * inside
        difference = reference - logp
        terms = terms + 0.5 * (difference.exp() - difference - 1) - 0.1 * entropy
        loss = loss + terms.sum() / 10 / batch.global_sequences
    assert 0 < rejected < batch.global_tokens
    loss.backward()
    assert_gradients_equal(got, {name: parameter.grad for name, parameter in plain.named_parameters()})


@pytest.mark.parametrize("kind", [kind for kind in LOSS_SETTINGS.values() if kind is not CustomLoss])
@pytest.mark.parametrize("proximal", ProximalPolicy)
def test_micro_batches_do_not_change_gradients(start: StartPolicy, kind: type[LossSettings], proximal: ProximalPolicy) -> None:
    loss = LossConfig(
        policy=kind(),
        proximal=proximal,
        weight=CorrectionWeightConfig(level=CorrectionLevel.SEQUENCE),
        masks=(CorrectionMaskConfig(level=CorrectionLevel.SEGMENT, low=0.5, high=2.0),),
        entropy_coefficient=0.1,
    )
    batch = make_batch()
    whole = gradients(start(loss), batch)
    parts = gradients(start(loss, token_budget=20), batch)
    assert_gradients_equal(parts, whole)


def test_metrics_of_options_come_with_them(start: StartPolicy) -> None:
    batch = make_batch()
    plain = start(LossConfig()).train_step([batch], step=0)
    assert not OPTIONAL & set(plain)
    worker = start(EVERYTHING, token_budget=30)
    metrics = worker.train_step([batch], step=0)
    require_registered(metrics)
    assert set(metrics) == set(plain) | OPTIONAL
    assert batch.proximal_logprobs is not None
    kept = batch.response_mask > 0
    shift = (batch.proximal_logprobs - batch.behavior_logprobs).astype(np.float64)
    rows = np.repeat(np.arange(9), batch.lengths)
    factor, weights = [], []
    for row in range(8):
        of_row = shift[kept & (rows == row)]
        ratio = np.exp(np.concatenate([of_row[:1], np.full(of_row.size - 1, of_row[1:].mean())]))
        weights.append(np.clip(ratio, 0.7, 1.2))
        factor.append(weights[-1] * (0.8 <= np.exp(of_row.mean()) <= 1.25))
    used, weight = np.concatenate(factor), np.concatenate(weights)
    assert metrics["train/correction_weight_mean"] == pytest.approx(weight.mean(), rel=1e-5)
    assert metrics["train/correction_weight_clipped_fraction"] == pytest.approx(np.isin(weight, (0.7, 1.2)).mean())
    assert metrics["train/correction_masked_fraction"] == pytest.approx((used == 0).mean())
    assert metrics["train/effective_sample_size"] == pytest.approx(used.sum() ** 2 / used.size / (used**2).sum(), rel=1e-5)
    assert 0 < metrics["train/entropy"] <= np.log(VOCAB)
    # against the engines, not against the proximal policy that the ratio compares with
    assert metrics["mismatch/kl_k3"] == pytest.approx(plain["mismatch/kl_k3"], abs=1e-6)


def test_ratio_metrics(start: StartPolicy) -> None:
    batch = make_batch()
    worker = start(LossConfig(policy=PPOLoss(clipLow=0.1, clipHigh=0.1)))
    logprobs = worker.compute_logprobs(batch.token_ids, batch.lengths, batch.temperature, wanted=batch.response_mask)
    kept = batch.response_mask > 0
    ratio = np.exp((logprobs - batch.behavior_logprobs)[kept].astype(np.float64))
    advantage = batch.advantages[kept]
    metrics = worker.train_step([batch], step=0)
    assert metrics["train/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics["train/ratio_std"] == pytest.approx(ratio.std(), rel=1e-4)
    assert metrics["train/clip_low_fraction"] == pytest.approx(((ratio < 0.9) & (advantage < 0)).mean())
    assert metrics["train/clip_high_fraction"] == pytest.approx(((ratio > 1.1) & (advantage > 0)).mean())
    assert metrics["train/clip_fraction"] == pytest.approx(metrics["train/clip_low_fraction"] + metrics["train/clip_high_fraction"])


def test_a_batch_may_carry_its_own_kl_coefficient(start: StartPolicy) -> None:
    batch = make_batch()
    worker = start(LossConfig(kl_coefficient=0.1))
    fixed = gradients(start(LossConfig(kl_coefficient=0.4)), batch)
    adapted = gradients(start(worker.config.loss), dataclasses.replace(batch, kl_coefficient=0.4))
    assert all(torch.equal(adapted[name], gradient) for name, gradient in fixed.items())


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (LossConfig(kl_coefficient=0.1), "reference_logprobs"),
        (LossConfig(proximal=ProximalPolicy.RECOMPUTE), "proximal_logprobs"),
        (LossConfig(proximal=ProximalPolicy.INTERPOLATE), "staleness"),
        (LossConfig(policy=TOPRLoss()), "scores"),
    ],
)
def test_a_batch_without_what_the_loss_asks_for_is_refused(start: StartPolicy, loss: LossConfig, field: str) -> None:
    worker, batch = start(loss), make_batch()
    with pytest.raises(ValueError, match=f"the batch has no {field}"):
        worker.train_step([dataclasses.replace(batch, **{field: None})], step=0)
    with pytest.raises(ValueError, match=f"{field} have shape"):
        worker.train_step([dataclasses.replace(batch, **{field: np.zeros(3, np.float32)})], step=0)
