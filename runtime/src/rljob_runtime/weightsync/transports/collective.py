"""Packed buckets broadcast from each sender to all engines, in a process group that is made for it (``weightsync.group``).

::

    trainer ranks   pack part 0 │ pack part 1 │ ...            all gather, each sender packs its bucket and puts it into its outbox
    senders' groups        └ broadcast 0 │ broadcast 1 │ ...   in the background, at most two of them held
    engines                  receive 0, load │ receive 1 ...   one bucket after the other, the same order in every process

NCCL and TCP are this one transport. With **NCCL** buckets are packed on the sender's device and received on the devices of the engines, in
each of their processes, between two of their steps: there is no room for the weights twice, so each bucket goes into the model as it comes.
With **TCP** buckets travel between the hosts' memories, once to each node, while engines generate: along a chain of sockets from the sender
through one engine of each node, so that no link carries a bucket twice in a direction (``weightsync.chain``). Other engines of a node read
the copy of the first one in shared memory (``weightsync.node_shares``).

A member that is lost breaks the group. The driver, which hears of it first, ends the meeting, and the others begin again without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rljob_runtime.cluster.protocol import Pending, Worker
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.assembly import Part, UpdateAssembly
from rljob_runtime.weightsync.delta import BaseDeltaEncoder, Images
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.encoding import changes_of, host_encoder, pack_into, room_for
from rljob_runtime.weightsync.group import MEMBERSHIPS, Meeting, device_here
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.meetings import Meetings
from rljob_runtime.weightsync.node_shares import NodeCopy, NodeShare, followers_of, shares_of
from rljob_runtime.weightsync.outbox import Outbox
from rljob_runtime.weightsync.packing import as_byte_tensor
from rljob_runtime.weightsync.parcel import Parcel, Remote, compare, fingerprint
from rljob_runtime.weightsync.shares import shared_out
from rljob_runtime.weightsync.transport import ByteArray, PartnerLostError, Shapes, SyncLink, TransportSettings, WeightSource
from rljob_runtime.weightsync.transports.object_store import PackedReceiver
from rljob_runtime.weightsync.transports.tested import TEST_PART, TEST_VERSION, TestedTransport

HOST = torch.device("cpu")


class CollectiveTransport(TestedTransport):
    """The driver's part; see :class:`~rljob_runtime.weightsync.transport.Transport`."""

    on_device = False
    """Whether buckets travel between devices, into every process of an engine; else between hosts, once to each engine."""
    in_chain = False
    """Whether each engine passes buckets on to the next; else torch's group broadcasts them."""

    def __init__(self, settings: TransportSettings) -> None:
        """No group is there yet."""
        super().__init__(settings)
        self._meetings: Meetings | None = None
        self._followers: dict[int, tuple[int, ...]] = {}
        """By engine that receives: the others of its node, which read its copy."""

    async def _prepare(self, link: SyncLink) -> None:
        await self._release("a new group takes its place")
        first_part = shared_out(link.manifest, self._settings.senders)[0]
        senders = tuple(first_part)
        self._followers = followers_of(tuple(link.engines), self._settings) if self.in_chain else dict.fromkeys(link.engines, ())
        shares = shares_of(self._followers, uuid.uuid4().hex, link.manifest, self._settings) if self.in_chain else {}
        if sharing := [index for index, share in shares.items() if share.is_shared]:
            await self._let_go(link, sharing)
        seats = {rank: self._seats(rank) for rank in senders}
        meetings = {rank: await self._agreed(link, rank, seats[rank]) for rank in senders}
        sender = {"meetings": meetings, "on_device": self.on_device, "dense_above": self._settings.dense_above}
        await link.trainers_done(link.on_trainers("prepare_sender", f"{__name__}:{BroadcastSender.__name__}", link.manifest, sender))
        packed = await link.trainers_done(link.on_trainers("send_weights", TEST_VERSION, TEST_PART))
        tests: dict[int, Parcel] = {bucket.index: packed[rank] for rank, bucket in first_part.items()}
        opened = [test.payload.meeting for test in tests.values() if isinstance(test.payload, Broadcast)]  # with ports that senders chose
        self._meetings = await asyncio.to_thread(Meetings, tuple(opened))
        for engines in (tuple(self._followers), self._readers):  # the second read what the first have received
            made = {}
            for index in engines:
                receiver = {
                    "first_ranks": {rank: seats[rank][index][0] for rank in senders if index in seats[rank]},
                    "streams": self.on_device,
                    "tests": tests,
                    "copies": self._settings.copies_of(index),
                    "share": shares.get(index),
                }
                made[index] = _partner(link, index).start("prepare_receiver", f"{__name__}:{BroadcastReceiver.__name__}", receiver)
            await link.together_done(made)

    async def _let_go(self, link: SyncLink, engines: Sequence[int]) -> None:
        """Have engines drop the copies of their nodes: what one of them still maps counts as used when the next copy is made."""
        name = f"{PackedReceiver.__module__}:{PackedReceiver.__name__}"
        await link.together_done({index: link.engines[index].start("prepare_receiver", name, {}) for index in engines})

    @property
    def _readers(self) -> tuple[int, ...]:
        """Engines that read what another one of their node receives."""
        return tuple(itertools.chain(*self._followers.values()))

    def _seats(self, sender: int) -> dict[int, tuple[int, int]]:
        """First rank in the group of a sender, and the one behind the last, of every engine that receives."""
        seats, first = {}, 1
        for index in chain_order(tuple(self._followers), sender, self._settings) if self.in_chain else self._followers:
            seats[index] = (first, first + (len(self._settings.processes(index)) if self.on_device else 1))
            first = seats[index][1]
        return seats

    async def _agreed(self, link: SyncLink, sender: int, seats: Mapping[int, tuple[int, int]]) -> Meeting:
        """Where the group of a sender meets, but for the port."""
        return Meeting(
            name=uuid.uuid4().hex,
            sender=sender,
            host=await link.trainer_host(sender),
            num_members=1 + sum(len(range(*seat)) for seat in seats.values()),
            join_s=self._test_s(link),
            timeout_s=link.timeout_s,
            chain=(f"trainer rank {sender}", *(_partner(link, index).name for index in seats)) if self.in_chain else (),
        )

    async def _transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        try:
            return await self._moved(version, link)
        except asyncio.CancelledError:  # the deadline of the sync: members of a chain know whom they wait for
            if self.in_chain and self._meetings is not None:
                with contextlib.suppress(WeightSyncError):  # where a sender's store does not answer, it is the deadline that is reported
                    link.awaited = await asyncio.to_thread(self._meetings.waited_for) or link.awaited
            raise

    async def _moved(self, version: int, link: SyncLink) -> dict[int, int]:
        """Pack one part ahead; engines take one bucket at a time, so that all make their collectives in one order.

        An engine that receives on its devices stands still from the first bucket to the last. So where only changes travel, and senders
        can hold them, engines get the first bucket once all are packed.
        """
        parts = shared_out(link.manifest, self._settings.senders)
        if len(link.manifest.buckets) == 1 and not self._readers:
            packed = link.on_trainers("send_weights", version, 0)
            given = packed[self._settings.senders[0]]
            updating = link.update_whole(version, given)
            await link.others_done(packed, parts[0])
            return await link.together_done(updating, given)
        begun = link.on_engines("begin_update", link.manifest, version)
        waiting: list[tuple[int, Pending]] = []
        reading: list[tuple[dict[int, Pending], Pending]] = []
        deferred = self.on_device and self._settings.dense_above is not None
        for part, owned in enumerate(parts):
            packed = link.on_trainers("send_weights", version, part)
            await link.together_done(begun)
            begun = {}
            if not deferred:
                reading += await self._taken(link, waiting)
                waiting = []
            waiting += [(bucket.index, packed[rank]) for rank, bucket in owned.items()]
            if deferred:
                sent = await link.trainers_done(packed)
                deferred = all(isinstance(sent[rank].payload, Broadcast) and sent[rank].payload.announced is not None for rank in owned)
            else:
                await link.others_done(packed, owned)
        reading += await self._taken(link, waiting)
        for calls, given in reading:
            await link.together_done(calls, given)
        return await link.together_done(link.finish())

    async def _taken(self, link: SyncLink, waiting: Sequence[tuple[int, Pending]]) -> list[tuple[dict[int, Pending], Pending]]:
        """Wait until engines have received buckets; returns the calls of those that read what others received."""
        reading = []
        for index, given in waiting:
            taking = {engine: _partner(link, engine).start("load_bucket", index, given) for engine in self._followers}
            await link.together_done(taking, given)
            if readers := [engine for engine in self._readers if engine in link.engines]:
                reading.append(({engine: link.engines[engine].start("load_bucket", index, given) for engine in readers}, given))
        return reading

    async def _release(self, reason: str) -> None:
        meetings, self._meetings = self._meetings, None
        if meetings is not None:
            await asyncio.to_thread(meetings.end, reason)


