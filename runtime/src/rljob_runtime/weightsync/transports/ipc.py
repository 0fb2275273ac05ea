"""Packed buckets that engines read where the trainer has packed them: in the memory of the device that both are on.

::

    trainer ranks   all gather bucket i, each of them packs it into a buffer of its device and exports that once for every reader
    driver          hands each engine the exports of the ranks on its devices
    engines         every process opens its own, loads from it, and closes it; then the buffer takes bucket i + 2

No byte goes through the host. An export is what ``torch.multiprocessing`` makes of a tensor: of CUDA memory a handle of the driver, of host
memory the name of a shared segment, so that the same code runs without a GPU, between processes of one node. Both are counted by torch, and
each export is opened once.

Torch keeps exported CUDA memory until each reader has opened it and let go of it. One that could not open it, or was killed, never does,
and the buffer would stay on the trainer's device until its process ends. So exports of a sync that broke off are counted down by the
sender: those of a test at once, as no model is loaded from them; others once all readers have passed the next test, which they do after
what they read before.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rljob_runtime.cluster.protocol import Pending
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.delta import Images
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.encoding import changes_of, pack_into, room_for
from rljob_runtime.weightsync.group import device_here
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.parcel import NOT_OPENED, Parcel, Remote, compare, fingerprint
from rljob_runtime.weightsync.transport import Shapes, SyncLink, TransportSettings, WeightSource
from rljob_runtime.weightsync.transports.tested import TEST_PART, TEST_VERSION, TestedTransport

TURNS = 2
"""Buffers of a rank: one is packed while the other is loaded from."""
RELEASE_PART = -1
"""Sends nothing: gives back the buffers, whose readers are done."""
DEVICE_ARGUMENT = 6
"""Of ``rebuild_cuda_tensor``: the device's index, which the reader may count differently."""
COUNTER_ARGUMENTS = slice(11, 13)
"""The file of the reader's counter, and its place there."""

Counter = tuple[bytes, int]
"""Counts one reader of an export, see :data:`COUNTER_ARGUMENTS`."""
LEFT: list[Counter] = []
"""Of exports of syncs that broke off in this process, of which readers may still make use."""

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
        self._sources = self._neighbors(link)
        readers: dict[int, list[Reader]] = {}
        for reader, rank in self._sources.items():
            readers.setdefault(rank, []).append(reader)
        sender = {"readers": readers, "dense_above": self._settings.dense_above}
        made = link.on_trainers("prepare_sender", f"{__name__}:{HandleSender.__name__}", link.manifest, sender)
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
        return {"streams": True, "tests": [self._for_engine(index, packed)], "copies": self._settings.copies_of(index)}

    def _for_engine(self, index: int, packed: Sequence[Mapping[Reader, Parcel] | None]) -> Parcel:
        """What the processes of an engine open, as one parcel."""
        own = [(packed[rank] or {})[reader] for reader, rank in self._sources.items() if reader[0] == index]
        payloads = [parcel.payload for parcel in own]
        if any((parcel.checksum, parcel.base) != (own[0].checksum, own[0].base) for parcel in own):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Remote):
    """A bucket in memory of devices that its readers are on, too."""

    exports: tuple[bytes, ...]
    """By process of the engine; what opens the memory in one other process, once. Not opened where there are no bytes."""
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
        if not self.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device=device)
        try:
            data = _opened(self.exports[process], device)
        except (RuntimeError, OSError, EOFError) as error:
            raise WeightSyncError(f"{self.what} {NOT_OPENED} {device}: {error}") from error
        compare(fingerprint(data), self.sent_checksum, self.what)
        return data


