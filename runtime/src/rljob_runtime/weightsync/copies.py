"""Copies of buckets in the processes of an engine, for transports that bring a bucket to each of these, on its own device.

::

    whole bucket   fetched ──> loaded, or written into parameters      and copied, if it is needed
    changes        fetched ──> written into parameters                 and into the copy, if there is one
                           └─> or the copy, changed, is loaded

A bucket can be fetched once in each process, so the process alone can apply what came to its copy. Copies are in host memory: beside the
model, an engine's device has no room for its weights again. A process keeps one only where the engine asks for it by fetching a
:class:`Kept`; a worker of vLLM needs it for tensors that it loads instead of writing (``engine.vllm.patched_updates``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rljob_runtime.errors import WholeNeededError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.changes import split_changes
from rljob_runtime.weightsync.parcel import SEND_WHOLE, ByteArray, Remote

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Remote):
    """The copy of a bucket in the process that fetches it; any number of times, until the next update changes it."""

    owner: str
    bucket: Bucket
    version: int

    @property
    def num_bytes(self) -> int:
        """Of the whole bucket."""
        return self.bucket.size_bytes

    @property
    def lent(self) -> bool:
        """It stays as it is during an update."""
        return False

    def fetch(self, process: int, device: torch.device) -> torch.Tensor:
        """The whole bucket; on CPU the copy itself.

        Raises:
            WholeNeededError: the process has no copy of this version.
        """
        return _tensor(COPIES.held(self.owner, process, self.bucket, self.version)).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Remote):
    """A bucket, or what changed of it, on its way to processes that keep a copy of it. Its own size is that of the whole bucket."""

    owner: str
    """Whose copies these are: the same for all updates of an engine."""
    bucket: Bucket
    version: int
    base: int | None
    """Version that it changes, see ``delta``; None: it is whole."""
    arriving: Remote
    """What travels; to be fetched instead where no copy is needed."""

    @property
    def num_bytes(self) -> int:
        """Of what :meth:`fetch` makes of it."""
        return self.arriving.num_bytes if self.base is None else self.bucket.size_bytes

    @property
    def lent(self) -> bool:
        """As of what arrives."""
        return self.arriving.lent

    @property
    def copy(self) -> Copied:
        """What is there once it was fetched."""
        return Copied(owner=self.owner, bucket=self.bucket, version=self.version)

    def fetch(self, process: int, device: torch.device) -> torch.Tensor:
        """The whole bucket; errors are those of :meth:`fetch_arriving`."""
        data = self.fetch_arriving(process, device)
        return data if self.base is None else self.copy.fetch(process, device)

    def fetch_arriving(self, process: int, device: torch.device) -> torch.Tensor:
        """What travels, and bring the copy up to date with it; see ``Remote.fetch``.

        Raises:
            WholeNeededError: it changes a version of which the process has no copy; others that fetch it got it nevertheless.
        """
        data = self.arriving.fetch(process, device)
        COPIES.update(self, process, data.cpu().numpy())
        return data


class Copies:
    """All copies of this process; one thread at a time for each engine."""

    def __init__(self) -> None:
        """None."""
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, int], tuple[int, ByteArray]] = {}
        """By owner, process and bucket: the version, and the bytes."""

    def size_bytes(self, owner: str) -> int:
        """Of all copies of an engine in this process."""
        with self._lock:
            return sum(copy.size for (name, _, _), (_, copy) in self._held.items() if name == owner)

    def forget(self, owner: str) -> None:
        """Free all copies of an engine in this process: its next update is whole."""
        with self._lock:
            self._held = {key: held for key, held in self._held.items() if key[0] != owner}

    def update(self, kept: Kept, process: int, data: ByteArray) -> None:
        """Bring the copy to the version of what came; errors are those of :meth:`held`."""
        key = kept.owner, process, kept.bucket.index
        if kept.base is None:
            with self._lock:
                before = self._held.pop(key, None)
            copy = before[1] if before is not None and before[1].size == data.size else np.empty(data.size, dtype=np.uint8)
            np.copyto(copy, data)
        else:
            copy = self.held(kept.owner, process, kept.bucket, kept.base)
            changed, numbers = split_changes(kept.bucket, data)
            copy.view(numbers.dtype)[changed] = numbers
        with self._lock:
            self._held[key] = kept.version, copy

    def held(self, owner: str, process: int, bucket: Bucket, version: int) -> ByteArray:
        """The copy of a bucket, shape (bucket.size_bytes,) uint8.

        Raises:
            WholeNeededError: there is none of that version.
        """
        with self._lock:
            found = self._held.get((owner, process, bucket.index))
        if found is None or found[0] != version:
            here = "none" if found is None else f"one of v{found[0]}"
            raise WholeNeededError(
                f"process {process} of {owner} needs its copy of bucket {bucket.index} of weights v{version}, and has {here}; {SEND_WHOLE}"
            )
        return found[1]


COPIES = Copies()
"""Of all engines that have processes here."""


def _tensor(data: ByteArray) -> torch.Tensor:
    import torch

    return torch.from_numpy(data)
