"""What else one could do: ``model.to`` and FSDP2's CPUOffloadPolicy."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from bench.offload.limits import WIDTH, synchronize, timed
from bench.offload.switches import KINDS, State
from bench.pairs import ratios


def make_model(device: torch.device, layers: int) -> nn.Sequential:
    """Square layers without biases, under torch's default initialization."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)))


def to_cpu(device: torch.device, layers: int, pairs: int) -> dict[str, Any]:
    """Our offload and load of the parameters, then ``model.to("cpu")`` and back, pair by pair.

    On a CPU ``to`` copies nothing; there a clone of each parameter stands for it, once for each direction.
    """
    state, model = State(device, layers), make_model(device, layers)
    sums = state.checksums()

    def away() -> None:
        if device.type == "cuda":
            model.to("cpu")
            torch.cuda.empty_cache()
            return
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def back() -> None:
        if device.type == "cuda":
            model.to(device)
        else:
            away()

    works: Mapping[tuple[str, str], Callable[[], object]] = {
        ("rljob", "offload"): lambda: state.store.offload(KINDS[:1]),
        ("rljob", "load"): lambda: state.store.load(KINDS[:1]),
        ("to", "offload"): away,
        ("to", "load"): back,
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for _ in range(pairs + 1):
        for key, work in works.items():
            synchronize(device)
            started = time.perf_counter()
            work()
            synchronize(device)
            seconds[key].append(time.perf_counter() - started)
    if state.checksums() != sums:
        raise RuntimeError("state changed")
    return beside({key: values[1:] for key, values in seconds.items()}) | {"stands_for": "to" if device.type == "cuda" else "clone"}


def beside(seconds: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Any]:
    """Medians of both sides, and each pair's ratio, by direction; from the seconds by side and direction."""
    medians = {f"{'rljob_' if side == 'rljob' else ''}{way}_s": statistics.median(values) for (side, way), values in seconds.items()}
    return medians | {"ratios": {way: ratios(seconds["rljob", way], seconds["to", way]) for way in ("offload", "load")}}


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
