"""An update of packed buckets on its way into an engine: which have arrived, and whether the manifest fits the model.

Pure bookkeeping; nothing here touches a model, so a refused update leaves the old weights as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest

ByteArray = npt.NDArray[np.uint8]

MAX_NAMES_IN_MESSAGE = 8


class UpdateAssembly:
    """Collects the buckets of one update; safe to use from several threads. See ``transport.IncomingUpdate``."""

    def __init__(self, manifest: WeightManifest, version: int, expected: Mapping[str, tuple[int, ...]] | None) -> None:
        """Check the manifest against the model.

        Args:
            manifest: the layout of what will come.
            version: what the engine serves once this update is in place.
            expected: Hugging Face name -> full shape of every parameter the model needs; None skips the check (fakes).

        Raises:
            WeightSyncError: names or shapes differ, or the version is negative.
        """
        if version < 0:
            raise WeightSyncError(f"begin_update: version {version} must not be negative")
        if expected is not None:
            verify_manifest(manifest, expected)
        self.manifest = manifest
        self.version = version
        self._lock = threading.Lock()
        self._received: dict[int, ByteArray] = {}

    def take(self, part: int, data: ByteArray) -> None:
        """Take one bucket; a writable array is copied because its owner may fill it again.

        Raises:
            WeightSyncError: unknown or repeated index, or another size than the manifest's.
        """
        if not 0 <= part < len(self.manifest.buckets):
            raise WeightSyncError(
                f"load_bucket: index {part} is outside the manifest's 0..{len(self.manifest.buckets) - 1}; "
                "begin the update with the manifest the sender packs by"
            )
        bucket = self.manifest.buckets[part]
        if data.dtype != np.uint8 or data.ndim != 1 or data.size != bucket.size_bytes:
            raise WeightSyncError(
                f"load_bucket: bucket {part} arrived as {data.dtype}{data.shape}, the manifest says {bucket.size_bytes} bytes of "
                "uint8; the sender packs by another manifest"
            )
        kept = data.copy() if data.flags.writeable else data
        with self._lock:
            if part in self._received:
                raise WeightSyncError(f"load_bucket: bucket {part} arrived twice in the update to version {self.version}")
            self._received[part] = kept

    def check(self) -> None:
        """Refuse an update with gaps.

        Raises:
            WeightSyncError: some buckets are missing; names their indexes and parameters.
        """
        with self._lock:
            missing = [bucket for bucket in self.manifest.buckets if bucket.index not in self._received]
        if missing:
            names = [slot.name for bucket in missing for slot in bucket.slots]
            raise WeightSyncError(
                f"finish_update to version {self.version}: {len(missing)} of {len(self.manifest.buckets)} buckets never arrived "
                f"({shorten([str(bucket.index) for bucket in missing])}) with {shorten(names)}; send them, then finish again"
            )

    def receive(self, deadline: float) -> Iterator[tuple[Bucket, ByteArray]]:
        """All buckets in order; they are here, so nothing is waited for."""
        with self._lock:
            received = dict(self._received)
        return ((bucket, received[bucket.index]) for bucket in self.manifest.buckets)


def verify_manifest(manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what an update will bring with what the model holds.

    Raises:
        WeightSyncError: names every kind of difference: missing, unknown, repeated, other shapes.
    """
    slots = [slot for bucket in manifest.buckets for slot in bucket.slots]
    shapes = {slot.name: slot.shape for slot in slots}
    problems = []
    if len(shapes) != len(slots):
        problems.append(f"{len(slots) - len(shapes)} parameters come twice")
    if missing := sorted(expected.keys() - shapes.keys()):
        problems.append(f"missing {shorten(missing)}")
    if unknown := sorted(shapes.keys() - expected.keys()):
        problems.append(f"not in the engine's model: {shorten(unknown)}")
    differing = [f"{name} {shapes[name]} instead of {expected[name]}" for name in sorted(shapes.keys() & expected.keys())
                 if shapes[name] != expected[name]]  # fmt: skip
    if differing:
        problems.append(f"other shapes: {shorten(differing)}")
    if problems:
        raise WeightSyncError(
            f"the manifest ({len(slots)} parameters) does not fit the engine's model ({len(expected)}): {'; '.join(problems)}. "
            "Trainer and engine must start from the same model folder"
        )


def shorten(names: list[str]) -> str:
    """The first few names and how many more there are."""
    rest = len(names) - MAX_NAMES_IN_MESSAGE
    return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
