"""A loss with every option on two data-parallel, tensor-parallel or context-parallel ranks against one: gradients and metrics."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rljob_api.v1alpha1.policy_loss import GSPOLoss
from rljob_api.vocabulary import Aggregation, CorrectionLevel, ProximalPolicy
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.records import TrainBatch
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.optimizer import clip_gradients
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.rank_processes import fork_ranks, full_gradients, join, random_batch, read, run_script, write
from tests.support.rounding import assert_gradients_equal

VOCAB = 62
LAYOUTS = {"1x1": (1, 1, 1), "2x1": (2, 1, 1), "1x2": (1, 2, 1), "divided": (1, 1, 2)}
"""By name dp, tp and cp."""
PARTS = {1: [slice(0, 11)], 2: [slice(0, 9), slice(9, 11)]}
LOSS = LossConfig(
    policy=GSPOLoss(clipLow=0.2, clipHigh=0.2),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
    norm_tokens=10,
    proximal=ProximalPolicy.INTERPOLATE,
    weight=CorrectionWeightConfig(level=CorrectionLevel.SEGMENT, low=0.9, high=1.1),
    masks=(CorrectionMaskConfig(level=CorrectionLevel.SEQUENCE, low=0.6, high=1.6),),
    entropy_coefficient=0.2,
)


def make_batch(part: slice) -> TrainBatch:
    batch = random_batch(VOCAB, part=part)
    weights = np.random.default_rng(1).uniform(0.5, 2, 11).astype(np.float32)[part]
    staleness = np.where(batch.token_ids % 3 == 0, 3, 2).astype(np.float32)
    return dataclasses.replace(batch, staleness=staleness, sample_weights=weights, temperature=0.8)


def run_layout(rank: int, port: int, base: Path, name: str) -> None:
    dp, tp, cp = LAYOUTS[name]
    config = PolicyConfig(
        model_path=str(base / "model"),
        eps=1e-3,
        token_budget=26 // cp,
        logprob_chunk_tokens=9,
        loss=LOSS,
        tensor_parallel_size=tp,
        context_parallel_size=cp,
    )
    worker = PolicyWorker(config, rank, dp * tp * cp)
    join(worker, port)
    batch = make_batch(PARTS[dp][rank // (tp * cp)])
    cpu = torch.device("cpu")
    (prepared,) = prepare_batches([batch], config, cpu, worker.ready.costs)
    accumulate_gradients(worker.model, prepared, config, StepMeter(cpu), fresh=True)
    clip_gradients(worker.model, None)  # completes them over tensor-parallel ranks
    arrays = {f"grad/{name}": gradient for name, gradient in full_gradients(worker).items()}
    worker.model.zero_grad(set_to_none=True)
    metrics = worker.train_step([batch], step=0)
    worker.shutdown()
    if rank == 0:
        metrics.pop("train/micro_batches")
        write(base, name, arrays | {f"metric/{k}": np.array(v) for k, v in metrics.items() if not k.startswith("time/")})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results: a file for each layout."""
    folder = tmp_path_factory.mktemp("losses")
    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    run_script(__file__, folder)
    return folder


@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_gradients_and_metrics_do_not_depend_on_the_layout(base: Path, name: str) -> None:
    assert_gradients_equal(read(base, name, "grad/"), read(base, "1x1", "grad/"))
    one, other = read(base, "1x1", "metric/"), read(base, name, "metric/")
    assert one.keys() == other.keys() != set()
    for key, expected in one.items():
        np.testing.assert_allclose(other[key], expected, rtol=1e-5, atol=5e-6, err_msg=key)


def test_the_options_act(base: Path) -> None:
    metrics = read(base, "1x1", "metric/")
    assert 0 < metrics["train/correction_masked_fraction"] < 1
    assert 0 < metrics["train/correction_weight_clipped_fraction"] < 1
    assert 0 < metrics["train/effective_sample_size"] < 1
    assert 0 < metrics["train/entropy"] < np.log(VOCAB)


def main(rank: int, ports: list[int], base: Path) -> None:
    """All layouts in turn, as far as they need this rank."""
    for name, sizes in LAYOUTS.items():
        port = ports.pop()
        if rank < math.prod(sizes):
            run_layout(rank, port, base, name)


if __name__ == "__main__":
    fork_ranks(2, len(LAYOUTS), main)
