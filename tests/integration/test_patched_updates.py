"""Sparse updates of a real vLLM engine whose kernels read the parameters themselves, as those of GPUs do; on CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.errors import WeightSyncError, WholeNeededError
from rljob_runtime.offload.states import StateKind
from tests.support.engine_bits import multiplied_bits
from tests.support.engine_contract import TIMEOUT_S, config_for, new_model, save, weights
from tests.support.sparse_updates import FetchedUpdates, SparseUpdates, push_whole
from tests.support.vllm_engine import forget_loads, running

BOTH = {StateKind.PARAMS, StateKind.KV_CACHE}
NORMS = "model.layers.0.input_layernorm.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Without packed copies of weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm._custom_ops._supports_onednn", False)
        patch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *shape: False)
        config = config_for(save(new_model(tied=True, seed=0), tmp_path_factory.mktemp("model")))
        with running(replace(config, release="discard")) as engine:
            yield engine


@pytest.fixture
def engine(started: VllmEngine) -> VllmEngine:
    """With the weights of its folder, and no record of how they are loaded."""
    push_whole(started, start())
    forget_loads(started)
    return started


def start() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights(new_model(tied=True, seed=0)).items()}


def exchange(worker: Any) -> None:
    """Make a worker's record wrong."""
    receiver, (one, other) = worker.weight_transfer_engine, NORMS
    places = receiver.plan.places
    receiver.plan = replace(receiver.plan, places={**places, one: places[other], other: places[one]})


def overwrite(worker: Any) -> None:
    """Leave nothing of what a worker's parameters had."""
    for parameter in worker.weight_transfer_engine.model.parameters():
        parameter.data.fill_(7.0)


