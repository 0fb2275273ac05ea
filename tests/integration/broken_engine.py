"""Engines with faults: one skips a tensor of every update after the first, the other does what a file beside the job tells it."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.adapter import VllmAdapter
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.assembly import Part
from rljob_runtime.weightsync.parcel import Parcel, view

ADAPTER = VllmAdapter(factory=f"{__name__}:SkippingEngine")
FAULTY = VllmAdapter(factory=f"{__name__}:FaultyEngine")
FIRST, FAILED, MOVED = "the first token is there", "the fault happens", "a response that began elsewhere has a token"
"""In the engine's log, with the time in seconds."""
FAULT_FILE = "ENGINE_FAULT_FILE"
"""Variable that names a file; while it says ``raise`` or ``hang`` an engine with a response of few tokens does so and removes it."""
SKIPPED = "model.layers.1.mlp.down_proj.weight"


class SkippingEngine(VllmEngine):
    """Keeps the first version's bytes of :data:`SKIPPED`; everything else is real."""

    _first: npt.NDArray[np.uint8] | None = None

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        self._manifest = manifest
        super().begin_update(manifest, version)

    def load_bucket(self, bucket_index: int, data: Part) -> None:
        for slot in self._manifest.buckets[bucket_index].slots:
            if slot.name == SKIPPED:
                place = slice(slot.offset_bytes, slot.offset_bytes + slot.size_bytes)
                changed = np.array(view(data.payload) if isinstance(data, Parcel) else data)
                if self._first is None:
                    self._first = changed[place].copy()
                changed[place] = self._first
                data = changed
        super().load_bucket(bucket_index, data)


class FaultyEngine(VllmEngine):
    """Its thread raises, or hangs, in the middle of generation; everything else is real."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        assert self.loop is not None
        step, file, loop = self.loop.step, Path(os.environ[FAULT_FILE]), self.loop

        first = True

        def faulty() -> None:
            nonlocal first
            step()
            if first and any(response.token_ids for response in loop.responses.values()):
                print(f"{FIRST} at {time.time()}", flush=True)
                first = False
            if any("+" in request_id and response.token_ids for request_id, response in loop.responses.items()):
                print(f"{MOVED} at {time.time()}", flush=True)
            # early in a response: one that ends with its next token would not be seen going on
            if any(0 < len(response.token_ids) <= 8 for response in loop.responses.values()) and (fault := _take(file)):
                print(f"{FAILED} at {time.time()}", flush=True)
                if fault == "raise":
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                threading.Event().wait()

        self.loop.step = faulty  # type: ignore[method-assign]


def _take(file: Path) -> str:
    """Return the fault that the file asks for and remove the file; empty without one. Of several engines one takes it."""
    if not file.exists():
        return ""
    taken = file.with_suffix(f".taken-{os.getpid()}")
    try:
        file.rename(taken)
    except FileNotFoundError:  # another engine was first
        return ""
    return taken.read_text()
