"""Both ends of ``stall``: weights on a device that change in known places, and a vLLM engine that serves calls from a pipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_check.sync_ends import answer_calls
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.packing import pack
from rljob_runtime.weightsync.parcel import fingerprint
from rljob_runtime.weightsync.patching import INTEGERS
from rljob_runtime.weightsync.sending import SendingRank


class WeightHolder(SendingRank):
    """In place of the only trainer rank: the weights of a model folder, without a model."""

    rank = 0
    world_size = 1

    def __init__(self, folder: Path, device: torch.device, dtype: str) -> None:
        """Load them onto the device."""
        from safetensors.torch import load_file

        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self._tensors |= {name: tensor.to(device, getattr(torch, dtype)) for name, tensor in load_file(file).items()}
        self._dtype = dtype

    def weight_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each."""
        return [(name, self._dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def change(self, part: float) -> None:
        """Go to the next larger number at every ``1 / part``-th place of each tensor; with 0 at none."""
        if not part:
            return
        for tensor in self._tensors.values():
            numbers = tensor.view(INTEGERS[tensor.element_size()]).view(-1)
            numbers[:: round(1 / part)] += 1

    def pack_buckets(self, buckets: Mapping[int, Bucket], out: Any = None, on_packed: Any = None) -> Any:
        """Of ``transport.WeightSource``."""
        bucket = buckets[self.rank]
        target = np.zeros(bucket.size_bytes, dtype=np.uint8) if out is None else out
        pack(bucket, {slot.name: self._tensors[slot.name] for slot in bucket.slots}, target)
        return target


class ServedEngine:
    """vLLM, and what the check asks besides."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start it."""
        from rljob_runtime.engine.protocol import EngineConfig
        from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment

        config = EngineConfig(**settings)
        for name in ENVIRONMENT_TO_UNSET:
            os.environ.pop(name, None)
        os.environ.update(engine_environment(config))  # before vLLM is imported

        from rljob_runtime.engine.vllm.engine import VllmEngine

        self.engine = VllmEngine(config)

    def __getattr__(self, name: str) -> Any:
        """Calls of a transport go to the engine."""
        return getattr(self.engine, name)

    def forget_loads(self, writes_whole: bool) -> None:
        """As before its first update; full ones are loaded by vLLM, or written from the third on."""
        from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates

        assert self.engine.loop is not None
        self.engine.loop.weights.patched = PatchedUpdates(drops_copies=True, writes_whole=writes_whole)

    def bits(self) -> dict[str, int]:
        """Of every parameter and buffer of the model, by name; nothing is generated or loaded meanwhile."""
        assert self.engine.loop is not None
        found: dict[str, int] = {}
        for one in self.engine.loop.core.collective_rpc(model_bits):
            found |= one
        return found


def model_bits(worker: Any) -> dict[str, int]:
    """Fingerprints of what a worker of vLLM computes with."""
    model = worker.weight_transfer_engine.model
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: fingerprint(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        for name, tensor in named
        if not tensor.is_meta and tensor.numel()
    }


def serve(settings: Mapping[str, Any], calls: Any) -> None:
    """In a process of its own, until the other end of the pipe is closed."""
    engine: list[ServedEngine] = []

    def start() -> ServedEngine:
        engine.append(ServedEngine(settings))
        return engine[0]

    try:
        answer_calls(start, calls)
    finally:
        for one in engine:
            one.engine.shutdown()