@pytest.mark.parametrize("updates", [SparseUpdates, FetchedUpdates])
def test_changes_are_written_and_nothing_is_loaded(
    updates: type[SparseUpdates | FetchedUpdates], engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused projections and the tied head among them; the parameters end up as the only copy."""
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    sparse, now, other, version = updates(engine), start(), weights(new_model(tied=True, seed=3)), engine.version()
    before = multiplied_bits(engine)
    sparse.push(now, version + 1)
    assert multiplied_bits(engine) == before
    assert (sparse.copied_bytes() > 0) == (updates is SparseUpdates)
    whole = next(name for name in now if "layers.0" in name and "down_proj" in name)
    now[NORMS[0]].view(-1)[::3] *= -1.0
    sparse.push(now, version + 2)  # written, and compared with a load; or loaded, and compared with what would be written
    assert sparse.copied_bytes() == 0
    with monkeypatch.context() as patch:
        patch.setattr(BucketReceiver, "start_weight_update", None)
        for step in (3, 4):
            for name, tensor in now.items():
                tensor.view(-1)[step::50] = other[name].view(-1)[step::50]
            assert all(sparse.push(now, version + step))
        now[whole] = other[whole]  # its bucket travels whole
        assert set(sparse.push(now, version + 5)) == {True, False}
        now[NORMS[1]].view(-1)[::3] *= -1.0
        sparse.push(now, version + 6)
    assert sparse.copied_bytes() == 0
    after = multiplied_bits(engine)
    assert after != before
    push_whole(engine, now)
    assert multiplied_bits(engine) == after


@pytest.mark.parametrize("updates", [SparseUpdates, FetchedUpdates])
def test_a_wrong_record_is_found_by_the_second_update_and_leaves_the_right_bits(
    updates: type[SparseUpdates | FetchedUpdates], engine: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Two norms of equal numbers whose places are exchanged: what the load leaves does not show it."""
    sparse, now, version = updates(engine), start(), engine.version()
    sparse.push(now, version + 1)
    assert engine.loop is not None
    engine.loop.core.collective_rpc(exchange)
    one, other = NORMS
    now[one].view(-1)[::5] *= 2.0
    with caplog.at_level(logging.ERROR, "rljob_runtime"):
        sparse.push(now, version + 2)
    assert "left other bits than a load of the weights does in" in caplog.text
    after = multiplied_bits(engine)
    now[other].view(-1)[::5] *= 3.0
    if updates is FetchedUpdates:  # workers have no copies yet: all is sent again
        with pytest.raises(WholeNeededError, match="send it whole"):
            sparse.push(now, version + 3)
        sparse = updates(engine)
        assert [any(sparse.push(now, version + 3)) for _ in range(2)] == [False, False]
        now[other].view(-1)[::5] *= 0.5
    sparse.push(now, version + 4)  # loaded from the copy
    assert sparse.copied_bytes() > 0
    loaded = multiplied_bits(engine)
    push_whole(engine, now)
    assert multiplied_bits(engine) == loaded != after
    assert sparse.copied_bytes() == 0 or updates is SparseUpdates  # another end of a transport: workers freed them


@pytest.mark.parametrize("lent", [False, True])
def test_whole_updates_are_written_once_a_load_has_left_the_same_bits(
    lent: bool, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    forget_loads(engine, writes_whole=True)
    loaded = [weights(new_model(tied=True, seed=seed)) for seed in (1, 2)]
    for tensors in loaded:
        push_whole(engine, tensors, lent=lent)
    before = multiplied_bits(engine)
    with monkeypatch.context() as patch:
        patch.setattr(BucketReceiver, "start_weight_update", None)
        push_whole(engine, weights(new_model(tied=True, seed=3)), lent=lent)
        written = multiplied_bits(engine)
        push_whole(engine, loaded[1], lent=lent)
        assert multiplied_bits(engine) == before != written
    forget_loads(engine)
    push_whole(engine, weights(new_model(tied=True, seed=3)))
    assert multiplied_bits(engine) == written
    assert engine.stats()["reloaded_fraction"] == 0


@pytest.mark.parametrize("sparse", [False, True])
def test_parameters_that_were_discarded_are_written_whole(sparse: bool, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    forget_loads(engine, drops_copies=False, writes_whole=True)
    updates, version, now = SparseUpdates(engine) if sparse else None, engine.version(), start()
    for step in (1, 2, 3):
        now[NORMS[0]].view(-1)[::3] *= -1.0
        if updates is not None:
            updates.push(now, version + step)
        else:
            push_whole(engine, now)
    before = multiplied_bits(engine)
    engine.offload(BOTH, TIMEOUT_S)
    engine.load(BOTH, TIMEOUT_S)
    assert engine.loop is not None
    engine.loop.core.collective_rpc(overwrite)  # memory that was freed may come back with what was in it
    assert multiplied_bits(engine) != before
    now[NORMS[1]].view(-1)[::3] *= -1.0
    with monkeypatch.context() as patch:
        patch.setattr(BucketReceiver, "start_weight_update", None)
        if updates is not None:
            assert any(updates.push(now, version + 4))
        else:
            push_whole(engine, now)
    written = multiplied_bits(engine)
    forget_loads(engine)
    push_whole(engine, now)
    assert multiplied_bits(engine) == written


def test_whole_updates_are_loaded_where_writing_them_would_leave_other_bits(engine: VllmEngine, caplog: pytest.LogCaptureFixture) -> None:
    forget_loads(engine, writes_whole=True)
    tensors = [weights(new_model(tied=True, seed=seed)) for seed in (1, 2, 3)]
    for one in tensors:
        one[NORMS[1]].view(-1)[::3] *= -1.0
    push_whole(engine, tensors[0])
    assert engine.loop is not None
    engine.loop.core.collective_rpc(exchange)
    with caplog.at_level(logging.ERROR, "rljob_runtime"):
        push_whole(engine, tensors[1])
    assert "left other bits than a load of the weights does in" in caplog.text
    push_whole(engine, tensors[2])
    found = multiplied_bits(engine)
    forget_loads(engine)
    push_whole(engine, tensors[2])
    assert multiplied_bits(engine) == found


def test_a_load_that_cannot_be_watched_comes_again_and_is_not(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rljob_runtime.engine.vllm.load_record import LoadRecorder

    def trial(self: LoadRecorder, *given: Any) -> Any:
        raise RuntimeError("an operator that no mode may see")

    forget_loads(engine, writes_whole=True)
    tensors = weights(new_model(tied=True, seed=1))
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "rljob_runtime"):
        patch.setattr(LoadRecorder, "trial", trial)
        with pytest.raises(WholeNeededError, match="an operator that no mode may see"):
            push_whole(engine, tensors)
        for _ in range(3):
            push_whole(engine, tensors)
    assert "from now on all updates are loaded" in caplog.text
    found = multiplied_bits(engine)
    forget_loads(engine)
    push_whole(engine, tensors)
    assert multiplied_bits(engine) == found


def test_what_does_not_come_during_a_watched_load_is_no_fault_of_the_watching(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    def receive(self: BucketReceiver, update: Any) -> None:
        raise WeightSyncError("bucket 0 cannot be opened on cpu")

    forget_loads(engine, writes_whole=True)
    tensors = weights(new_model(tied=True, seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(BucketReceiver, "receive_weights", receive)
        with pytest.raises(WeightSyncError, match="bucket 0 cannot be opened on cpu") as caught:
            push_whole(engine, tensors)
    assert not isinstance(caught.value, WholeNeededError)
    for _ in range(2):
        push_whole(engine, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(BucketReceiver, "start_weight_update", None)
        push_whole(engine, tensors)
