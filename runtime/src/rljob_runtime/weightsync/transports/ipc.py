"""Packed buckets that engines read where the trainer has packed them: in the memory of the device that both are on.

::

    trainer ranks   all gather bucket i, each of them packs it into a buffer of its device and exports that once for every reader
    driver          hands each engine the exports of the ranks on its devices
    engines         every process opens its own, loads from it, and closes it; then the buffer takes bucket i + 2

No byte goes through the host. An export is what ``torch.multiprocessing`` makes of a tensor: of CUDA memory a handle of the driver, of host
memory the name of a shared segment, so that the same code runs without a GPU, between processes of one node. Both are counted by torch, and
each export is opened once.
"""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rljob_runtime.cluster.protocol import Pending
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.group import device_here
from rljob_runtime.weightsync.parcel import NOT_OPENED, Parcel, Remote, compare, fingerprint
from rljob_runtime.weightsync.transport import Shapes, SyncLink, TransportSettings, WeightSource
from rljob_runtime.weightsync.transports.tested import TEST_PART, TEST_VERSION, TestedTransport

TURNS = 2
"""Buffers of a rank: one is packed while the other is loaded from."""
RELEASE_PART = -1
"""Sends nothing: gives back the buffers, whose readers are done."""
DEVICE_ARGUMENT = 6
"""Of ``rebuild_cuda_tensor``: the device's index, which the reader may count differently."""

Reader = tuple[int, int]
"""An engine by its index, and a process of it by its rank there."""


class IpcTransport(TestedTransport):
    """The driver's part; see :class:`~rljob_runtime.weightsync.transport.Transport`."""

    title = "IPC"

    def __init__(self, settings: TransportSettings) -> None:
        """Who reads from whom is known with the engines."""
        super().__init__(settings)
        self._sources: dict[Reader, int] = {}

    async def _prepare(self, link: SyncLink) -> None:
        if self._settings.dense_above is not None:
            raise WeightSyncError("changed numbers alone save nothing where no byte travels; remove weightSync.delta")
        self._sources = self._neighbors(link)
        readers: dict[int, list[Reader]] = {}
        for reader, rank in self._sources.items():
            readers.setdefault(rank, []).append(reader)
        made = link.on_trainers("prepare_sender", f"{__name__}:{HandleSender.__name__}", link.manifest, {"readers": readers})
        await link.trainers_done(made)
        packed = await link.trainers_done(link.on_trainers("send_weights", TEST_VERSION, TEST_PART))
        ends = {
            index: engine.start("prepare_receiver", f"{__name__}:{HandleReceiver.__name__}", self._test(index, packed))
            for index, engine in link.engines.items()
        }
        await link.together_done(ends)
        await link.trainers_done(link.on_trainers("send_weights", TEST_VERSION, RELEASE_PART))

    def _neighbors(self, link: SyncLink) -> dict[Reader, int]:
        """The trainer rank on the device of every process of the engines.

        Raises:
            WeightSyncError: there is none for some.
        """
        found: dict[Reader, int] = {}
        for index, engine in link.engines.items():
            for process, rank in enumerate(self._settings.processes(index)):
                if rank is None:
                    raise WeightSyncError(f"no trainer rank is on the device of process {process} of {engine.name}")
                found[index, process] = rank
        return found

    def _test(self, index: int, packed: Sequence[Mapping[Reader, Parcel] | None]) -> dict[str, Any]:
        return {"streams": True, "tests": [self._for_engine(index, packed)]}

    def _for_engine(self, index: int, packed: Sequence[Mapping[Reader, Parcel] | None]) -> Parcel:
        """What the processes of an engine open, as one parcel."""
        own = [(packed[rank] or {})[reader] for reader, rank in self._sources.items() if reader[0] == index]
        payloads = [parcel.payload for parcel in own]
        if any(parcel.checksum != own[0].checksum for parcel in own):
            raise WeightSyncError("trainer ranks packed different bytes of one bucket")
        opened = tuple(payload.exports[0] for payload in payloads if isinstance(payload, Export))
        assert isinstance(own[0].payload, Export)
        return replace(own[0], payload=replace(own[0].payload, exports=opened))

    async def _transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Pack one bucket ahead; one whose buffer is needed has to be in all engines first."""
        begun = link.on_engines("begin_update", link.manifest, version)
        loading: list[dict[int, Pending]] = []
        for part, bucket in enumerate(link.manifest.buckets):
            if part >= TURNS:
                await link.together_done(loading[part - TURNS])
            packing = link.on_trainers("send_weights", version, part)
            await link.together_done(begun)
            begun = {}
            packed = await link.trainers_done(packing)
            loading.append(
                {i: engine.start("load_bucket", bucket.index, self._for_engine(i, packed)) for i, engine in link.engines.items()}
            )
        for calls in loading[-TURNS:]:
            await link.together_done(calls)
        finishing = link.finish()
        await link.trainers_done(link.on_trainers("send_weights", version, RELEASE_PART))
        return await link.together_done(finishing)

    async def _release(self, reason: str) -> None:
        """Nothing is waited for: who opens an export that is gone gets an error."""
        del reason
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Remote):
    """A bucket in memory of devices that its readers are on, too."""

    exports: tuple[bytes, ...]
    """By process of the engine; what opens the memory in one other process, once."""
    size_bytes: int
    sent_checksum: int
    what: str
    """For messages."""

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.size_bytes

    @property
    def lent(self) -> bool:
        """They stay in the trainer's memory."""
        return True

    def fetch(self, process: int, device: torch.device) -> torch.Tensor:
        """Open the memory; see ``Remote.fetch``."""
        try:
            data = _opened(self.exports[process], device)
        except (RuntimeError, OSError, EOFError) as error:
            raise WeightSyncError(f"{self.what} {NOT_OPENED} {device}: {error}") from error
        compare(fingerprint(data), self.sent_checksum, self.what)
        return data


