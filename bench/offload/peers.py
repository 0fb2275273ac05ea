"""What else one could do: ``model.to`` and FSDP2's CPUOffloadPolicy."""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from bench.offload.limits import WIDTH, synchronize, timed


def make_model(device: torch.device, layers: int) -> nn.Sequential:
    """Square layers without biases, under torch's default initialization."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)))


def to_cpu(device: torch.device, layers: int, repeat: int) -> dict[str, Any]:
    """``model.to("cpu")`` and back, for the parameters. On a CPU ``to`` copies nothing; there a clone of each parameter stands for it."""
    model = make_model(device, layers)

    def away() -> None:
        if device.type == "cuda":
            model.to("cpu")
            torch.cuda.empty_cache()
            return
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def back() -> None:
        model.to(device)

    seconds: dict[str, list[float]] = {"offload": [], "load": []}
    for _ in range(repeat + 1):
        for name, work in (("offload", away), ("load", back)):
            synchronize(device)
            started = time.perf_counter()
            work()
            synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    result = {f"{name}_s": statistics.median(values[1:]) for name, values in seconds.items()}
    return result if device.type == "cuda" else {"offload_s": result["offload_s"], "load_s": result["offload_s"], "stands_for": "clone"}


def offload_policy(device: torch.device, layers: int, repeat: int) -> dict[str, Any]:
    """Updates a second with everything resident and under CPUOffloadPolicy, which moves parameters and gradients in every update.

    On a CPU there is nothing to move, so that there both should take the same.
    Where a phase makes n updates, our switch costs one offload and one load, CPUOffloadPolicy n times the difference.
    """
    layers = max(2, layers // 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        seconds = {}
        for name, policy in (("resident", OffloadPolicy()), ("policy", CPUOffloadPolicy(pin_memory=device.type == "cuda"))):
            seconds[name] = _update_s(device, layers, policy, repeat)
    finally:
        dist.destroy_process_group()
    return {"parameter_bytes": layers * 4 * WIDTH * WIDTH, "resident_update_s": seconds["resident"], "policy_update_s": seconds["policy"]}


def _update_s(device: torch.device, layers: int, policy: OffloadPolicy, repeat: int) -> float:
    """Median seconds of one update of a small batch with AdamW."""
    model = make_model(device, layers)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(8, WIDTH, device=device)

    def update() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(device, repeat, update)
