"""Weight transports by ``weightSync.backend``; each file has all three ends of one."""

from __future__ import annotations

import importlib

from rljob_api.v1alpha1.operations import SyncBackend
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.weightsync.transport import Transport, TransportSettings

TRANSPORTS: dict[SyncBackend, str] = {
    SyncBackend.OBJECT_STORE: "rljob_runtime.weightsync.transports.object_store:ObjectStoreTransport",
    SyncBackend.SHARED_MEMORY: "rljob_runtime.weightsync.transports.shared_memory:SharedMemoryTransport",
    SyncBackend.IPC: "rljob_runtime.weightsync.transports.ipc:IpcTransport",
    SyncBackend.NCCL: "rljob_runtime.weightsync.transports.collective:NcclTransport",
    SyncBackend.TCP: "rljob_runtime.weightsync.transports.collective:TcpTransport",
}
"""``module:Class`` of the driver's part; imported when a job asks for it."""


def transport(backend: SyncBackend, settings: TransportSettings) -> Transport:
    """A new transport.

    Raises:
        WeightSyncError: there is none of that name.
    """
    if backend not in TRANSPORTS:
        raise WeightSyncError(f"weightSync.backend {backend} has no transport; this runtime has {', '.join(TRANSPORTS)}")
    module, _, name = TRANSPORTS[backend].partition(":")
    made: Transport = getattr(importlib.import_module(module), name)(settings)
    return made
