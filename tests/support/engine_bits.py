"""Which bits a vLLM engine multiplies with, in each of its workers: what an update left must be what a start from the files gives."""

from __future__ import annotations

from typing import Any

import torch

from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.weightsync.parcel import checksum


def multiplied_bits(engine: VllmEngine) -> list[dict[str, int]]:
    """Checksums by name, of each worker: of parameters that have memory, and of what the layers' packed copies multiply with."""
    loop = engine.loop
    assert loop is not None
    found: list[dict[str, int]] = loop.core.collective_rpc(worker_bits)
    return found


def worker_bits(worker: Any) -> dict[str, int]:
    """Of one worker. A packed copy cannot be read; its product with the unit matrix can, and is exact."""
    model, found = worker.model_runner.model, {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            found[name] = bits(parameter.detach())
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and hasattr(layer, "weight"):
            width = layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.embedding_dim
            unit = torch.eye(width, dtype=worker.model_runner.model_config.dtype)
            found[f"{name} packed"] = bits(layer.cpu_linear(unit, layer.weight, None) + 0.0)  # no zero is negative
    return found


def bits(tensor: torch.Tensor) -> int:
    """Of a tensor's numbers, in their order."""
    return checksum(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
