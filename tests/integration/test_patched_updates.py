"""Sparse updates of a real vLLM engine whose kernels read the parameters themselves, as those of GPUs do; on CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_runtime.engine.vllm.engine import VllmEngine
from tests.support.engine_bits import multiplied_bits
from tests.support.engine_contract import config_for, new_model, save, weights
from tests.support.sparse_updates import SparseUpdates, push_whole
from tests.support.vllm_engine import running

NORMS = "model.layers.0.input_layernorm.weight", "model.norm.weight"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    """Without packed copies of weights."""
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    monkeypatch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *shape: False)
    with running(config_for(save(new_model(tied=True, seed=0), tmp_path))) as engine:
        yield engine


def start() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights(new_model(tied=True, seed=0)).items()}


def exchange(worker: Any) -> None:
    """Make a worker's record wrong."""
    receiver, (one, other) = worker.weight_transfer_engine, NORMS
    places = receiver.plan.places
    receiver.plan = replace(receiver.plan, places={**places, one: places[other], other: places[one]})


def test_changes_are_written_and_nothing_is_loaded(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused projections and the tied head among them; the parameters end up as the only copy."""
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    sparse, now, other = SparseUpdates(engine), start(), weights(new_model(tied=True, seed=3))
    before = multiplied_bits(engine)
    sparse.push(now, 1)
    assert multiplied_bits(engine) == before
    assert sparse.copied_bytes() > 0
    whole = next(name for name in now if "layers.0" in name and "down_proj" in name)
    now[NORMS[0]].view(-1)[::3] *= -1.0
    sparse.push(now, 2)  # written, and compared with a load
    assert sparse.copied_bytes() == 0
    with monkeypatch.context() as patch:
        patch.setattr(BucketReceiver, "start_weight_update", None)
        for version in (3, 4):
            for name, tensor in now.items():
                tensor.view(-1)[version::50] = other[name].view(-1)[version::50]
            assert all(sparse.push(now, version))
        now[whole] = other[whole]  # its bucket travels whole
        assert set(sparse.push(now, 5)) == {True, False}
        now[NORMS[1]].view(-1)[::3] *= -1.0
        sparse.push(now, 6)
    after = multiplied_bits(engine)
    assert after != before
    push_whole(engine, now)
    assert multiplied_bits(engine) == after


def test_a_wrong_record_is_found_by_the_first_sparse_update_and_leaves_the_right_bits(
    engine: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Two norms of equal numbers whose places are exchanged: what the load leaves does not show it."""
    sparse, now = SparseUpdates(engine), start()
    sparse.push(now, 1)
    assert engine.loop is not None
    engine.loop.core.collective_rpc(exchange)
    one, other = NORMS
    now[one].view(-1)[::5] *= 2.0
    with caplog.at_level(logging.ERROR, "rljob_runtime"):
        sparse.push(now, 2)
    assert "left other bits than a load of the weights does in" in caplog.text
    after = multiplied_bits(engine)
    now[other].view(-1)[::5] *= 3.0
    sparse.push(now, 3)  # loaded from the copy
    assert sparse.copied_bytes() > 0
    loaded = multiplied_bits(engine)
    push_whole(engine, now)
    assert multiplied_bits(engine) == loaded != after
