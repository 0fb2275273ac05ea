"""Publishes the trainer's weights on every engine as one version, and proves that they arrived.

A transport moves the bytes. Invariant VERSION: afterwards every engine answers with the new version, or a WeightSyncError says which does
not. An engine that is lost is left out from then on, if the job goes on without it, and one that replaces it comes in::

    catch_up ── the trainer still holds what is served? ── yes: transfer and probe for this engine alone ──> served
                                                       └── no (it trains): it takes part in the next publish ──> arrival

Only one of them moves weights at a time, and ``retire`` waits for it, so that no engine gets a mixture of two versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.cluster.protocol import Pending, Worker, gather_all
from rljob_runtime.errors import (
    CorruptedWeightsError,
    DeadlineError,
    SyncBrokenError,
    WeightSyncError,
    WholeNeededError,
    WorkerLostError,
)
from rljob_runtime.records import OnRunning, WeightManifest
from rljob_runtime.weightsync.probe import ProbeHistory, ProbeLimits, ProbeReport
from rljob_runtime.weightsync.transport import SyncLink, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """The comparison of trainer and engines after a sync."""

    every_syncs: int
    """0 switches it off."""
    limits: ProbeLimits
    sequences: tuple[tuple[int, ...], ...]
    """Token ids of each probe, at least two tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One finished sync."""

    version: int
    elapsed_s: float
    fell_back: bool
    """Whether the transport went another way than was asked for."""


class WeightPublisher:
    """One per job; publishes one version at a time."""

    def __init__(
        self,
        *,
        trainers: Sequence[Worker],
        engines: Sequence[Worker],
        manifest: WeightManifest,
        transport: Transport,
        timeout_s: float,
        probe: ProbeConfig,
        on_running: OnRunning = "recompute",
        goes_on_without: Callable[[int, WorkerLostError], bool] = lambda engine, error: False,
        while_generating: bool = False,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """Wire the parts.

        Args:
            trainers: ranks of the trained policy.
            engines: rollout workers.
            manifest: the layout that trainer ranks pack and engines expect.
            transport: moves the bytes.
            timeout_s: of one sync.
            probe: the comparison after a sync.
            on_running: what an update does to responses in progress.
            goes_on_without: called with the index of an engine whose process is lost; False ends the sync with that error.
            while_generating: engines generate during a sync, until they load.
            warn: gets what users should know.
        """
        self.on_running = on_running
        """What an update does to responses in progress."""
        self._trainers = trainers
        self._manifest = manifest
        self._transport = transport
        self._goes_on_without = goes_on_without
        self._while_generating = while_generating
        self._warn = warn
        self._warned: str | None = None
        self._link = SyncLink(
            trainers=trainers,
            engines=engines,
            manifest=manifest,
            timeout_s=timeout_s,
            on_running=on_running,
            goes_on_without=self._lost,
        )
        self._engines = tuple(engines)
        self._prepared = False
        self._moving = asyncio.Lock()
        """Held while weights travel."""
        self._held: int | None = None
        """Version that engines serve, as long as the trainer still has its weights."""
        self._arrivals: dict[int, asyncio.Future[None]] = {}
        """Engines that replace lost ones and wait for the next publish."""
        self.timeout_s = timeout_s
        self._probe = probe
        self._history = ProbeHistory(probe.limits)
        self._lengths = np.array([len(sequence) for sequence in probe.sequences], dtype=np.int32)
        self._expected: list[asyncio.Future[np.ndarray]] = []
        self._scored: list[np.ndarray] = []
        """What ``self._expected`` became, once somebody waited for it."""
        self._syncs = 0
        self._resent = 0
        self._unproven = False
        """Whether an engine came in that no probe has seen yet."""

    @property
    def is_awaited(self) -> bool:
        """Whether an engine can go on only after the next publish."""
        return bool(self._arrivals)

    def leave_out(self, engine: int, error: WorkerLostError) -> None:
        """An engine, by its index, is lost, as somebody else found out."""
        self._link.leave_out(engine)
        arrival = self._arrivals.pop(engine, None)
        if arrival is not None and not arrival.done():
            arrival.set_exception(error)

    def join(self, engine: int) -> None:
        """An engine that was replaced takes part in syncs from now on; it serves nothing before the first of them."""
        self._link.join(engine, self._engines[engine])
        self._prepared = False  # both ends of the transport are made again, for it has none
        self._unproven = True

    async def retire(self) -> None:
        """The trainer's weights are about to change: what engines serve is no longer there. Waits for a transfer under way."""
        async with self._moving:
            self._held = None

    async def publish(self, version: int) -> SyncReport:
        """Serve the trainer's present weights as ``version`` from every engine.

        Raises:
            WeightSyncError: the deadline passed, or an engine refused, or serves another version.
            DeadlineError: a worker's own deadline passed before.
        """
        async with self._moving:
            started = time.monotonic()
            self._held = None
            for engine in self._arrivals:
                self.join(engine)
            await self._transfer(self._link, version, prepare=not self._prepared)
            self._prepared, self._held = True, version
            self._syncs += 1
            for arrival in self._arrivals.values():
                if not arrival.done():
                    arrival.set_result(None)
            self._arrivals.clear()
        return SyncReport(version=version, elapsed_s=time.monotonic() - started, fell_back=self._warned is not None)

    async def measured(self, report: SyncReport) -> dict[str, float]:
        """Metrics of the last sync, some of which engines tell: best asked for when they generate again.

        Raises:
            DeadlineError: an engine does not answer.
            WorkerLostError: an engine is lost, and the job does not go on without it.
        """
        stats = await self._link.engines_done(self._link.on_engines("stats"))
        resent, self._resent = self._resent, 0
        stood_s = max((found.get("update_s", 0.0) for found in stats.values()), default=0.0)
        stall_s = min(stood_s, report.elapsed_s) if self._while_generating else report.elapsed_s
        return {
            "sync/version": float(report.version),
            "sync/bytes": sum(found.get("update_bytes", 0.0) for found in stats.values()),
            "sync/stall_s": stall_s,
            "sync/hidden_s": report.elapsed_s - stall_s,
            "sync/load_s": stood_s,
            "sync/resent": float(resent),
            "sync/fell_back": float(report.fell_back),
            "sync/reloaded_fraction": max((found.get("reloaded_fraction", 0.0) for found in stats.values()), default=0.0),
        }

    async def catch_up(self, engine: int) -> bool:
        """Bring an engine that was replaced to the version that the others serve; False: it takes part in the next publish.

        Raises:
            WorkerLostError: it is lost again, or a trainer rank is.
            WeightSyncError: the deadline passed, it refused, or its log-probs are not the trainer's.
        """
        async with self._moving:
            if self._held is None:
                self._arrivals[engine] = asyncio.get_running_loop().create_future()
                return False
            alone = self._link.only(engine, self._engines[engine])
            await self._transfer(alone, self._held, prepare=True)
            if self._probe.every_syncs:
                expecting = self._expecting()
                scores = alone.on_engines("score", self._probe.sequences, self.timeout_s)
                expected, answers = await asyncio.gather(gather_all(expecting, self.timeout_s), alone.engines_done(scores))
                self._history.test(self._held, _without_first(expected[0], self._lengths), self._found(alone, answers))
            unproven = self._unproven
            self.join(engine)
            self._unproven = unproven
        return True

    async def arrival(self, engine: int, timeout_s: float) -> None:
        """Wait until an engine for which :meth:`catch_up` was too late serves what the others do.

        Raises:
            WorkerLostError: it is lost again.
            DeadlineError: no version was published in time.
        """
        waited = self._arrivals.get(engine)
        if waited is None:  # published, or lost, since
            return
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(waited)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._engines[engine].name} waited {timeout_s:.0f} s for the next weights; none were published"
            ) from error

    async def _transfer(self, link: SyncLink, version: int, *, prepare: bool) -> None:
        """Move the trainer's weights to the engines of a link."""
        self._prepared = False  # whatever breaks off, both ends are made again and all is sent
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                if prepare:
                    await self._prepare(link)
                served = await self._sent(link, version)
        except TimeoutError as error:
            if not limit.expired():  # of a call, of the transport or a library: it says itself what was late
                raise
            size_mib, buckets = self._manifest.total_bytes / 2**20, len(self._manifest.buckets)
            raise WeightSyncError(
                f"weights v{version} ({size_mib:.1f} MiB in {buckets} buckets) did not reach all engines within "
                f"{self.timeout_s:g} s (spec.weightSync.timeoutSeconds); it waited for {link.awaited}"
            ) from error
        wrong = [f"{link.engines[index].name} serves v{v}" for index, v in served.items() if int(v) != version]
        if wrong:
            raise WeightSyncError(f"after publishing v{version}: {', '.join(wrong)}")

    async def _sent(self, link: SyncLink, version: int) -> dict[int, int]:
        """Transfer, once more where bytes changed, a connection broke, or an engine got changes of weights that it does not have."""
        try:
            return await self._transport.transfer(version, link)
        except (CorruptedWeightsError, SyncBrokenError, WholeNeededError) as error:
            self._warn(f"weights v{version} are sent again: {error}")
            self._resent += 1
            await self._prepare(link)
            return await self._transport.transfer(version, link)

    async def _prepare(self, link: SyncLink) -> None:
        """Make both ends; what the transport warns of is said once."""
        await self._transport.prepare(link)
        warning = self._transport.warning
        if warning is not None and warning != self._warned:
            self._warn(warning)
        self._warned = warning

    async def close(self) -> None:
        """Have trainer ranks give back what their ends hold; nothing is published any more."""
        self._held = None
        self._expect_nothing()
        await self._link.trainers_done(self._link.on_trainers("close_sender"))

    def _lost(self, engine: int, error: WorkerLostError) -> bool:
        """A call found that an engine is lost; whether the job goes on."""
        self.leave_out(engine, error)
        return self._goes_on_without(engine, error)

    def expect(self) -> None:
        """Let the trainer score the probes under the version just published, while engines already generate with it.

        Log-probs are raw (temperature 1) on both sides.
        """
        self._expect_nothing()
        unproven, self._unproven = self._unproven, False
        if self._probe.every_syncs and (unproven or (self._syncs - 1) % self._probe.every_syncs == 0):
            # Awaited from the start, so that the trainer's timeline has the time of the pass and not the time until somebody asks.
            self._expected = [asyncio.ensure_future(pending.result(self.timeout_s)) for pending in self._expecting()]
            for answer in self._expected:
                answer.add_done_callback(_retrieved)

    def _expect_nothing(self) -> None:
        for answer in self._expected:
            answer.cancel()
        self._expected, self._scored = [], []

    def _expecting(self) -> list[Pending]:
        """The trainer's log-probs of the probes, under the weights it has now."""
        flat = np.array([t for s in self._probe.sequences for t in s], dtype=np.int32)
        return [t.start("compute_logprobs", flat, self._lengths, 1.0) for t in self._trainers]

    async def expected(self) -> None:
        """Wait for the trainer's part of the probe: for whoever takes the trainer's devices away before the engines answer."""
        if self._expected:
            self._scored, self._expected = await asyncio.gather(*self._expected), []

    async def probe(self, version: int) -> ProbeReport | None:
        """How far trainer and engines are apart in a probe token's log-prob under ``version``; None when not due.

        Called between :meth:`expect` and the next :meth:`publish`; costs least while the engines have nothing to generate.

        Raises:
            WeightSyncError: they are too far apart, see :class:`~rljob_runtime.weightsync.probe.ProbeHistory`.
        """
        if not self._expected and not self._scored:
            return None
        scoring = self._link.on_engines("score", self._probe.sequences, self.timeout_s)
        expected, scores = await asyncio.gather(asyncio.gather(*self._expected), self._link.engines_done(scoring))
        wanted = _without_first((self._scored + expected)[0], self._lengths)
        return self._history.test(version, wanted, self._found(self._link, scores))

    @staticmethod
    def _found(link: SyncLink, scores: Mapping[int, Sequence[Sequence[float]]]) -> dict[str, npt.NDArray[np.float32]]:
        """Log-probs of all probe tokens by name of the engine; of those that are still there."""
        return {
            engine.name: np.array([x for score in scores[index] for x in score], dtype=np.float32)
            for index, engine in link.engines.items()
            if index in scores
        }


def _retrieved(answer: asyncio.Future[np.ndarray]) -> None:
    """Keep asyncio from reporting a failure that :meth:`WeightPublisher.probe` raises, or that a new version has made irrelevant."""
    if not answer.cancelled():
        answer.exception()


def _without_first(logprobs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Drop the first token of every sequence: it has no prefix to be predicted from."""
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.delete(logprobs, first)
