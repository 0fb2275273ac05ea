"""Slabs, store and manager on the CPU: what is freed, what is kept, what is refused, and what a failure leaves."""

from __future__ import annotations

import logging
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rljob_runtime.errors import HostBudgetError, OffloadError
from rljob_runtime.offload import memory
from rljob_runtime.offload.copies import HostCopies
from rljob_runtime.offload.manager import state_offload_manager
from rljob_runtime.offload.slabs import SMALLEST_CHUNK_BYTES, HostSlabs, Region, chunk_sizes
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.offload.store import StateStore
from rljob_runtime.report.names import UnknownMetricError, require_registered
from tests.support.cost import within
from tests.support.offload_fakes import CPU, LateCopies, bytes_of, make_store, two_kinds

PARAMS, GRADS, OPTIMIZER, OTHER = StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER, StateKind.OTHER
CHUNK = SMALLEST_CHUNK_BYTES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def mapped_bytes() -> int:
    """Of this process. What is resident depends on the machine as well, which may take pages away."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_memory_goes_back_to_the_system() -> None:
    big = [torch.ones(12 * 2**20) for _ in range(4)]  # 200 MB in blocks that the C library maps one by one
    store = make_store(chunk_bytes=32 * 2**20)
    for index, tensor in enumerate(big):
        store.register(PARAMS, str(index), tensor)
    store.offload([PARAMS])
    there, mapped_there = store.load([PARAMS]).after, mapped_bytes()
    away, mapped_away = store.offload([PARAMS]).after, mapped_bytes()
    assert mapped_there - mapped_away > 0.95 * 4 * 48 * 2**20
    assert there.allocated_bytes == 4 * 48 * 2**20
    assert away.allocated_bytes == 0


def test_a_reservation_counts_all_kinds_at_once_and_takes_nothing_where_it_does_not_fit() -> None:
    store, _ = two_kinds(budget_bytes=5 * CHUNK)  # 240,028 and 80,020 bytes: four chunks and two
    with pytest.raises(HostBudgetError) as caught:
        store.reserve([PARAMS, OPTIMIZER])
    assert str(caught.value) == (
        "offloading policy/params (240064 bytes), policy/optimizer (80064 bytes) needs 393216 bytes of host memory on top of 0 held: "
        "393216 in all, but this worker's share of the budget is 327680; raise spec.offload.hostMemoryBytes, "
        "or keep a kind of state on the device (components[].offload: Never)"
    )
    assert (caught.value.retryable, caught.value.rolled_back) == (False, True)
    assert store.memory().pinned_bytes == 0
    store.reserve([PARAMS])
    assert store.memory().pinned_bytes == 4 * CHUNK
    store.offload([PARAMS])
    with pytest.raises(HostBudgetError, match="131072 bytes of host memory on top of 262144 held: 393216 in all"):
        store.offload([OPTIMIZER])
    store.load([PARAMS])


def test_memory_is_left_to_the_allocator_where_nobody_else_wants_it() -> None:
    class Released(HostCopies):
        times = 0

        def release(self) -> None:
            self.times += 1

    copies = Released()
    store, _ = two_kinds(copies)
    store.offload([OPTIMIZER], release=False)
    assert copies.times == 0
    store.offload([PARAMS])
    assert copies.times == 1


def test_tensors_made_or_replaced_by_a_provider_while_its_kind_is_away_win() -> None:
    """A checkpoint read into an optimizer that is off the device: what came later is the truth, what was away is nobody's."""
    listed = {"m": torch.ones(1000), "v": torch.full((1000,), 2.0)}
    store = make_store()
    store.register_provider(OPTIMIZER, lambda: listed.items())
    store.offload([OPTIMIZER])
    old, listed["m"] = listed["m"], torch.full((1000,), 3.0)
    listed["new"] = torch.full((10,), 4.0)
    store.load([OPTIMIZER])
    assert torch.equal(old, torch.ones(1000))
    del old
    for _ in range(2):
        assert store.offload([OPTIMIZER]).copied_bytes == {OPTIMIZER: 8040}
        store.load([OPTIMIZER])
        assert [(name, set(tensor.tolist())) for name, tensor in listed.items()] == [("m", {3.0}), ("v", {2.0}), ("new", {4.0})]
    assert store.memory().allocated_bytes == 8040


