"""The seam of a weight transport: what it brings on the driver, on a trainer rank and in an engine.

::

    driver                      trainer rank (all of them)           engine (each)
    Transport.prepare  ───────> Sender(rank, manifest, ...)          Receiver(...)                    once
    Transport.transfer ───────> Sender.send(version, part)  ─bytes─> IncomingUpdate.take, receive     every version

The publisher calls ``transfer`` and knows nothing else of the transport; which version is served, the probe and engines that are lost are
its business. The engine knows the manifest and checks it against its model; how bytes come is the transport's.

Three ways fit. *Early*: parts come while the engine generates (``take``), ``receive`` hands them out: the object store, TCP, and shared
memory where engines generate. *One after the other*: each part goes into the model as it comes (``streams``), so that memory for two is
enough: shared memory where they do not. *Fetched*: ``take`` gets what says where the bytes are (``parcel.Remote``), ``receive`` hands that
out, and each process of the engine fetches them between two steps, one part after the other as well: NCCL by a broadcast, IPC by opening
memory of a device that trainer and engine share.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rljob_runtime.cluster.protocol import Pending, Worker, gather_all
from rljob_runtime.errors import WeightSyncError, WorkerLostError
from rljob_runtime.records import Bucket, OnRunning, WeightManifest
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.parcel import Payload, Remote

ByteArray = npt.NDArray[np.uint8]
Shapes = Mapping[str, tuple[int, ...]]
"""Hugging Face name -> full shape."""


class WeightSource(Protocol):
    """A trainer rank, as its end of a transport sees it."""

    @property
    def rank(self) -> int:
        """0 .. ``world_size`` - 1."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""

    def pack_buckets(
        self, buckets: Mapping[int, Bucket], out: Any = None, on_packed: Callable[[int], None] | None = None
    ) -> ByteArray | None:
        """Present weights of a rank's own bucket as bytes, None on ranks without one; a collective of all ranks, by rank.

        ``out`` is where they go: an array of the host's memory, or a uint8 tensor on the rank's device. ``on_packed`` may be called with
        the end of what is packed, while the rest is: what is read again is in the core's cache then.
        """


class Sender(Protocol):
    """A trainer rank's end; made in the rank's process with the rank, the manifest and what ``Transport.prepare`` passes."""

    def send(self, version: int, part: int) -> Any:
        """Send, or return for others to take, one part of the present weights; all ranks call it with the same arguments.

        Raises:
            WeightSyncError: the part does not fit the model, or could not be sent.
        """

    def close(self) -> None:
        """Give back what it holds; another one takes its place, or nothing is sent any more."""


class IncomingUpdate(Protocol):
    """One version on its way into one engine."""

    @property
    def manifest(self) -> WeightManifest:
        """The layout of what comes."""

    @property
    def version(self) -> int:
        """What the engine serves once it is in place."""

    @property
    def streams(self) -> bool:
        """Whether what ``take`` got goes into the model before ``load_bucket`` returns, because its place is needed for other buckets.

        The engine then stands still from the first bucket on.
        """

    @property
    def received_bytes(self) -> int:
        """What came, as it traveled."""

    def take(self, part: int, data: Any) -> None:
        """Take what a sender returned, from any thread, while the engine generates.

        Raises:
            WeightSyncError: it does not fit the manifest, or this transport hands nothing over in this way.
        """

    def check(self) -> None:
        """Refuse to begin while something is missing that has to be there before; the old weights are then untouched.

        Raises:
            WeightSyncError: names what is missing.
        """

    def receive(self, deadline: float) -> Iterator[tuple[Bucket, Payload]]:
        """Buckets with their bytes; on the engine's thread, between two steps. A payload is of no use once the next one is asked for.

        All of the manifest; where the update streams those that are here and did not come out before.

        Args:
            deadline: ``time.monotonic`` value after which to give up.

        Raises:
            WeightSyncError: bytes did not come; the engine's weights are undefined then.
            DeadlineError: the deadline passed.
        """


