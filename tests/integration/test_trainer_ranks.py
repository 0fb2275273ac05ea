"""Two data-parallel ranks against one: gradients, losses, log-probs, packed weights, checkpoints across numbers of ranks.

The ranks are real processes over gloo, forks of this file's script (``rank_processes``), and the tests read what rank 0 wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rljob_api.vocabulary import Aggregation
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.records import TrainBatch
from rljob_runtime.training import model
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets, unpack
from rljob_runtime.weightsync.parcel import checksum
from rljob_runtime.weightsync.shares import shared_out
from tests.integration.rank_processes import fork_ranks, join, run_script
from tests.support.ports import free_port
from tests.support.rounding import LOGPROBS, assert_gradients_equal
from tests.support.trainers import VOCAB, save_model, tiny_qwen2

UNITS = {"sharded by layer": 0, "one unit": model.ONE_UNIT_BYTES}


def make_model(folder: Path) -> None:
    save_model(folder, tiny_qwen2(tie_word_embeddings=True), seed=5)


def make_batch(rank: int, world_size: int, seed: int = 0) -> TrainBatch:
    """This rank's part of one global batch; the last rank gets two sequences only, so that the others have more micro-batches.

    There are three prompts, so that ranks share them, each as it sees fit.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 14, 11).astype(np.int32)
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    mask = np.zeros(total, np.float32)
    for begin, length in zip(starts, lengths, strict=True):
        mask[begin + 3 : begin + length] = 1.0
    tokens = rng.integers(0, VOCAB, total).astype(np.int32)
    for index, begin in enumerate(starts):
        tokens[begin : begin + 3] = (7, 11 + index % 3, 5)
    behavior = (rng.normal(-np.log(VOCAB), 0.2, total).astype(np.float32)) * mask
    advantages = rng.normal(0, 1, total).astype(np.float32) * mask
    rows = np.arange(11) if world_size == 1 else (np.arange(9), np.arange(9, 11))[rank]
    kept = np.isin(np.repeat(np.arange(11), lengths), rows)
    return TrainBatch(
        token_ids=tokens[kept],
        lengths=lengths[rows],
        response_mask=mask[kept],
        behavior_logprobs=behavior[kept],
        advantages=advantages[kept],
        global_tokens=int(mask.sum()),
        global_sequences=11,
        version=0,
    )


def run_rank(rank: int, world_size: int, port: int, model_folder: str, out: Path, resume_from: str | None = None) -> None:
    """What one rank does; rank 0 leaves ``result.npz`` and ``metrics.json`` in ``out``."""
    loss = LossConfig(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    worker = PolicyWorker(PolicyConfig(model_path=model_folder, learning_rate=1e-3, token_budget=26, loss=loss), rank, world_size)
    join(worker, port)
    try:
        if resume_from is not None:
            worker.load_checkpoint(resume_from)
            metrics = [worker.train_step([make_batch(rank, world_size, seed=2)], step=2)]
            (out / "metrics.json").write_text(json.dumps(metrics))
            return
        everything = make_batch(0, 1)
        arrays = {"logprobs": worker.compute_logprobs(everything.token_ids, everything.lengths, 0.9)}
        empty = np.zeros(0, np.int32)
        worker.compute_logprobs(*((everything.token_ids, everything.lengths) if rank == 0 else (empty, empty)), 1.0)

        cpu = torch.device("cpu")
        (prepared,) = prepare_batches([make_batch(rank, world_size)], worker.config, cpu, worker.ready.costs)
        shared = any(np.unique(micro.positions).size < micro.positions.size for micro in prepared.micro_batches)
        assert shared is (rank == 0)  # the two of rank 1 differ in prompts
        accumulate_gradients(worker.model, prepared, worker.config, StepMeter(cpu), fresh=True)
        arrays |= {f"grad/{n}": p.grad.full_tensor().numpy().copy() for n, p in worker.model.named_parameters()}  # type: ignore[union-attr]
        worker.model.zero_grad(set_to_none=True)

        metrics = [worker.train_step([make_batch(rank, world_size, seed)], step=seed) for seed in range(2)]
        manifest = plan_buckets(worker.weight_specs(), bucket_bytes=6000)
        checksums: dict[int, int] = {}
        for bucket in manifest.buckets:
            data = worker.pack_buckets({0: bucket})
            assert (data is not None) is (rank == 0)
            arrays |= {} if data is None else {f"packed/{name}": tensor.numpy().copy() for name, tensor in unpack(bucket, data)}
        for part in shared_out(manifest, range(world_size)):  # each rank its own, several at the same time
            data = worker.pack_buckets(part)
            assert (data is not None) is (rank in part)
            if data is not None:
                own = part[rank]
                checksums |= {own.index: checksum(data)}
        for index, bucket in enumerate(manifest.buckets):
            whole = worker.pack_buckets({index % world_size: bucket})
            assert (whole is None) is (index not in checksums)
            assert whole is None or checksum(whole) == checksums[index]
        arrays |= {f"weight/{n}": p.full_tensor().detach().numpy().copy() for n, p in worker.model.named_parameters()}  # type: ignore[attr-defined]
        worker.begin_checkpoint(out / "checkpoint")
        worker.export_hf(out / "export")
        metrics.append(worker.train_step([make_batch(rank, world_size, seed=2)], step=2))
        worker.finish_checkpoint(60.0)
        if rank == 0:
            np.savez(out / "result.npz", **arrays)
            (out / "metrics.json").write_text(json.dumps(metrics))
    finally:
        worker.shutdown()


def main(rank: int, ports: list[int], base: Path) -> None:
    for unit, size in UNITS.items():
        model.ONE_UNIT_BYTES = size
        run_rank(rank, 2, ports.pop(), str(base / "model"), base / unit)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model, of what one rank makes of it, and of what two do, by the unit of sharding."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "model")
    for name in ("one", *UNITS):
        (folder / name).mkdir()
    run_script(__file__, folder)
    run_rank(0, 1, free_port(), str(folder / "model"), folder / "one")
    return folder


@pytest.fixture(params=list(UNITS))
def runs(request: pytest.FixtureRequest, base: Path) -> dict[int, Path]:
    """Folder of results by number of ranks."""
    return {1: base / "one", 2: base / request.param}


def load(runs: dict[int, Path], world_size: int, prefix: str) -> dict[str, np.ndarray]:
    with np.load(runs[world_size] / "result.npz") as data:
        return {name: data[name] for name in data.files if name.startswith(prefix)}


def metrics(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "metrics.json").read_text())  # type: ignore[no-any-return]


