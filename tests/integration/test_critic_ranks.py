"""Two critic ranks, data-parallel or tensor-parallel, against one: gradients, metrics, values, offload, checkpoints across layouts.

The ranks are real processes over gloo, forks of this file's script (``rank_processes``), and the tests read what rank 0 wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import TrainBatch
from rljob_runtime.training import model
from rljob_runtime.training.critic import CriticWorker
from rljob_runtime.training.critic_config import CriticConfig
from rljob_runtime.training.value_step import prepare_values
from tests.integration.rank_processes import fork_ranks, join, run_script
from tests.integration.test_critic import full_weights, gradients, make_batch, set_head
from tests.support.ports import free_port, free_ports
from tests.support.rounding import assert_gradients_equal
from tests.support.trainers import save_model, tiny_qwen2

LAYOUTS = {"one": (1, 1), "data-parallel": (2, 1), "tensor-parallel": (1, 2)}
"""Data-parallel and tensor-parallel ranks."""
UNITS = {"by-layer": 0, "one-unit": model.ONE_UNIT_BYTES}
TWO = [layout for layout in LAYOUTS if layout != "one"]
NUM_PORTS = len(UNITS) * len(TWO)


def part(batch: TrainBatch, rank: int, world_size: int) -> TrainBatch:
    """This rank's sequences; the last rank gets two only, so that the others have more micro-batches."""
    if world_size == 1:
        return batch
    rows = np.arange(batch.lengths.size) < batch.lengths.size - 2
    rows = rows if rank == 0 else ~rows
    kept = np.repeat(rows, batch.lengths)
    assert batch.values is not None
    assert batch.returns is not None
    return TrainBatch(
        token_ids=batch.token_ids[kept],
        lengths=batch.lengths[rows],
        response_mask=batch.response_mask[kept],
        behavior_logprobs=batch.behavior_logprobs[kept],
        advantages=batch.advantages[kept],
        values=batch.values[kept],
        returns=batch.returns[kept],
        global_tokens=batch.global_tokens,
        global_sequences=batch.global_sequences,
        version=0,
    )


def run_rank(rank: int, layout: str, port: int, model_folder: str, out: Path, resume_from: str | None = None) -> None:
    """What one rank does; rank 0 leaves ``result.npz`` and ``metrics.json`` in ``out``."""
    dp_size, tp_size = LAYOUTS[layout]
    clip = ValueLossConfig(value_clip=0.5)
    config = CriticConfig(model_path=model_folder, learning_rate=1e-3, token_budget=20, value=clip, tensor_parallel_size=tp_size)
    worker = CriticWorker(config, rank, dp_size * tp_size)
    join(worker, port)

    def mine(seed: int) -> TrainBatch:
        return part(make_batch(seed), rank // tp_size, dp_size)

    try:
        if resume_from is not None:
            worker.load_checkpoint(resume_from)
            (out / "metrics.json").write_text(json.dumps([worker.train_step([mine(2)], 2)]))
            return
        set_head(worker)
        (prepared,) = prepare_values([mine(0)], config, torch.device("cpu"), worker.ready.costs)
        assert any(micro.is_filler for micro in prepared.micro_batches) is (rank // tp_size == 1)  # it has two sequences only
        arrays = {f"grad/{name}": gradient.numpy() for name, gradient in gradients(worker, mine(0)).items()}
        metrics = [worker.train_step([mine(seed), mine(seed + 9)], seed) for seed in range(2)]
        batch, nothing = make_batch(3), np.zeros(0, np.int32)
        scored = (batch.token_ids, batch.lengths, batch.response_mask)
        arrays["values"] = worker.compute_values(*(scored if rank < tp_size else (nothing, nothing, np.zeros(0, np.float32))))
        before = full_weights(worker)
        worker.offload(StateKind)
        worker.load(StateKind)
        assert all((weight == before[name]).all() for name, weight in full_weights(worker).items())
        worker.save_checkpoint(out / "checkpoint")
        metrics.append(worker.train_step([mine(2)], 2))
        if rank == 0:
            np.savez(out / "result.npz", **arrays)
            (out / "metrics.json").write_text(json.dumps(metrics))
    finally:
        worker.shutdown()


def run_layouts(rank: int, layouts: list[str], ports: list[int], folder: Path) -> None:
    """Layouts one after another, in each kind of unit."""
    for unit, size in UNITS.items():
        for layout in layouts:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model, "ONE_UNIT_BYTES", size)
                run_rank(rank, layout, ports.pop(), str(folder / "model"), folder / unit / layout)


def main(rank: int, ports: list[int], folder: Path) -> None:
    run_layouts(rank, TWO, ports, folder)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model, and of results by unit and layout."""
    folder = tmp_path_factory.mktemp("ranks")
    save_model(folder / "model", tiny_qwen2(tie_word_embeddings=True, vocab_size=62), seed=3)  # even, so that the embedding is divided too
    for unit in UNITS:
        for layout in LAYOUTS:
            (folder / unit / layout).mkdir(parents=True)
    run_script(__file__, folder)
    run_layouts(0, ["one"], free_ports(len(UNITS)), folder)
    return folder


@pytest.fixture(params=["by-layer", "one-unit"])
def runs(request: pytest.FixtureRequest, everything: Path) -> dict[str, Path]:
    """Folder of results by layout."""
    return {layout: everything / request.param / layout for layout in LAYOUTS}


def arrays(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "result.npz") as data:
        return {name: data[name] for name in data.files}


def metrics(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "metrics.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", TWO)
def test_gradients_and_values_do_not_depend_on_the_ranks(runs: dict[str, Path], layout: str) -> None:
    one, two = arrays(runs["one"]), arrays(runs[layout])
    assert one.keys() == two.keys()
    assert {"grad/value_head.weight", "grad/model.embed_tokens.weight", "values"} <= one.keys()
    assert np.abs(one["grad/model.embed_tokens.weight"]).max() > 1e-3
    np.testing.assert_allclose(two.pop("values"), one.pop("values"), atol=1e-4, rtol=0)
    assert_gradients_equal(two, one)


@pytest.mark.parametrize("layout", TWO)
def test_metrics_do_not_depend_on_the_ranks(runs: dict[str, Path], layout: str) -> None:
    one, two = metrics(runs["one"]), metrics(runs[layout])
    for name, value in one[0].items():
        # the second update comes after a step of Adam, which amplifies rounding where gradients are near eps
        assert two[0][name] == pytest.approx(value, abs=1e-5), name
    assert [m["critic/loss"] for m in two] == pytest.approx([m["critic/loss"] for m in one], abs=1e-4)


@pytest.mark.parametrize("saved_by", list(LAYOUTS))
def test_one_rank_resumes_from_any_layout(runs: dict[str, Path], everything: Path, saved_by: str, tmp_path: Path) -> None:
    run_rank(0, "one", free_port(), str(everything / "model"), tmp_path, resume_from=str(runs[saved_by] / "checkpoint"))
    expected = metrics(runs[saved_by])[2]["critic/loss"]
    assert metrics(tmp_path)[0]["critic/loss"] == (expected if saved_by == "one" else pytest.approx(expected, abs=1e-6))


if __name__ == "__main__":
    fork_ranks(2, NUM_PORTS, main)
