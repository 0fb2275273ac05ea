"""An engine that skips one tensor of every update after the first: the fault that the probe exists for."""

import numpy as np
import numpy.typing as npt

from rljob_runtime.engine.vllm.adapter import VllmAdapter
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.records import WeightManifest

ADAPTER = VllmAdapter(factory=f"{__name__}:SkippingEngine")
SKIPPED = "model.layers.1.mlp.down_proj.weight"


class SkippingEngine(VllmEngine):
    """Keeps the first version's bytes of :data:`SKIPPED`; everything else is real."""

    _first: npt.NDArray[np.uint8] | None = None

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        self._manifest = manifest
        super().begin_update(manifest, version)

    def load_bucket(self, bucket_index: int, data: npt.NDArray[np.uint8]) -> None:
        for slot in self._manifest.buckets[bucket_index].slots:
            if slot.name == SKIPPED:
                place = slice(slot.offset_bytes, slot.offset_bytes + slot.size_bytes)
                if self._first is None:
                    self._first = np.array(data[place])
                data = np.array(data)
                data[place] = self._first
        super().load_bucket(bucket_index, data)
