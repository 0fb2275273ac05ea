"""A trainer rank as the driver's part of a transport calls it: whoever has weights to send derives from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.transport import ByteArray, Sender, make_end


class SendingRank(ABC):
    """Makes the end that a transport asks for, and calls it; a :class:`~rljob_runtime.weightsync.transport.WeightSource`."""

    rank: int
    world_size: int
    _sender: Sender | None = None

    @abstractmethod
    def pack_buckets(
        self, buckets: Mapping[int, Bucket], out: Any = None, on_packed: Callable[[int], None] | None = None
    ) -> ByteArray | None:
        """See :meth:`~rljob_runtime.weightsync.transport.WeightSource.pack_buckets`."""

    def prepare_sender(self, sender: str, manifest: WeightManifest, settings: Mapping[str, Any]) -> None:
        """Make this rank's end of a weight transport; all ranks must call it.

        Args:
            sender: ``module:Class``, see :class:`~rljob_runtime.weightsync.transport.Sender`.
            manifest: the layout of what it sends.
            settings: keyword arguments of it.

        Raises:
            WeightSyncError: it cannot be made here.
        """
        self.close_sender()
        self._sender = make_end(sender, self, manifest, **settings)

    def close_sender(self) -> None:
        """Give back what this rank's end of a weight transport holds; nothing is sent any more."""
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.close()

    def send_weights(self, version: int, part: int) -> Any:
        """Send one part of the present weights; all ranks must call it.

        Raises:
            WeightSyncError: no transport was prepared, or the part does not fit the model.
            OffloadError: weights are off the device.
        """
        if self._sender is None:
            raise WeightSyncError(f"trainer rank {self.rank} has no transport to send version {version}; call prepare_sender first")
        return self._sender.send(version, part)
