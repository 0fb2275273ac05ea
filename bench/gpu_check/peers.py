"""What runs in the other processes of ``transports``: torch alone, started by a fork server so that none imports it twice."""

from __future__ import annotations

import datetime
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def device_of(index: int | None) -> torch.device:
    """A CUDA device, or the CPU."""
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def total(data: torch.Tensor) -> int:
    """The sum of all bits as integers, with overflow."""
    return int(data.view(torch.int64).sum().item())


def owner(handles: Any, replies: Any, device_index: int | None, num_bytes: int, parts: int, wait_s: float) -> None:
    """Make buffers and let a reader open them where they are; keeps them until it has answered."""
    torch.set_num_threads(1)
    mp.set_sharing_strategy("file_system")
    device = device_of(device_index)
    buffers = []
    for index in range(parts):
        words = torch.arange(index, index + num_bytes // parts // 8, dtype=torch.int64, device=device)
        buffers.append(words.view(torch.uint8) if device_index is not None else words.view(torch.uint8).share_memory_())
    synchronize(device)
    handles.put([total(buffer) for buffer in buffers])
    handles.put(buffers)
    replies.get(timeout=wait_s)  # the reader is done: only now may they go


def reader(handles: Any, replies: Any, results: Any, device_index: int | None, repeat: int, wait_s: float) -> None:
    """Open what :func:`owner` exported, and copy it; reports seconds, bytes and whether all sums are right."""
    torch.set_num_threads(1)
    mp.set_sharing_strategy("file_system")
    device = device_of(device_index)
    torch.zeros(1, device=device)  # the context is not part of opening
    sums = handles.get(timeout=wait_s)
    started = time.perf_counter()
    buffers = handles.get(timeout=wait_s)
    opened_s = time.perf_counter() - started
    own = [torch.empty_like(buffer) for buffer in buffers]

    def copy_s(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
        seconds = []
        for _ in range(repeat + 1):
            synchronize(device)
            begun = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            synchronize(device)
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds[1:])

    seconds = copy_s(buffers, own)
    differing = sum(total(data) != wanted for data, wanted in zip(own, sums, strict=True))
    del buffers
    limit_s = copy_s(own, [torch.empty_like(data) for data in own])
    results.put({"opened_s": opened_s, "copy_s": seconds, "limit_s": limit_s, "differing": float(differing)})
    replies.put("done")


def member(rank: int, world: int, port: int, device_index: int | None, num_bytes: int, repeat: int, wait_s: float, results: Any) -> None:
    """A rank of a group: rank 0 broadcasts, all others receive; alone it gathers from itself. Rank 0 reports."""
    torch.set_num_threads(1)
    device = device_of(device_index)
    if device_index is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device_index is None else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=wait_s),
    )
    data = (
        torch.arange(num_bytes // 8, dtype=torch.int64, device=device)
        if rank == 0 or world == 1
        else torch.zeros(num_bytes // 8, dtype=torch.int64, device=device)
    )
    wanted = (num_bytes // 8) * (num_bytes // 8 - 1) // 2
    target = torch.empty_like(data)
    seconds = []
    for _ in range(repeat + 1):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        if world == 1:
            dist.all_gather_into_tensor(target, data)
        else:
            dist.broadcast(data, 0)
        synchronize(device)
        dist.barrier()  # until the slowest has everything
        seconds.append(time.perf_counter() - started)
    received = target if world == 1 else data
    wrong = torch.tensor([float(total(received.view(torch.uint8)) != wanted)], device=device)
    dist.all_reduce(wrong)
    dist.destroy_process_group()
    if rank == 0:
        results.put({"seconds": statistics.median(seconds[1:]), "differing": float(wrong.item())})
