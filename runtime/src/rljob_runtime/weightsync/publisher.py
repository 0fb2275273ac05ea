"""Publishes the trainer's weights on every engine as one version, and proves that they arrived.

A transport moves the bytes. Invariant VERSION: afterwards every engine answers with the new version, or a WeightSyncError says which does
not. An engine whose process is lost is left out from then on, if the job goes on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rljob_runtime.cluster.protocol import Pending, Worker, gather_all
from rljob_runtime.errors import WeightSyncError, WorkerLostError
from rljob_runtime.records import OnRunning, WeightManifest
from rljob_runtime.weightsync.transport import SyncLink, Transport

MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.15}
"""Allowed difference of a token's log-prob between trainer and engine where the spec sets none; the larger where their types differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """The comparison of trainer and engines after a sync."""

    every_syncs: int
    """0 switches it off."""
    max_difference: float
    sequences: tuple[tuple[int, ...], ...]
    """Token ids of each probe, at least two tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One finished sync."""

    version: int
    size_bytes: int
    elapsed_s: float


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
        """
        self.on_running = on_running
        """What an update does to responses in progress."""
        self._trainers = trainers
        self._manifest = manifest
        self._transport = transport
        self._link = SyncLink(
            trainers=trainers,
            engines=engines,
            manifest=manifest,
            timeout_s=timeout_s,
            on_running=on_running,
            goes_on_without=goes_on_without,
        )
        self._prepared = False
        self._timeout_s = timeout_s
        self._probe = probe
        self._lengths = np.array([len(sequence) for sequence in probe.sequences], dtype=np.int32)
        self._expected: list[Pending] = []
        self._scored: list[np.ndarray] = []
        """What ``self._expected`` became, once somebody waited for it."""
        self._syncs = 0

    def leave_out(self, engine: int) -> None:
        """An engine, by its index, is lost, as somebody else found out."""
        self._link.leave_out(engine)

    async def publish(self, version: int) -> SyncReport:
        """Serve the trainer's present weights as ``version`` from every engine.

        Raises:
            WeightSyncError: the deadline passed, or an engine refused, or serves another version.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._prepared:
                    await self._transport.prepare(self._link)
                    self._prepared = True
                served = await self._transport.transfer(version, self._link)
        except TimeoutError as error:
            size_mib, buckets = self._manifest.total_bytes / 2**20, len(self._manifest.buckets)
            raise WeightSyncError(
                f"weights v{version} ({size_mib:.1f} MiB in {buckets} buckets) did not reach all engines within "
                f"{self._timeout_s:.0f} s (spec.weightSync.timeoutSeconds)"
            ) from error
        wrong = [f"{self._link.engines[index].name} serves v{v}" for index, v in served.items() if int(v) != version]
        if wrong:
            raise WeightSyncError(f"after publishing v{version}: {', '.join(wrong)}")
        self._syncs += 1
        return SyncReport(version=version, size_bytes=self._manifest.total_bytes, elapsed_s=time.monotonic() - started)

    def expect(self) -> None:
        """Let the trainer score the probes under the version just published, while engines already generate with it.

        Log-probs are raw (temperature 1) on both sides.
        """
        self._expected, self._scored = [], []
        if self._probe.every_syncs and (self._syncs - 1) % self._probe.every_syncs == 0:
            flat = np.array([t for s in self._probe.sequences for t in s], dtype=np.int32)
            self._expected = [t.start("compute_logprobs", flat, self._lengths, 1.0) for t in self._trainers]

    async def expected(self) -> None:
        """Wait for the trainer's part of the probe: for whoever takes the trainer's devices away before the engines answer."""
        if self._expected:
            self._scored, self._expected = await gather_all(self._expected, self._timeout_s), []

    async def probe(self, version: int) -> float | None:
        """Largest difference of a probe token's log-prob between trainer and engines under ``version``; None when not due.

        Called between :meth:`expect` and the next :meth:`publish`; costs least while the engines have nothing to generate.

        Raises:
            WeightSyncError: the difference is above the limit, or not a number.
        """
        if not self._expected and not self._scored:
            return None
        scoring = self._link.on_engines("score", self._probe.sequences, self._timeout_s)
        expected, scores = await asyncio.gather(gather_all(self._expected, self._timeout_s), self._link.engines_done(scoring))
        wanted = _without_first((self._scored + expected)[0], self._lengths)
        worst = 0.0
        for index, score in scores.items():
            engine = self._link.engines[index]
            found = np.array([x for s in score for x in s], dtype=np.float32)
            difference = float(np.max(np.abs(found - wanted)))
            if not difference <= self._probe.max_difference:
                raise WeightSyncError(
                    f"after publishing v{version} {engine.name} and the trainer disagree by {difference:.3g} in a token's log-prob, "
                    f"allowed {self._probe.max_difference:.3g} (spec.weightSync.probe.maxDifference): "
                    "the engine does not hold the trainer's weights"
                )
            worst = max(worst, difference)
        return worst


def _without_first(logprobs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Drop the first token of every sequence: it has no prefix to be predicted from."""
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.delete(logprobs, first)