class TcpTransport(CollectiveTransport):
    """Between the hosts' memories, along a chain of sockets."""

    title = "TCP"
    in_chain = True


class NcclTransport(CollectiveTransport):
    """Between devices, over NCCL; in processes without CUDA between their memories, over gloo."""

    title = "NCCL"
    on_device = True


def _partner(link: SyncLink, engine: int) -> Worker:
    """An engine of a group, without which the others would wait until their deadline.

    Raises:
        PartnerLostError: it is lost, as somebody else found out.
    """
    if engine not in link.engines:
        raise PartnerLostError(f"engine {engine} was lost while a group with it was in use")
    return link.engines[engine]


def chain_order(engines: Sequence[int], sender: int, settings: TransportSettings) -> list[int]:
    """Engines in the order in which they pass on what a sender sends: those of its node first, then node by node, by their ranks.

    Each node gets the bytes once, and chains of senders on different nodes go in a circle, so that no node is last in all of them.
    """
    nodes = settings.engine_nodes or (0,) * (1 + max(engines, default=0))
    home = settings.sender_nodes.get(sender, 0)
    around = 1 + max(*nodes, home)
    return sorted(engines, key=lambda engine: ((nodes[engine] - home) % around, engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Remote):
    """A bucket, or what changed of it, on its way through a group."""

    meeting: Meeting
    sequence: int
    """Of the broadcast in its group."""
    size_bytes: int
    sent_checksum: int
    what: str
    """For messages."""
    first_rank: int = 0
    """Of the engine's processes in the group."""
    announced: int | None = None
    """Number that a receiver announces before it takes part, as the sender packs others until then; None: the sender does not wait."""

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.size_bytes

    @property
    def lent(self) -> bool:
        """They come into memory of the receiver's own."""
        return False

    def fetch(self, process: int, device: torch.device) -> torch.Tensor:
        """Take part in the broadcast; see ``Remote.fetch``."""
        data = self.receive(process, device)
        compare(fingerprint(data), self.sent_checksum, self.what)
        return data

    def receive(self, process: int, device: torch.device, place: ByteArray | None = None) -> torch.Tensor:
        """What came, as :meth:`fetch` but not compared with what was sent; in ``place``, shape (num_bytes,), or memory of its own."""
        member = MEMBERSHIPS.join(self.meeting, self.first_rank + process, device)
        try:
            data = torch.empty(self.size_bytes, dtype=torch.uint8, device=device) if place is None else as_byte_tensor(place)
        except RuntimeError as error:  # no memory: the others would wait for this member until their deadline, and not say why
            what = f"{self.what} has no room on {device}: {error}"
            member.give_up(what)
            raise WeightSyncError(what) from error
        if self.announced is not None:
            member.announce(self.announced)
        member.broadcast(data, self.sequence)
        return data


class BroadcastSender:
    """A trainer rank's end: a part is one bucket of every sender, which travels while the next one is packed."""

    def __init__(
        self, source: WeightSource, manifest: WeightManifest, *, meetings: Mapping[int, Meeting], on_device: bool, dense_above: float | None
    ) -> None:
        """Open the meeting of a sender; ``dense_above`` as in the settings.

        Raises:
            WeightSyncError: nobody could reach it.
        """
        self._source = source
        self._parts = shared_out(manifest, list(meetings))
        compares_on_device = on_device and dense_above is not None
        self._spare_bytes = max(bucket.size_bytes for bucket in manifest.buckets) if compares_on_device else 0
        """Of changes that wait for others: an engine stands still from the first of them to the last."""
        self._device = device_here() if on_device else HOST
        meeting = meetings.get(source.rank)
        self._outbox = None if meeting is None else Outbox(meeting, self._device)
        self._delta: BaseDeltaEncoder[Any, Any] | None
        self._delta = DeviceDeltaEncoder(dense_above, self._device) if on_device and dense_above is not None else host_encoder(dense_above)

    def send(self, version: int, part: int) -> Parcel | None:
        """Put its bucket on its way, on a sender that has one; None elsewhere."""
        owned = self._parts[part]
        bucket = owned.get(self._source.rank)
        if bucket is None or self._outbox is None:
            self._source.pack_buckets(owned)
            return None
        fault = self._outbox.room()
        if fault is not None:
            self._source.pack_buckets(owned)  # other ranks are in the same gather
            raise fault
        delta = None if version == TEST_VERSION else self._delta
        encoded, base = self._whole(owned) if delta is None else changes_of(self._source, owned, delta, version)
        data = encoded if isinstance(encoded, torch.Tensor) else as_byte_tensor(encoded)
        proof = fingerprint(data)
        spare_bytes = 0 if base is None else self._spare_bytes
        sequence, announced = self._outbox.put(data, spare_bytes=spare_bytes, is_first=part == 0)
        sent = Broadcast(
            meeting=self._outbox.meeting,
            sequence=sequence,
            announced=announced,
            size_bytes=data.numel(),
            sent_checksum=proof,
            what=f"bucket {bucket.index} of weights v{version} ({data.numel()} bytes) from trainer rank {self._source.rank}",
        )
        return Parcel(version=version, checksum=proof, payload=sent, base=base)

    def _whole(self, owned: Mapping[int, Bucket]) -> tuple[torch.Tensor, None]:
        """The rank's bucket, packed; zeros before, as gaps between slots count in checksums."""
        size = owned[self._source.rank].size_bytes
        packed = room_for(self._source, owned, lambda: torch.zeros(size, dtype=torch.uint8, device=self._device))
        pack_into(self._source, owned, packed)
        return packed, None

    def close(self) -> None:
        """End the meeting, and let go of what was sent."""
        if self._outbox is not None:
            self._outbox.close()
        if self._delta is not None:
            self._delta.close()


class BroadcastReceiver:
    """An engine's end."""

    def __init__(
        self, *, first_ranks: Mapping[int, int], streams: bool, tests: Mapping[int, Parcel], copies: str | None, share: NodeShare | None
    ) -> None:
        """Receive the first bucket of every sender, unless every process of the engine does so by itself.

        Args:
            first_ranks: of the engine's processes in the group of each sender; none where it reads what another engine received.
            streams: each process receives on its own device; else this one for all, while the engine generates.
            tests: what senders sent first, by bucket.
            share: of the copy that engines of a node have together; None: the engine has its own.
            copies: name of the engine's copies, where later buckets may bring only what changed; None: all are whole.

        Raises:
            WeightSyncError, DeadlineError: it did not come, or is not what was sent.
        """
        self._first_ranks = first_ranks
        self._streams = streams
        kept = copies if streams else None
        self._images = None if copies is None else Images(kept)
        self._node: NodeCopy | None = None
        self.holdings = Holdings(
            copies=kept,
            segments=None if share is None or not share.is_shared else share.prefix,
            groups=frozenset(test.payload.meeting.name for test in tests.values() if isinstance(test.payload, Broadcast)),
        )
        try:
            if share is not None and share.leads:
                self._join(tests)
            self._node = None if share is None else NodeCopy(share)
            taken = [self.taken(bucket, test) for bucket, test in tests.items()]
            for test in taken:
                test.check("the first bucket of a sender")
        except BaseException:
            self.close()  # nobody else can, and the node's copy is as large as the weights
            raise
        self.tests: Sequence[Remote] = [test.payload for test in taken if isinstance(test.payload, Remote)]

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        return _Update(self, manifest, version, expected, streams=self._streams, images=self._images)

    def close(self) -> None:
        """Free copies, leave the senders' groups, and remove the node's copy."""
        self.holdings.free()
        if self._node is not None:
            self._node.close()

    def taken(self, bucket: int, parcel: Parcel) -> Parcel:
        """As the update keeps it: to be fetched by the engine's processes, or with its bytes, or where they are on this node.

        Raises:
            WeightSyncError, DeadlineError: as of ``Remote.fetch``.
        """
        if self._streams:
            return self._seated(parcel)
        size = parcel.size_bytes
        if self._node is not None and self._node.reads:
            return dataclasses.replace(parcel, payload=self._node.shared(bucket, size))
        place = None if self._node is None else self._node.place(bucket, size)
        whole = received(self._seated(parcel), place)
        return whole if self._node is None or place is None else dataclasses.replace(parcel, payload=self._node.shared(bucket, size))

    def _join(self, tests: Mapping[int, Parcel]) -> None:
        """Join the senders' groups before the node's copy is made, which may take longer than members wait for each other.

        Engines that are alone on their nodes do the same: one that received from the first sender before it joined the group of the second
        would wait for engines that wait for it there.
        """
        for test in tests.values():
            payload = self._seated(test).payload
            assert isinstance(payload, Broadcast)
            MEMBERSHIPS.join(payload.meeting, payload.first_rank, HOST)

    def _seated(self, parcel: Parcel) -> Parcel:
        assert isinstance(parcel.payload, Broadcast)
        first_rank = self._first_ranks[parcel.payload.meeting.sender]
        return dataclasses.replace(parcel, payload=dataclasses.replace(parcel.payload, first_rank=first_rank))


class _Update(UpdateAssembly):
    """One version on its way into one engine."""

    def __init__(self, receiver: BroadcastReceiver, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._receiver = receiver

    def take(self, part: int, data: Part) -> None:
        """Take one bucket; see ``UpdateAssembly.take``."""
        super().take(part, self._receiver.taken(part, data) if isinstance(data, Parcel) else data)


def received(parcel: Parcel, place: ByteArray | None = None) -> Parcel:
    """The parcel with its bytes in this process's memory, or in ``place``; ``Parcel.check`` compares them with what was sent.

    Raises:
        WeightSyncError, DeadlineError: as of ``Remote.fetch``.
    """
    assert isinstance(parcel.payload, Broadcast)
    data = parcel.payload.receive(0, HOST, place).numpy()
    data.flags.writeable = False  # nobody else has it, so that an update need not copy it
    return dataclasses.replace(parcel, payload=data)