class Receiver(Protocol):
    """An engine's end; made in the engine's process with what ``Transport.prepare`` passes, and kept over versions."""

    @property
    def tests(self) -> Sequence[Remote]:
        """What every process of the engine has to fetch before anything is sent; empty where nothing is fetched."""

    @property
    def holdings(self) -> Holdings | None:
        """What every process of the engine frees when another end takes the place of this one; None: nothing."""

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> IncomingUpdate:
        """Open an update.

        Args:
            manifest: the layout of what will come.
            version: what is served afterwards.
            expected: parameters that the model needs; None skips the check (fakes).

        Raises:
            WeightSyncError: the manifest does not fit.
        """

    def close(self) -> None:
        """Give back what it holds in this process; another one takes its place, to which everything is sent whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """What a transport may want to know of the job."""

    run: str
    """Tells what it names on a machine from what other runs do: the same for every attempt of the run, letters and digits."""
    while_generating: bool
    """Whether engines generate during a sync."""
    senders: tuple[int, ...] = (0,)
    """Trainer ranks that pack and send, at the same time."""
    dense_above: float | None = None
    """Part of a bucket's numbers from which on it travels whole; None: always."""
    neighbors: tuple[tuple[int | None, ...], ...] = ()
    """By engine, by process of it that has a part of the model: the trainer rank on its device, None where there is none. Empty: engines of
    one process each, none of which shares a device."""
    engine_nodes: tuple[int, ...] = ()
    """Node rank of each engine, by the plan; empty: not known, and as if all were on one node where it is about their order alone."""
    sender_nodes: Mapping[int, int] = field(default_factory=dict)
    """Node rank of each sending trainer rank, by the plan; 0 for those that are missing."""

    def copies_of(self, engine: int) -> str | None:
        """Name of the copies of buckets that an engine keeps, the same over all receivers of it; None where all buckets travel whole."""
        return None if self.dense_above is None else f"engine {engine} of {self.run}"

    def processes(self, engine: int) -> tuple[int | None, ...]:
        """Of an engine, as in ``neighbors``."""
        return self.neighbors[engine] if self.neighbors else (None,)


