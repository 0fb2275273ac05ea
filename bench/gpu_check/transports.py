"""Bytes between two processes, beside what bare copies reach: torch alone, as the IPC and NCCL weight transports move them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu_check import peers
from bench.gpu_check.children import answer, context
from bench.gpu_check.limits import copy_rates
from bench.gpu_check.lines import Line, at_most, equal, share
from bench.gpu_check.ports import free_ports
from bench.gpu_check.scale import Scale
from bench.gpu_check.timing import median_s

PARTS = 8
"""Buffers that one message exports."""


def check_ipc(scale: Scale) -> Iterator[Line]:
    """A second process opens buffers of the first on the same device, and copies them out: no byte through the host."""
    ctx = context()
    handles, replies, results = ctx.Queue(), ctx.Queue(), ctx.Queue()
    index = 0 if scale.on_cuda else None
    found = answer(
        ctx,
        [
            (peers.owner, (handles, replies, index, scale.copied_bytes, PARTS, scale.wait_s)),
            (peers.reader, (handles, replies, results, index, scale.repeat, scale.wait_s)),
        ],
        results,
        timeout_s=scale.wait_s,
        what="ipc",
        begin=scale.begin,
    )
    memory = "CUDA IPC" if scale.on_cuda else "shared memory, which stands in for CUDA IPC"
    yield at_most("ipc", f"{PARTS} buffers opened ({memory})", found["opened_s"], "s", scale.speed(1.0))
    rate, limit = (scale.copied_bytes / found[key] / 1e9 for key in ("copy_s", "limit_s"))
    yield share(
        "ipc", "copy out of the other process", rate, "GB/s", limit=limit, limit_name="copy inside one process", at_least=scale.speed(0.85)
    )
    yield equal("ipc", "sums of the buffers", found["differing"])


def check_collective(scale: Scale) -> Iterator[Line]:
    """A broadcast between processes: NCCL over two GPUs, NCCL alone on one (a loopback), gloo without any."""
    gpus = torch.cuda.device_count() if scale.on_cuda else 0
    world = 1 if gpus == 1 else 2
    ctx = context()
    results = ctx.Queue()
    port = free_ports(1)[0]
    jobs = [
        (peers.member, (rank, world, port, rank if gpus else None, scale.copied_bytes, scale.repeat, scale.wait_s, results))
        for rank in range(world)
    ]
    found = answer(ctx, jobs, results, timeout_s=2 * scale.wait_s, what="collective", begin=scale.begin)
    what, limit, name, bound = _limit(scale, gpus)
    yield share(
        "collective",
        what,
        scale.copied_bytes / found["seconds"] / 1e9,
        "GB/s",
        limit=limit / 1e9,
        limit_name=name,
        at_least=bound,
        note="one GPU: a group of one rank; nothing crosses a link" if gpus == 1 else "",
    )
    yield equal("collective", "sums of what arrived", found["differing"])


def _limit(scale: Scale, gpus: int) -> tuple[str, float, str, float | None]:
    """What is measured, its limit in bytes a second with a name, and the bound on the share."""
    if not gpus:
        return "gloo broadcast, 2 processes", copy_rates(scale.device, scale.copied_bytes, scale.repeat)["inside"], "memcpy", None
    if gpus == 1:
        rate = copy_rates(scale.device, scale.copied_bytes, scale.repeat)["inside"]
        return "NCCL gather, 1 process", rate, "copy inside the device", 0.5
    source = torch.ones(scale.copied_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(1)

    return "NCCL broadcast, 2 GPUs", scale.copied_bytes / median_s(scale.device, scale.repeat, copy), "copy between the GPUs", 0.7
