"""Slabs, store and manager on the CPU: what is freed, what is kept, what is refused, and what a failure leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from rljob_runtime.errors import OffloadError
from rljob_runtime.offload import memory
from rljob_runtime.offload.manager import state_offload_manager
from rljob_runtime.offload.slabs import SMALLEST_CHUNK_BYTES, HostSlabs, Region, chunk_sizes
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.offload.store import StateStore
from tests.unit.runtime.offload_fakes import CPU, FailingCopies, LateCopies, bytes_of, make_store

PARAMS, GRADS, OPTIMIZER, OTHER = StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER, StateKind.OTHER
CHUNK = SMALLEST_CHUNK_BYTES
SIZES = {"a": 40_000, "b": 7, "c": 20_000, "m": 5, "v": 20_000}
COPIES = 9
"""Of an offload of everything in :func:`two_kinds`: 3 for a, 1 for b, 2 for c, 1 for m, 2 for v."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def two_kinds(copies: object = None) -> tuple[StateStore, dict[str, torch.Tensor]]:
    """Three parameters and two optimizer states, float32."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(size, generator=generator) for name, size in {"a": 40_000, "b": 7, "c": 20_000, "m": 5, "v": 20_000}.items()
    }
    store = make_store(copies)
    for name, tensor in tensors.items():
        store.register(PARAMS if name in "abc" else OPTIMIZER, name, tensor)
    return store, tensors


# ------------------------------------------------------------------ slabs


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK, CHUNK + 1, 3 * 2**20, 32 * 2**20, 77 * 2**20 + 5])
def test_chunks_are_powers_of_two_and_waste_less_than_the_smallest(size_bytes: int) -> None:
    sizes = chunk_sizes(size_bytes, 32 * 2**20)
    assert all(size & (size - 1) == 0 and size <= 32 * 2**20 for size in sizes)
    assert 0 <= sum(sizes) - size_bytes < CHUNK


def test_a_region_is_addressed_like_one_array() -> None:
    region = Region()
    for begin, length in ((0, 4), (4, 8), (12, 2)):
        region.add(torch.arange(begin, begin + length, dtype=torch.uint8))
    for offset in range(14):
        for size in range(14 - offset + 1):
            assert [int(v) for piece in region.pieces(offset, size) for v in piece] == list(range(offset, offset + size))
    with pytest.raises(IndexError, match=r"\[10, 15\) of a region of 14"):
        list(region.pieces(10, 5))


def test_over_the_budget_is_refused_with_both_numbers_and_nothing_moves() -> None:
    store = make_store(budget_bytes=3 * CHUNK)
    tensor, small = torch.randn(CHUNK), torch.ones(10)
    store.register(PARAMS, "w", tensor)
    store.register(OPTIMIZER, "m", small)
    store.offload([OPTIMIZER])
    numbers = rf"needs {4 * CHUNK} bytes .* top of {CHUNK} held: {5 * CHUNK} in all.* {3 * CHUNK}; raise spec.offload.hostMemoryBytes"
    with pytest.raises(OffloadError, match=numbers) as caught:
        store.offload([PARAMS])
    assert caught.value.rolled_back
    assert store.residence(PARAMS) is Residence.ON_DEVICE
    assert tensor.untyped_storage().size() == 4 * CHUNK
    assert store.memory().pinned_bytes == CHUNK


@pytest.mark.parametrize(("settings", "words"), [({"chunk_bytes": 3 * 2**20}, "power of two"), ({"budget_bytes": -1}, "at least 0")])
def test_meaningless_settings_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HostSlabs(pinned=False, **settings)


def test_nothing_is_taken_after_warm_up() -> None:
    slabs = HostSlabs(pinned=False, budget_bytes=2**20, chunk_bytes=CHUNK)
    store = StateStore(CPU, slabs)
    store.register(PARAMS, "w", torch.randn(CHUNK))
    store.reserve()
    taken = slabs.allocations, slabs.held_bytes
    assert taken == (4, 4 * CHUNK)
    for _ in range(5):
        store.offload(StateKind)
        store.load(StateKind)
    assert (slabs.allocations, slabs.held_bytes) == taken
    slabs.close()
    assert slabs.held_bytes == 0


# ------------------------------------------------------------------ switches


def test_an_offload_frees_and_reports_add_up() -> None:
    store, tensors = two_kinds()
    before = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    report = store.offload([PARAMS])
    param_bytes = sum(tensors[name].nbytes for name in "abc")
    assert all(tensors[name].untyped_storage().size() == 0 for name in "abc")
    assert report.direction == "offload"
    assert report.copied_bytes == report.freed_bytes == {PARAMS: param_bytes}
    assert report.before.allocated_bytes - report.after.allocated_bytes == param_bytes
    assert report.before.allocated_bytes == sum(t.nbytes for t in tensors.values())
    assert report.after.pinned_bytes >= param_bytes
    assert report.elapsed_s > 0
    assert [store.residence(kind) for kind in (PARAMS, OPTIMIZER)] == [Residence.OFFLOADED, Residence.ON_DEVICE]
    back = store.load([PARAMS])
    assert back.copied_bytes == report.copied_bytes
    assert back.after.allocated_bytes == report.before.allocated_bytes == back.after.peak_bytes
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == before
    assert store.load([PARAMS]).copied_bytes == {}, "what is there already is left alone"


def test_only_the_kinds_asked_for_move() -> None:
    store, tensors = two_kinds()
    assert set(store.offload([OPTIMIZER, StateKind.KV_CACHE]).copied_bytes) == {OPTIMIZER, StateKind.KV_CACHE}
    assert (tensors["m"].untyped_storage().size(), tensors["a"].untyped_storage().size()) == (0, 160_000)


def test_views_ties_and_identity_survive() -> None:
    flat = torch.arange(1000.0)
    left, right = flat[:400], nn.Parameter(flat[400:].view(20, 30))
    store = make_store()
    for name, tensor in (("left", left), ("right", right), ("tied", right)):
        store.register(PARAMS, name, tensor)
    store.reserve()
    assert store.offload([PARAMS]).copied_bytes == {PARAMS: 4000}, "one storage moves once"
    assert flat.untyped_storage().size() == 0
    store.load([PARAMS])
    with torch.no_grad():
        right.add_(1)
    assert torch.equal(flat, torch.cat([torch.arange(400.0), torch.arange(401.0, 1001.0)]))
    assert torch.equal(left, torch.arange(400.0))


def test_rederivable_state_is_not_copied_and_unusable_until_written() -> None:
    store = make_store()
    cache = torch.ones(5000)
    store.register(StateKind.KV_CACHE, "cache", cache, rederivable=True)
    out = store.offload([StateKind.KV_CACHE])
    assert (out.copied_bytes, out.freed_bytes) == ({StateKind.KV_CACHE: 0}, {StateKind.KV_CACHE: 20_000})
    assert out.after.pinned_bytes == 0
    assert store.load([StateKind.KV_CACHE]).undefined == store.undefined == {StateKind.KV_CACHE}
    assert bool(cache.isnan().all())
    with pytest.raises(OffloadError, match="decode needs its state on cpu, but kv_cache came back without its content"):
        store.require([StateKind.KV_CACHE], "decode")
    store.mark_written(StateKind.KV_CACHE)
    store.require([StateKind.KV_CACHE], "decode")


def test_gradients_are_dropped_by_their_owner() -> None:
    weight = nn.Parameter(torch.ones(100))
    weight.sum().backward()
    store = make_store()

    def drop() -> None:
        weight.grad = None

    store.register_dropped(GRADS, lambda: [("grad", weight.grad)] if weight.grad is not None else [], drop)
    report = store.offload([GRADS])
    assert (report.copied_bytes, report.freed_bytes) == ({GRADS: 0}, {GRADS: 400})
    assert report.before.allocated_bytes - report.after.allocated_bytes == 400
    assert weight.grad is None
    assert store.load([GRADS]).undefined == frozenset()


def test_optimizer_states_made_and_replaced_between_switches_move() -> None:
    weight = nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.AdamW([weight])
    store = make_store()
    store.register_provider(OPTIMIZER, lambda: [(k, v) for s in optimizer.state.values() for k, v in s.items()])
    assert store.offload([OPTIMIZER]).copied_bytes == {OPTIMIZER: 0}
    store.load([OPTIMIZER])
    weight.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    kept = {key: bytes_of(value) for key, value in optimizer.state[weight].items()}
    assert store.offload([OPTIMIZER]).copied_bytes == {OPTIMIZER: 8004}
    store.load([OPTIMIZER])
    assert {key: bytes_of(value) for key, value in optimizer.state[weight].items()} == kept


@pytest.mark.parametrize(
    "make", [lambda: torch.from_numpy(np.arange(300.0)), lambda: torch.arange(300.0).share_memory_()], ids=["numpy", "shared"]
)
def test_memory_that_cannot_be_freed_is_replaced_first(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    alias, kept = tensor[100:], bytes_of(tensor)
    store = make_store()
    store.register(PARAMS, "w", tensor)
    store.register(PARAMS, "alias", alias)
    store.offload([PARAMS])
    assert tensor.untyped_storage().size() == 0
    store.load([PARAMS])
    assert bytes_of(tensor) == kept
    tensor.add_(1)
    assert torch.equal(alias, tensor[100:]), "tensors on one storage still share it"


def test_what_shares_memory_must_move_together() -> None:
    flat = torch.zeros(10)
    store = make_store()
    store.register(PARAMS, "left", flat[:5])
    store.register(OPTIMIZER, "right", flat[5:])
    with pytest.raises(OffloadError, match=r"right \(optimizer\) shares memory with left \(params\)"):
        store.offload([PARAMS])


def test_a_tensor_freed_or_written_by_others_is_named() -> None:
    store, tensors = two_kinds()
    store.offload([OPTIMIZER])
    tensors["m"].untyped_storage().resize_(20)
    with pytest.raises(OffloadError, match=r"m \(optimizer\) got memory while off the device"):
        store.load([OPTIMIZER])
    tensors["c"].untyped_storage().resize_(0)
    with pytest.raises(OffloadError, match=r"c \(params\) has no memory"):
        store.offload([PARAMS])


def test_use_and_registration_are_refused_while_away() -> None:
    store, _ = two_kinds()
    store.offload([PARAMS, OPTIMIZER])
    with pytest.raises(OffloadError, match=r"train_step needs .* optimizer is Offloaded; load it first; params is Offloaded"):
        store.require([PARAMS, OPTIMIZER, OTHER], "train_step")
    with pytest.raises(OffloadError, match="registering late"):
        store.register(PARAMS, "late", torch.zeros(1))


def test_memory_is_freed_only_when_its_copy_has_landed() -> None:
    copies = LateCopies()
    store, tensors = two_kinds(copies)
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    for _ in range(3):
        report = store.offload([PARAMS, OPTIMIZER])
        assert not copies.pending
        assert report.after.allocated_bytes == 0
        store.load([PARAMS, OPTIMIZER])
        assert not copies.pending
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept
    assert copies.most_pending_bytes > CHUNK, "copies run ahead of the host"


def test_memory_goes_back_to_the_system() -> None:
    big = [torch.ones(12 * 2**20) for _ in range(4)]  # 200 MB in blocks that the C library maps one by one
    store = make_store(chunk_bytes=32 * 2**20)
    for index, tensor in enumerate(big):
        store.register(PARAMS, str(index), tensor)
    store.offload([PARAMS])
    there = store.load([PARAMS]).after
    away = store.offload([PARAMS]).after
    assert there.host_rss_bytes - away.host_rss_bytes > 0.95 * 4 * 48 * 2**20
    assert there.allocated_bytes == 4 * 48 * 2**20
    assert away.allocated_bytes == 0


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("index", range(2 * COPIES))
def test_a_failure_at_any_chunk_is_undone(index: int, error: type[BaseException]) -> None:
    store, tensors = two_kinds(FailingCopies(index, error=error))
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    if index >= COPIES:
        store.offload([PARAMS, OPTIMIZER])
    switch = store.offload if index < COPIES else store.load
    with pytest.raises(BaseException, match=f"copy {index} failed") as caught:
        switch([PARAMS, OPTIMIZER])
    if error is KeyboardInterrupt:
        assert caught.type is KeyboardInterrupt
    else:
        assert isinstance(caught.value, OffloadError)
        assert caught.value.rolled_back
        assert "was undone" in str(caught.value)
    back = Residence.ON_DEVICE if index < COPIES else Residence.OFFLOADED
    assert {store.residence(kind) for kind in (PARAMS, OPTIMIZER)} == {back}
    if back is Residence.OFFLOADED:
        assert all(tensor.untyped_storage().size() == 0 for tensor in tensors.values()), "no half-loaded tensor looks valid"
    assert store.memory().allocated_bytes == sum(tensor.untyped_storage().size() for tensor in tensors.values())
    store.load([PARAMS, OPTIMIZER])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


@pytest.mark.parametrize("index", range(1, COPIES))
def test_a_failure_that_cannot_be_undone_is_broken(index: int) -> None:
    store, tensors = two_kinds(FailingCopies(*range(index, 100)))
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    if index < 3:  # nothing had left: there is nothing to undo
        with pytest.raises(OffloadError, match="was undone"):
            store.offload([PARAMS, OPTIMIZER])
        assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept
        return
    with pytest.raises(OffloadError, match=r"could not be undone.*Broken") as caught:
        store.offload([PARAMS, OPTIMIZER])
    assert not caught.value.rolled_back
    assert f"copy {index + 1} failed after RuntimeError: copy {index} failed" in str(caught.value)
    assert store.residence(PARAMS) is Residence.BROKEN
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().size() == 0 or bytes_of(tensor) == kept[name]
    for use in (lambda: store.require([PARAMS], "forward"), lambda: store.offload([PARAMS]), lambda: store.load([PARAMS])):
        with pytest.raises(OffloadError, match=f"params is Broken.*copy {index} failed.*restart the worker"):
            use()


def test_out_of_memory_on_the_device_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tensors = two_kinds()
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    store.offload([PARAMS, OPTIMIZER])
    resize = torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, size: int) -> object:
        if size == tensors["c"].nbytes:
            raise torch.OutOfMemoryError("no memory")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(OffloadError, match=r"OutOfMemoryError: no memory.*was undone"):
            store.load([PARAMS, OPTIMIZER])
    assert {tensor.untyped_storage().size() for tensor in tensors.values()} == {0}
    store.load([PARAMS, OPTIMIZER])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


def test_an_error_after_the_copies_does_not_hide_where_the_state_is() -> None:
    class Unreleased(FailingCopies):
        def release(self) -> None:
            raise RuntimeError("the driver is gone")

    store, tensors = two_kinds(Unreleased())
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match="the driver is gone"):
        store.offload([PARAMS, OPTIMIZER])
    assert {store.residence(kind) for kind in (PARAMS, OPTIMIZER)} == {Residence.OFFLOADED}
    store.load([PARAMS, OPTIMIZER])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


def test_an_owner_that_cannot_drop_keeps_everything() -> None:
    store, tensors = two_kinds()
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}

    def drop() -> None:
        raise RuntimeError("gradients are in use")

    store.register_dropped(GRADS, list, drop)
    cache = torch.ones(10)
    store.register(StateKind.KV_CACHE, "cache", cache, rederivable=True)
    with pytest.raises(OffloadError, match=r"gradients are in use.*was undone"):
        store.offload(StateKind)
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept
    assert torch.equal(cache, torch.ones(10)), "what was not copied goes last, when nothing can fail any more"


# ------------------------------------------------------------------ manager, memory


def test_the_manager_loads_what_is_included_and_offloads_the_rest() -> None:
    store, tensors = two_kinds()
    store.offload([PARAMS])
    metrics: dict[str, float] = {}
    with state_offload_manager(store, include=[PARAMS], metrics=metrics, infix="score"):
        assert store.residence(PARAMS) is Residence.ON_DEVICE
        assert {store.residence(kind) for kind in (OPTIMIZER, OTHER)} == {Residence.OFFLOADED}
        time.sleep(0.01)
    assert {store.residence(kind) for kind in StateKind} == {Residence.OFFLOADED}
    param_bytes, optimizer_bytes = sum(tensors[n].nbytes for n in "abc"), sum(tensors[n].nbytes for n in "mv")
    assert metrics["offload/score/load_bytes"] == param_bytes
    assert metrics["offload/score/offload_bytes"] == param_bytes + optimizer_bytes
    assert metrics["time/score/execute_s"] >= 0.01
    for way in ("load", "offload"):
        rate = metrics[f"offload/score/{way}_bytes"] / metrics[f"time/score/{way}_s"] / 1e9
        assert metrics[f"offload/score/{way}_gb_per_s"] == pytest.approx(rate)
    moments = [metrics[f"memory/score/{moment}/allocated_bytes"] for moment in ("start", "loaded", "executed", "end")]
    assert moments == [optimizer_bytes, param_bytes, param_bytes, 0]


def test_the_manager_leaves_state_when_told_and_needs_no_metrics() -> None:
    store, _ = two_kinds()
    store.offload(StateKind)
    metrics: dict[str, float] = {}
    with state_offload_manager(store, is_offload_states=False, metrics=metrics):
        pass
    assert {store.residence(kind) for kind in StateKind} == {Residence.ON_DEVICE}
    assert metrics["offload/offload_bytes"] == 0
    with state_offload_manager(store):
        pass
    assert {store.residence(kind) for kind in StateKind} == {Residence.OFFLOADED}


def test_the_manager_offloads_after_an_error_and_still_measures() -> None:
    store, _ = two_kinds()
    metrics: dict[str, float] = {}
    with pytest.raises(LookupError, match="body"), state_offload_manager(store, metrics=metrics):
        raise LookupError("body")
    assert store.residence(PARAMS) is Residence.OFFLOADED
    assert metrics["memory/end/allocated_bytes"] == 0
    assert metrics["offload/offload_bytes"] > 0


def test_a_snapshot_is_cheap_and_a_log_line_never_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    memory.snapshot(CPU, 0)
    started = time.perf_counter()
    for _ in range(100):
        taken = memory.snapshot(CPU, 7, resident_bytes=5, peak_bytes=9)
    assert (time.perf_counter() - started) / 100 < 1e-3
    assert (taken.allocated_bytes, taken.peak_bytes, taken.pinned_bytes) == (5, 9, 7)
    assert taken.host_rss_bytes > 50 * 2**20
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            memory.log_memory_usage("after load", logging.getLogger("offload"), memory=taken)
        memory.log_memory_usage("own", logging.getLogger("offload"), rank=3)
    assert len(caplog.records) == 51
    assert caplog.messages[0].startswith("after load: device 0.0 MiB allocated")