class HandleSender:
    """A trainer rank's end: a part is one bucket, which every rank with readers packs."""

    def __init__(self, source: WeightSource, manifest: WeightManifest, *, readers: Mapping[int, Sequence[Reader]]) -> None:
        """``readers``: by rank, who reads from it."""
        self._source = source
        self._manifest = manifest
        self._ranks = tuple(readers)
        self._readers = tuple(readers.get(source.rank, ()))
        self._device = device_here()
        self._held: dict[int, torch.Tensor] = {}

    def send(self, version: int, part: int) -> Mapping[Reader, Parcel] | None:
        """A parcel for each of the rank's readers, None where it has none; or give back what they have read."""
        if part == RELEASE_PART:
            self.close()
            return None
        bucket = self._manifest.buckets[part]
        owned = dict.fromkeys(self._ranks, bucket)
        if not self._readers:
            self._source.pack_buckets(owned)
            return None
        self._held.pop(part % TURNS, None)
        data = self._held[part % TURNS] = shared_buffer(bucket, self._device)
        self._source.pack_buckets(owned, data if data.is_cuda else data.numpy())
        proof = fingerprint(data)  # on CUDA also the end of what is still being packed
        what = f"bucket {bucket.index} of weights v{version} ({bucket.size_bytes} bytes) from trainer rank {self._source.rank}"
        return {
            reader: Parcel(
                version=version,
                checksum=proof,
                payload=Export(exports=(_exported(data),), size_bytes=bucket.size_bytes, sent_checksum=proof, what=what),
            )
            for reader in self._readers
        }

    def close(self) -> None:
        """Give the buffers back."""
        self._held.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


class HandleReceiver:
    """An engine's end; its processes open what comes by themselves."""

    def __init__(self, *, streams: bool, tests: Sequence[Parcel]) -> None:
        """``tests``: what the ranks on the engine's devices packed first; ``streams``: always, as buffers are filled again."""
        self._streams = streams
        self.tests: Sequence[Remote] = [test.payload for test in tests if isinstance(test.payload, Remote)]

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        return UpdateAssembly(manifest, version, expected, streams=self._streams)


def shared_buffer(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Zeros, of which gaps between slots keep theirs; in host memory where others can open it."""
    if device.type == "cuda":
        with _plain_segments():
            return torch.zeros(bucket.size_bytes, dtype=torch.uint8, device=device)
    torch.multiprocessing.set_sharing_strategy("file_system")  # the default passes an open file, which an unrelated process cannot receive
    return torch.zeros(bucket.size_bytes, dtype=torch.uint8).share_memory_()


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate what other processes can open by a handle.

    Memory of expandable segments, where the user has chosen these, is opened by the system call ``pidfd_getfd``, which containers and the
    kernel's Yama module refuse. Torch replaces all settings at once and resets those that the string lacks to their defaults, so the string
    that is set repeats the other settings.
    """
    before = torch._C._accelerator_getAllocatorSettings()
    plain = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", before, flags=re.IGNORECASE)
    if plain == before:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(plain)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def _exported(data: torch.Tensor) -> bytes:
    return bytes(ForkingPickler.dumps(reduce_tensor(data)))


def _opened(export: bytes, device: torch.device) -> torch.Tensor:
    """The lowest border between CUDA and CPU: whose memory it is."""
    rebuild, arguments = pickle.loads(export)
    given = list(arguments)
    if rebuild is rebuild_cuda_tensor:
        given[DEVICE_ARGUMENT] = device.index
    data: torch.Tensor = rebuild(*given)
    if data.device != device:
        raise WeightSyncError(f"the trainer's memory is on {data.device}, the engine's process on {device}")
    return data