class HandleSender:
    """A trainer rank's end: a part is one bucket, which every rank with readers packs."""

    def __init__(
        self, source: WeightSource, manifest: WeightManifest, *, readers: Mapping[int, Sequence[Reader]], dense_above: float | None
    ) -> None:
        """``readers``: by rank, who reads from it; ``dense_above`` as in the settings."""
        self._source = source
        self._manifest = manifest
        self._ranks = tuple(readers)
        self._readers = tuple(readers.get(source.rank, ()))
        self._device = device_here()
        self._held: dict[int, torch.Tensor] = {}
        self._tested: list[Counter] = []
        self._loaded: list[Counter] = []
        """Of exports that are not known to have been read, of a test and of weights."""
        self._delta = None if dense_above is None or not self._readers else DeviceDeltaEncoder(dense_above, self._device)

    def send(self, version: int, part: int) -> Mapping[Reader, Parcel] | None:
        """A parcel for each of the rank's readers, None where it has none; or give back what they have read."""
        if part == RELEASE_PART:
            self._tested.clear()  # all readers are done, and have counted
            self._loaded.clear()
            count_down(LEFT)
            self._free()
            return None
        bucket = self._manifest.buckets[part]
        owned = dict.fromkeys(self._ranks, bucket)
        if not self._readers:
            self._source.pack_buckets(owned)
            return None
        self._held.pop(part % TURNS, None)
        data, base = self._packed(version, bucket, owned)
        self._held[part % TURNS] = data
        proof = fingerprint(data)  # on CUDA also the end of what is still being packed
        what = f"bucket {bucket.index} of weights v{version} ({data.numel()} bytes) from trainer rank {self._source.rank}"
        return {
            reader: Parcel(
                version=version,
                checksum=proof,
                payload=Export(
                    exports=(self._exported(data, version) if data.numel() else b"",),
                    size_bytes=data.numel(),
                    sent_checksum=proof,
                    what=what,
                ),
                base=base,
            )
            for reader in self._readers
        }

    def _packed(self, version: int, bucket: Bucket, owned: Mapping[int, Bucket]) -> tuple[torch.Tensor, int | None]:
        """What the readers get of a bucket, where they can open it, and the version that it changes."""
        delta = None if version == TEST_VERSION else self._delta
        place = partial(shared_buffer, device=self._device)
        if delta is not None:
            return changes_of(self._source, owned, delta, version, place)
        room = room_for(self._source, owned, lambda: place(bucket.size_bytes))
        pack_into(self._source, owned, room)
        return room, None

    def _exported(self, data: torch.Tensor, version: int) -> bytes:
        rebuild, arguments = reduced = reduce_tensor(data)
        if rebuild is rebuild_cuda_tensor:
            (self._tested if version == TEST_VERSION else self._loaded).append(arguments[COUNTER_ARGUMENTS])
        return bytes(ForkingPickler.dumps(reduced))

    def close(self) -> None:
        """Give the buffers back, also if they were not read."""
        count_down(self._tested)
        LEFT.extend(self._loaded)
        self._loaded.clear()
        self._free()

    def _free(self) -> None:
        self._held.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


class HandleReceiver:
    """An engine's end; its processes open what comes by themselves."""

    def __init__(self, *, streams: bool, tests: Sequence[Parcel], copies: str | None) -> None:
        """Keep the settings.

        Args:
            streams: always, as buffers are filled again.
            tests: what the ranks on the engine's devices packed first.
            copies: name of the engine's copies, where later buckets may bring only what changed; None: all are whole.
        """
        self._streams = streams
        self.holdings = None if copies is None else Holdings(copies=copies)
        self._images = None if copies is None else Images(copies)
        self.tests: Sequence[Remote] = [test.payload for test in tests if isinstance(test.payload, Remote)]

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        return UpdateAssembly(manifest, version, expected, streams=self._streams, images=self._images)

    def close(self) -> None:
        """Free the copies of this process."""
        if self.holdings is not None:
            self.holdings.free()


def shared_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros, of which gaps between slots keep theirs; in host memory where others can open it."""
    if device.type == "cuda":
        with _plain_segments():
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.multiprocessing.set_sharing_strategy("file_system")  # the default passes an open file, which an unrelated process cannot receive
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    return data.share_memory_() if num_bytes else data


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


def count_down(counters: list[Counter]) -> None:
    """Count readers of exports as done, as each does itself by the same call; where the counters are gone already, nothing happens."""
    while counters:
        torch.UntypedStorage._release_ipc_counter_cuda(*counters.pop())


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
