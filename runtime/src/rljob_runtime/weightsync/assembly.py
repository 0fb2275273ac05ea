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
from rljob_runtime.weightsync.delta import Images
from rljob_runtime.weightsync.parcel import Held, Parcel, Payload, Remote, size_of
from rljob_runtime.weightsync.shared_memory import SharedBytes

ByteArray = npt.NDArray[np.uint8]
Part = ByteArray | Parcel
"""A bucket as it comes: bytes alone, or with what proves them."""

MAX_NAMES_IN_MESSAGE = 8


class UpdateAssembly:
    """Collects the buckets of one update; safe to use from several threads. See ``transport.IncomingUpdate``."""

    def __init__(
        self,
        manifest: WeightManifest,
        version: int,
        expected: Mapping[str, tuple[int, ...]] | None,
        *,
        streams: bool = False,
        proves_late: bool = False,
        images: Images | None = None,
    ) -> None:
        """Check the manifest against the model.

        Args:
            manifest: the layout of what will come.
            version: what the engine serves once this update is in place.
            expected: Hugging Face name -> full shape of every parameter the model needs; None skips the check (fakes).
            streams: see ``transport.IncomingUpdate``.
            proves_late: shared bytes are compared with what was sent by those that load them, not as they come.
            images: what came before, where buckets may bring only what changed.

        Raises:
            WeightSyncError: names or shapes differ, or the version is negative.
        """
        if version < 0:
            raise WeightSyncError(f"begin_update: version {version} must not be negative")
        if expected is not None:
            verify_manifest(manifest, expected)
        self.manifest = manifest
        self.version = version
        self.streams = streams
        self.received_bytes = 0
        self._proves_late = proves_late and images is None
        self.images = images
        """What came before, where buckets may bring only what changed; None elsewhere."""
        self._lock = threading.Lock()
        self._received: dict[int, Payload] = {}
        self._handed_out: set[int] = set()

    def take(self, part: int, data: Part) -> None:
        """Take one bucket; a writable array is copied because its owner may fill it again.

        Raises:
            CorruptedWeightsError: its bytes are not those that were sent; with ``proves_late`` the load raises it.
            WeightSyncError: unknown or repeated index, of another version, or another size than the manifest's.
        """
        if not 0 <= part < len(self.manifest.buckets):
            raise WeightSyncError(
                f"load_bucket: index {part} is outside the manifest's 0..{len(self.manifest.buckets) - 1}; "
                "begin the update with the manifest the sender packs by"
            )
        kept = self._opened(self.manifest.buckets[part], data)
        with self._lock:
            if part in self._received:
                raise WeightSyncError(f"load_bucket: bucket {part} arrived twice in the update to version {self.version}")
            self._received[part] = kept
            self.received_bytes += data.size_bytes if isinstance(data, Parcel) else data.size

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

    def receive(self, deadline: float) -> Iterator[tuple[Bucket, Payload]]:
        """Buckets that are here and were not handed out yet, in order; nothing is waited for."""
        with self._lock:
            waiting = {index: payload for index, payload in self._received.items() if index not in self._handed_out}
        for index, payload in sorted(waiting.items()):
            yield self.manifest.buckets[index], payload
            self._handed_out.add(index)

    def _opened(self, bucket: Bucket, data: Part) -> Payload:
        """The bytes of a bucket, proven."""
        if isinstance(data, Parcel):
            what = f"bucket {bucket.index} of {len(self.manifest.buckets)}"
            if data.version != self.version:
                raise WeightSyncError(f"load_bucket: {what} is of weights v{data.version}, the update is to version {self.version}")
            proves_late = self._proves_late and isinstance(data.payload, SharedBytes)
            if not proves_late:
                data.check(what)
            if data.base is not None and self.images is None:
                raise WeightSyncError(f"load_bucket: {what} has only what changed since v{data.base}, and this engine keeps no weights")
            payload: Payload = data.payload if self.images is None else self.images.take(bucket, data)
            if proves_late:
                payload = data.unproven(what)
        else:
            payload = data
        if isinstance(payload, Held):
            size = bucket.size_bytes if payload.whole is None else size_of(payload.whole)
            described = f"{size} bytes"
        elif isinstance(payload, Remote):
            size, described = payload.num_bytes, f"{payload.num_bytes} bytes to be fetched"
        elif isinstance(payload, SharedBytes):
            size, described = payload.size_bytes, f"{payload.size_bytes} shared bytes"
        else:
            size, described = payload.size, f"{payload.dtype}{payload.shape}"
            size = size if payload.dtype == np.uint8 and payload.ndim == 1 else -1
        if size != bucket.size_bytes:
            raise WeightSyncError(
                f"load_bucket: bucket {bucket.index} arrived as {described}, the manifest says {bucket.size_bytes} bytes of "
                "uint8; the sender packs by another manifest"
            )
        return payload.copy() if isinstance(payload, np.ndarray) and payload.flags.writeable else payload


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