class Transport(Protocol):
    """The driver's part of one way for weights from the trainer to the engines; one object per job, made with its settings."""

    async def prepare(self, link: SyncLink) -> None:
        """Make both ends: before the first version, for the link to a single engine that replaces a lost one, and after that for all again.

        Workers do it by ``prepare_sender(sender, manifest, settings)`` and ``prepare_receiver(receiver, settings)``, both named as
        ``module:Class``; settings become keyword arguments.
        """

    async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Bring the trainer's present weights into every engine of the link; returns the versions they serve then, by engine.

        Every wait goes through the link, which has the deadline and leaves out engines that are lost.
        """

    @property
    def warning(self) -> str | None:
        """What users should know since the last ``prepare``: that weights go another way than was asked for, and why."""


class PartnerLostError(WeightSyncError):
    """Raised when a transfer that engines make together broke off with one of them; others can begin again without it."""


class SyncLink:
    """Trainer ranks and engines of a sync: calls to them, without the engines that are lost."""

    def __init__(
        self,
        *,
        trainers: Sequence[Worker],
        engines: Sequence[Worker],
        manifest: WeightManifest,
        timeout_s: float,
        on_running: OnRunning,
        goes_on_without: Callable[[int, WorkerLostError], bool],
    ) -> None:
        """Wire the parts; arguments as of :class:`~rljob_runtime.weightsync.publisher.WeightPublisher`."""
        self.manifest = manifest
        self.timeout_s = timeout_s
        self._trainers = trainers
        self._engines = dict(enumerate(engines))
        self._on_running = on_running
        self._goes_on_without = goes_on_without
        self.awaited = "nobody"
        """Who was waited for last."""

    @property
    def engines(self) -> Mapping[int, Worker]:
        """Those that are not known to be lost."""
        return self._engines

    async def trainer_host(self, rank: int) -> str:
        """Where a trainer rank is on the network."""
        self.awaited = self._trainers[rank].name
        host, _ = await self._trainers[rank].address(self.timeout_s)
        return host

    def leave_out(self, engine: int) -> None:
        """An engine is lost, as somebody else found out."""
        self._engines.pop(engine, None)

    def join(self, engine: int, worker: Worker) -> None:
        """An engine that was replaced is there again."""
        self._engines = dict(sorted({**self._engines, engine: worker}.items()))

    def only(self, engine: int, worker: Worker) -> SyncLink:
        """A link to one engine, whose loss is an error."""
        alone = SyncLink(
            trainers=self._trainers,
            engines=(),
            manifest=self.manifest,
            timeout_s=self.timeout_s,
            on_running=self._on_running,
            goes_on_without=lambda index, error: False,
        )
        alone.join(engine, worker)
        return alone

    def on_trainers(self, method: str, *args: Any) -> list[Pending]:
        """Begin a call on every trainer rank."""
        return [trainer.start(method, *args) for trainer in self._trainers]

    def on_engines(self, method: str, *args: Any) -> dict[int, Pending]:
        """Begin a call on every engine."""
        return {index: engine.start(method, *args) for index, engine in self._engines.items()}

    def update_whole(self, version: int, *parts: Pending) -> dict[int, Pending]:
        """Begin ``update`` on every engine: all that one call can bring, as soon as ``parts`` are there."""
        return self.on_engines("update", self.manifest, version, self.timeout_s, self._on_running, *parts)

    async def send_whole(self, version: int, sender: int) -> dict[int, int]:
        """Bring a manifest of one bucket in one call of each side, which all start at once; returns the versions served, by engine."""
        packed = self.on_trainers("send_weights", version, 0)
        updating = self.update_whole(version, packed[sender])
        await self.others_done(packed, (sender,))
        return await self.engines_done(updating, packed[sender])

    async def others_done(self, packed: Sequence[Pending], senders: Collection[int]) -> None:
        """Wait for trainer ranks that sent nothing; what the others sent is awaited with the engines that take it."""
        if others := [call for rank, call in enumerate(packed) if rank not in senders]:
            await self.trainers_done(others)

    def finish(self) -> dict[int, Pending]:
        """Begin ``finish_update`` on every engine: the weights go into place between two steps."""
        return self.on_engines("finish_update", self.timeout_s, self._on_running)

    async def trainers_done(self, calls: Sequence[Pending]) -> list[Any]:
        """What trainer ranks answer."""
        self.awaited = "the trainer's ranks"
        return await gather_all(calls, self.timeout_s)

    async def together_done(self, calls: Mapping[int, Pending], given: Pending | None = None) -> dict[int, Any]:
        """As :meth:`engines_done`, of calls that need each other: the loss of an engine ends the wait for the rest.

        Raises:
            PartnerLostError: an engine is lost, and left out from now on.
        """
        named = {index: self._engines[index].name for index in calls if index in self._engines}
        names = ", ".join(named.values())
        waits = [asyncio.ensure_future(self.engines_done({index: call}, given)) for index, call in calls.items()]
        await asyncio.sleep(0)
        self.awaited = names
        answers: dict[int, Any] = {}
        try:
            for wait in asyncio.as_completed(waits):
                answers |= await wait
                self.awaited = ", ".join(name for index, name in named.items() if index not in answers) or names
                if any(index not in self._engines for index in calls):
                    raise PartnerLostError(f"an engine of {names} was lost while all of them received weights together")
        finally:
            for one in waits:
                one.cancel()
        return dict(sorted(answers.items()))

    async def engines_done(self, calls: Mapping[int, Pending], given: Pending | None = None) -> dict[int, Any]:
        """What engines answer; one that is lost is left out, now and from now on.

        Args:
            calls: by engine.
            given: another worker's call whose value these calls take.

        Raises:
            WorkerLostError: the job does not go on without it.
        """
        self.awaited = ", ".join(self._engines[index].name for index in calls if index in self._engines) or "no engine"
        wanted = [_Answer(pending, partial(self._lost, index), given) for index, pending in calls.items()]
        answers = await gather_all(wanted, self.timeout_s)
        return {index: answer for index, answer in zip(calls, answers, strict=True) if index in self._engines}

    def _lost(self, index: int, error: WorkerLostError) -> bool:
        if index in self._engines and not self._goes_on_without(index, error):
            return False
        self._engines.pop(index, None)
        return True


class _Answer:
    """A call whose worker may be lost: None then."""

    def __init__(self, pending: Pending, left_out: Callable[[WorkerLostError], bool], given: Pending | None) -> None:
        self._pending = pending
        self._left_out = left_out
        self._given = given

    async def result(self, timeout_s: float) -> Any:
        try:
            return await self._pending.result(timeout_s)
        except WorkerLostError as error:
            if self._given is not None:
                await self._given.result(timeout_s)  # where the giver is lost the engine is not: raises what names the giver
            if not self._left_out(error):
                raise
            return None


def make_end(factory: str, *args: Any, **settings: Any) -> Any:
    """One end of a transport, in the process where it works.

    Args:
        factory: ``module:Class``.
        args: of the class.
        settings: keyword arguments of the class.

    Raises:
        WeightSyncError: there is no such class here.
    """
    module, _, name = factory.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise WeightSyncError(
            f"the transport's {factory} cannot be imported here: {error}; all images of a job need the same one"
        ) from error
    return kind(*args, **settings)