def test_a_provider_that_fails_moves_nothing() -> None:
    store, tensors = two_kinds()
    broken = True

    def provider() -> list[tuple[str, torch.Tensor]]:
        if broken:
            raise KeyError("state")
        return []

    store.register_provider(OTHER, provider)
    for switch in (store.offload, store.reserve):
        with pytest.raises(KeyError):
            switch([PARAMS])
    broken = False
    assert store.residence(PARAMS) is Residence.ON_DEVICE
    store.offload([PARAMS])
    broken = True
    with pytest.raises(KeyError):
        store.load([PARAMS])
    broken = False
    assert store.residence(PARAMS) is Residence.OFFLOADED
    assert tensors["a"].untyped_storage().size() == 0
    store.load([PARAMS])
    store.require([PARAMS], "forward")


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


def test_the_manager_leaves_state_when_asked_and_needs_no_metrics() -> None:
    store, _ = two_kinds()
    store.offload(StateKind)
    metrics: dict[str, float] = {}
    with state_offload_manager(store, is_offload_states=False, metrics=metrics):
        pass
    assert {store.residence(kind) for kind in StateKind} == {Residence.ON_DEVICE}
    assert metrics["offload/block/offload_bytes"] == 0
    with state_offload_manager(store):
        pass
    assert {store.residence(kind) for kind in StateKind} == {Residence.OFFLOADED}


@pytest.mark.parametrize("infix", ["block", "train_step", "a/b"])
def test_all_that_the_manager_writes_is_in_the_reference(infix: str) -> None:
    store, _ = two_kinds()
    metrics: dict[str, float] = {}
    with state_offload_manager(store, metrics=metrics, infix=infix):
        pass
    assert len(metrics) == 3 + 4 + 4 * 5
    require_registered(metrics)
    with pytest.raises(UnknownMetricError):
        require_registered(["memory/end/allocated_byte"])


def test_the_manager_needs_a_word_to_name_its_metrics_after() -> None:
    store, _ = two_kinds()
    with pytest.raises(ValueError, match="infix is empty"), state_offload_manager(store, infix=""):
        pass


def test_the_manager_offloads_after_an_error_and_still_measures() -> None:
    store, _ = two_kinds()
    metrics: dict[str, float] = {}
    with pytest.raises(LookupError, match="body"), state_offload_manager(store, metrics=metrics):
        raise LookupError("body")
    assert store.residence(PARAMS) is Residence.OFFLOADED
    assert metrics["memory/block/end/allocated_bytes"] == 0
    assert metrics["offload/block/offload_bytes"] > 0


def test_a_snapshot_is_cheap_and_a_log_line_never_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    memory.snapshot(CPU, 0)
    with within(0.1):
        for _ in range(100):
            taken = memory.snapshot(CPU, 7, resident_bytes=5, peak_bytes=9)
    assert (taken.allocated_bytes, taken.peak_bytes, taken.pinned_bytes) == (5, 9, 7)
    assert taken.host_rss_bytes > 50 * 2**20
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            memory.log_memory_usage("after load", logging.getLogger("offload"), memory=taken)
        memory.log_memory_usage("own", logging.getLogger("offload"), rank=3)
    assert len(caplog.records) == 51
    assert re.fullmatch(
        r"after load: device 0\.0 MiB allocated, 0\.0 reserved, 0\.0 peak; host \d+\.\d MiB resident, 0\.0 pinned", caplog.messages[0]
    )


def test_the_log_line_needs_no_logger_and_only_the_asked_rank_writes_it(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.INFO):
            memory.log_memory_usage("everybody")
            memory.log_memory_usage("first", rank=0)
            memory.log_memory_usage("second", rank=1)
    finally:
        dist.destroy_process_group()
    assert [message.split(":")[0] for message in caplog.messages] == ["everybody", "first"]
    assert {record.name for record in caplog.records} == {"rljob_runtime.offload.memory"}


def test_the_log_line_of_a_gpu_has_the_room_on_it_and_leaves_the_peak_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2**20
    counters = {
        "allocated_bytes": {"all": {"current": 3 * mib, "peak": 5 * mib}},
        "reserved_bytes": {"all": {"current": 4 * mib, "peak": 0}},
    }
    resets: list[object] = []
    for name, answer in {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "mem_get_info": lambda device: ({1: 10 * mib}[device.index], 80 * mib),
        "host_memory_stats": lambda: {"allocated_bytes.current": 2 * mib},
        "memory_stats_as_nested_dict": lambda device: counters,
        "reset_peak_memory_stats": resets.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with caplog.at_level(logging.INFO):
        memory.log_memory_usage("step 3")
    assert re.fullmatch(
        r"step 3: device 3\.0 MiB allocated, 4\.0 reserved, 5\.0 peak, 10\.0 free of 80\.0; host \d+\.\d MiB resident, 2\.0 pinned",
        caplog.messages[0],
    )
    assert resets == []
