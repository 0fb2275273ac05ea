"""State off the device and back, beside what bare copies reach."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from bench.gpu_check.limits import copy_rates
from bench.gpu_check.lines import Line, equal, share
from bench.gpu_check.scale import Scale

MATRICES = 16
"""Of the parameters; moments are twice as many."""


def check(scale: Scale) -> Iterator[Line]:
    """Float32 parameters and moments through ``rljob_runtime.offload``; each direction against a bare copy, every bit equal."""
    from rljob_runtime.offload.slabs import HostSlabs
    from rljob_runtime.offload.states import StateKind
    from rljob_runtime.offload.store import StateStore

    kinds = (StateKind.PARAMS, StateKind.OPTIMIZER)
    numbers = scale.state_bytes // 4 // MATRICES
    tensors = [torch.rand(numbers, device=scale.device) for _ in range(3 * MATRICES)]
    store = StateStore(scale.device, HostSlabs(pinned=scale.on_cuda), name="gpu-check")
    for index, tensor in enumerate(tensors):
        store.register(kinds[index >= MATRICES], str(index), tensor)
    before = _sums(tensors)
    store.reserve(kinds)
    pairs = [(store.offload(kinds), store.load(kinds)) for _ in range(scale.repeat + 1)][1:]
    rates = copy_rates(scale.device, scale.copied_bytes, scale.repeat)
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    for index, (name, direction) in enumerate((("off", "offload"), ("onto", "load"))):
        seconds = statistics.median(pair[index].elapsed_s for pair in pairs)
        yield share(
            "offload",
            f"{direction} of {total_bytes / 2**30:.2f} GiB",
            total_bytes / seconds / 1e9,
            "GB/s",
            limit=rates[name] / 1e9,
            limit_name="bare copies",
            at_least=scale.speed(0.85),
        )
    after = _sums(tensors)
    yield equal("offload", "bits after offload and load", float(sum(a != b for a, b in zip(before, after, strict=True))))


def _sums(tensors: list[torch.Tensor]) -> list[int]:
    """One exact number per tensor: the sum of its bits as integers."""
    return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors]
