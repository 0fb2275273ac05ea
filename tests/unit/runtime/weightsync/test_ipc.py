"""Buffers that engines read on the trainer's device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.group import Meeting
from rljob_runtime.weightsync.outbox import Outbox
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.transports import ipc
from rljob_runtime.weightsync.transports.collective import BroadcastSender
from rljob_runtime.weightsync.transports.ipc import RELEASE_PART, HandleSender
from rljob_runtime.weightsync.transports.tested import TEST_VERSION
from tests.support.pace import HANG_S
from tests.support.sync_setting import Trainer

NUM_BYTES = 64


@pytest.fixture
def settings() -> Iterator[None]:
    """Of torch's allocator, as they were."""
    before = torch._C._accelerator_getAllocatorSettings()
    yield
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        ("expandable_segments:True,max_split_size_mb:512", "expandable_segments:False,max_split_size_mb:512"),
        ("max_split_size_mb:512,expandable_segments:False", "max_split_size_mb:512,expandable_segments:False"),
    ],
)
def test_buffers_are_in_no_expandable_segments_which_other_processes_cannot_open(
    chosen: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._C._accelerator_setAllocatorSettings(chosen)
    zeros, found = torch.zeros, []

    def on_the_device(size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        found.append((torch._C._accelerator_getAllocatorSettings(), device))
        return zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_the_device)
    cuda = torch.device("cuda", 1)
    assert ipc.shared_buffer(NUM_BYTES, cuda).numel() == NUM_BYTES
    assert found == [(expected, cuda)]
    assert torch._C._accelerator_getAllocatorSettings() == chosen


class Exported:
    """Exports as of CUDA memory, whose counters are numbered, and which of these the sender counts down."""

    def __init__(self) -> None:
        self.made = 0
        self.counted_down: list[int] = []

    def reduce(self, data: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        self.made += 1
        return rebuild_cuda_tensor, (*[None] * 11, b"file", self.made, b"", False)

    def count_down(self, counters: list[ipc.Counter]) -> None:
        self.counted_down += [place for _, place in counters]
        counters.clear()


def test_exports_that_lost_readers_have_not_counted_are_counted_down_once_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported()
    monkeypatch.setattr(ipc, "reduce_tensor", exported.reduce)
    monkeypatch.setattr(ipc, "count_down", exported.count_down)
    monkeypatch.setattr(ipc, "LEFT", [])

    def sender() -> HandleSender:
        manifest = plan_buckets([(f"layers.{index}.weight", "uint8", (NUM_BYTES,)) for index in (0, 1)], NUM_BYTES)
        return HandleSender(Trainer(), manifest, readers={0: [(0, 0)]}, dense_above=None)

    broken = sender()
    broken.send(TEST_VERSION, 0)
    broken.close()
    assert exported.counted_down == [1]  # the test failed
    broken = sender()
    broken.send(TEST_VERSION, 0)
    broken.send(TEST_VERSION, RELEASE_PART)
    for part in (0, 1, RELEASE_PART):
        broken.send(1, part)
    broken.send(2, 0)
    broken.close()
    assert exported.counted_down == [1]  # an engine may still load from the last one
    after = sender()
    after.send(TEST_VERSION, 0)
    assert exported.counted_down == [1]
    after.send(TEST_VERSION, RELEASE_PART)
    assert exported.counted_down == [1, 5]
    after.close()
    assert exported.counted_down == [1, 5]


def test_counters_that_are_gone_are_no_error() -> None:
    counters = [(f"/torch_{NUM_BYTES}_none".encode(), 3)]
    ipc.count_down(counters)
    assert counters == []


class Counting(Trainer):
    """Takes part in gathers, and has numbers for no bucket."""

    gathers = 0

    def pack_buckets(self, buckets: Any, out: Any = None, on_packed: Any = None) -> None:
        self.gathers += 1


@pytest.mark.parametrize("dense_above", [None, 1.0])
@pytest.mark.parametrize("way", ["IPC", "NCCL"])
def test_a_rank_without_room_for_its_bucket_does_not_keep_the_others_in_the_gather(way: str, dense_above: float | None) -> None:
    manifest, rank = plan_buckets([("layers.0.weight", "uint8", (2**60,))], 2**60), Counting()
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S)
    sender: Any
    if way == "IPC":
        sender = HandleSender(rank, manifest, readers={0: [(0, 0)]}, dense_above=dense_above)
    else:
        sender = BroadcastSender(rank, manifest, meetings={0: meeting}, on_device=True, dense_above=dense_above)
    with pytest.raises(
        WeightSyncError, match=f"trainer rank 0 has no room for a bucket of {2**60} bytes: .*; lower weightSync.bucketBytes"
    ):
        sender.send(1, 0)
    assert rank.gathers == 1
    sender.close()


def test_what_broke_the_group_is_reported_by_a_rank_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, rank = plan_buckets([("layers.0.weight", "uint8", (2**60,))], 2**60), Counting()
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S)
    monkeypatch.setattr(Outbox, "room", lambda outbox: WeightSyncError("engine-1 is lost"))
    sender = BroadcastSender(rank, manifest, meetings={0: meeting}, on_device=True, dense_above=None)
    with pytest.raises(WeightSyncError, match="engine-1 is lost"):
        sender.send(1, 0)
    assert rank.gathers == 1
    sender.close()


@pytest.mark.parametrize("way", ["IPC", "NCCL"])
def test_a_rank_without_room_to_compare_buckets_says_what_to_lower(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, rank = plan_buckets([("layers.0.weight", "uint8", (NUM_BYTES,))], NUM_BYTES), Counting()
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S)

    def encode(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceDeltaEncoder, "encode", encode)
    sender: Any
    if way == "IPC":
        sender = HandleSender(rank, manifest, readers={0: [(0, 0)]}, dense_above=1.0)
    else:
        sender = BroadcastSender(rank, manifest, meetings={0: meeting}, on_device=True, dense_above=1.0)
    with pytest.raises(WeightSyncError, match=r"no room for a bucket of 64 bytes: CUDA .*; lower weightSync"):
        sender.send(1, 0)
    sender.close()