def test_gradients_do_not_depend_on_the_number_of_ranks(runs: dict[int, Path]) -> None:
    one, two = load(runs, 1, "grad/"), load(runs, 2, "grad/")
    assert max(np.abs(g).max() for g in one.values()) > 1e-3
    assert_gradients_equal(two, one)


def test_metrics_do_not_depend_on_the_number_of_ranks(runs: dict[int, Path]) -> None:
    one, two = metrics(runs[1]), metrics(runs[2])
    assert two[0]["train/micro_batches"] != one[0]["train/micro_batches"]
    for name, value in one[0].items():
        if not name.startswith("time/") and name != "train/micro_batches":
            assert two[0][name] == pytest.approx(value, abs=2e-6), name
    # later steps: Adam amplifies rounding where gradients are near eps
    assert [m["train/total_loss"] for m in two] == pytest.approx([m["train/total_loss"] for m in one], abs=1e-5)


def test_logprobs_do_not_depend_on_the_number_of_ranks(runs: dict[int, Path]) -> None:
    np.testing.assert_allclose(load(runs, 2, "logprobs")["logprobs"], load(runs, 1, "logprobs")["logprobs"], **LOGPROBS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_packed_bytes_equal_full_weights(runs: dict[int, Path], world_size: int) -> None:
    packed, weights = load(runs, world_size, "packed/"), load(runs, world_size, "weight/")
    assert {n.removeprefix("packed/") for n in packed} == {n.removeprefix("weight/") for n in weights}
    for name, value in packed.items():
        assert np.array_equal(value, weights[name.replace("packed/", "weight/")]), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_export_equals_full_weights(runs: dict[int, Path], world_size: int) -> None:
    weights = load(runs, world_size, "weight/")
    loaded = Qwen2ForCausalLM.from_pretrained(runs[world_size] / "export", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), weights[f"weight/{name}"]), name


@pytest.mark.parametrize("saved_by", [1, 2])
def test_one_rank_resumes_from_any_number_of_ranks(runs: dict[int, Path], saved_by: int, tmp_path: Path) -> None:
    worker_out = tmp_path / "resumed"
    worker_out.mkdir()
    run_rank(0, 1, free_port(), str(runs[1].parent / "model"), worker_out, resume_from=str(runs[saved_by] / "checkpoint"))
    expected = metrics(runs[saved_by])[2]["train/total_loss"]
    assert metrics(worker_out)[0]["train/total_loss"] == (expected if saved_by == 1 else pytest.approx(expected, abs=1e-6))


if __name__ == "__main__":
    fork_ranks(2, len(UNITS), main)
