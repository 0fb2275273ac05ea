"""What the machine itself reaches: nothing of this project, torch alone. Other lines stand beside these."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from bench.gpu_check.lines import Line, share
from bench.gpu_check.scale import Scale
from bench.gpu_check.timing import median_s

CHUNK_BYTES = 32 << 20
"""Of a copy between host and device: as the offload's."""
PEAK_FLOPS = (("B200", 2250e12), ("H200", 989e12), ("H100", 989e12), ("H800", 989e12), ("H20", 148e12), ("A100", 312e12), ("A800", 312e12))
"""Dense bfloat16, by a part of the device's name, from NVIDIA's data sheets (SXM forms)."""


@cache
def matmul_flops(device: torch.device, size: int, dtype: str, repeat: int) -> float:
    """FLOP/s of a square matrix product: what no layer of a model exceeds."""
    a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    times = 10

    def work() -> None:
        for _ in range(times):
            a @ b

    return 2 * size**3 * times / median_s(device, repeat, work)


@cache
def copy_rates(device: torch.device, num_bytes: int, repeat: int) -> dict[str, float]:
    """Bytes a second of bare copies: inside the device, off it and onto it (pinned, in chunks; on a CPU all are a memcpy)."""
    count = max(1, num_bytes // CHUNK_BYTES)
    size = num_bytes // count
    host = [torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(min(count, 8))]
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(count)]
    other = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(count)]

    def inside() -> None:
        for target, source in zip(other, there, strict=True):
            target.copy_(source)

    def off() -> None:
        for index, source in enumerate(there):
            host[index % len(host)].copy_(source, non_blocking=True)

    def onto() -> None:
        for index, target in enumerate(there):
            target.copy_(host[index % len(host)], non_blocking=True)

    return {name: size * count / median_s(device, repeat, work) for name, work in (("inside", inside), ("off", off), ("onto", onto))}


def file_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second of writing one file and waiting for the disk."""
    data = memoryview(bytes([1]) * min(num_bytes, CHUNK_BYTES))
    path = folder / "limit.bin"
    started = time.perf_counter()
    written = 0
    with path.open("wb") as file:
        while written < num_bytes:
            written += file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return written / seconds


def peak_of(device: torch.device) -> float | None:
    """FLOP/s of the data sheet; None for a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS if part in name), None)


def check(scale: Scale) -> Iterator[Line]:
    """Matrix products and copies; the products beside the data sheet where the device is known."""
    scale.begin("matrix product")
    flops, stated = matmul_flops(scale.device, scale.matrix, scale.dtype, scale.repeat), peak_of(scale.device)
    what = f"{scale.dtype} matrix product, {scale.matrix} x {scale.matrix}"
    if stated is None:
        yield Line(check="limits", what=what, value=flops / 1e12, unit="TFLOP/s")
    else:
        yield share("limits", what, flops / 1e12, "TFLOP/s", limit=stated / 1e12, limit_name="data sheet", at_least=0.55)
    names = {"inside": "copy inside the device", "off": "copy off the device, pinned", "onto": "copy onto the device, pinned"}
    scale.begin("copies")
    for name, rate in copy_rates(scale.device, scale.copied_bytes, scale.repeat).items():
        what = names[name] if scale.on_cuda else f"memcpy, which stands in for: {names[name]}"
        yield Line(check="limits", what=what, value=rate / 1e9, unit="GB/s")
