"""An engine that takes time and computes nothing: continuous batching whose pace depends on how many responses run."""

from __future__ import annotations

import asyncio
import bisect
import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljob_runtime.packed import CompletionBatch, pack
from rljob_runtime.records import Completion, FloatArray, GenerationRequest, IntArray, Segment, VersionSpan
from rljob_runtime.simulation.lengths import Lengths
from rljob_runtime.simulation.world import World

ROUNDING_TOKENS = 1e-3
LATER = 1 << 60
"""Above every version."""


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerationRequest
    length: int
    began: float
    """On the engine's clock."""


class SimulatedEngine:
    """``slots`` responses get a token in every step, the others wait in the order of submission.

    Its clock counts the steps that it has made, in tokens, so that ends need not be moved when its pace changes or it stands still.
    """

    def __init__(self, index: int, world: World, lengths: Lengths) -> None:
        """An engine that serves version 0."""
        self.name = f"engine-{index}"
        self.log_file = ""
        self.cpu_s = 0.0
        """Processor seconds spent here, not in the scheduler."""
        self.busy_s = 0.0
        """Virtual seconds in which it generated."""
        self.slot_s = 0.0
        """The same, times the responses it generated."""
        self._world = world
        self._lengths = lengths
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Running] = {}
        self._ends: list[tuple[float, str]] = []
        self._waiting: deque[GenerationRequest] = deque()
        self._back: list[Completion] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._prefilled: set[str] = set()
        """Groups whose prompt is cached."""
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """(clock, version) in order."""
        self._clock = 0.0
        self._read_s = self._loop.time()
        """When the clock was read last."""
        self._stands_until_s = 0.0

    async def call(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """A call of a worker; the answer of ``collect`` comes when a response ends or the wait is over."""
        if method == "collect":
            return await self._collect(payload)
        began_s = time.thread_time()
        getattr(self, method)(payload)
        self.cpu_s += time.thread_time() - began_s
        return None

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._waiting.extend(requests)
        self._fill()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Give requests back with what they have."""
        self.read_clock()
        wanted = set(request_ids)
        for request in [r for r in self._waiting if r.request_id in wanted]:
            self._waiting.remove(request)
            self._back.append(_completion(request.request_id, 0, (), "abort"))
        for request_id in request_ids:
            if request_id in self._running:
                self._end(request_id, "abort")
        self._ends = [(end, i) for end, i in self._ends if i in self._running]
        heapq.heapify(self._ends)
        self._fill()
        self._wake.set()

    def update(self, version: int) -> float:
        """Serve new weights after ``sync_s``; with Interrupt the running responses' caches are computed again.

        Returns the stop in seconds.
        """
        self.read_clock()
        stop_s = self._world.sync_s
        if self._world.mode == "Interrupt":
            tokens = sum(min(int(self._clock - r.began), r.length) for r in self._running.values())
            stop_s += tokens * self._world.recompute_token_s
        self._stand(stop_s)
        self._versions.append((self._clock, version))
        self._prefilled.clear()
        self._arm()
        return stop_s

    def read_clock(self) -> None:
        """Bring the clock and the counters to now."""
        now_s = self._loop.time()
        moving_s = now_s - min(max(self._read_s, self._stands_until_s), now_s)
        self._read_s = now_s
        if self._running and moving_s > 0:
            self._clock += moving_s / self._world.decode.seconds(len(self._running))
            self.busy_s += moving_s
            self.slot_s += moving_s * len(self._running)

    async def _collect(self, max_wait_s: float) -> CompletionBatch:
        if not self._back:
            self._wake.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._wake.wait()
            except TimeoutError:
                return pack([])
        back, self._back = self._back, []
        return pack(back)

    def _stand(self, seconds: float) -> None:
        """Generate nothing for so long; the clock has been read."""
        if seconds > 0:
            self._stands_until_s = max(self._stands_until_s, self._loop.time()) + seconds

    def _fill(self) -> None:
        """Give free slots to waiting requests."""
        self.read_clock()
        world = self._world
        while self._waiting and len(self._running) < world.slots:
            request = self._waiting.popleft()
            group, sample = request.request_id.split("+")[0].split("/")
            sampled = world.max_tokens - request.sampling.max_tokens
            length = self._lengths.of(int(group), int(sample)) - sampled
            self._running[request.request_id] = _Running(request, length, self._clock)
            heapq.heappush(self._ends, (self._clock + length, request.request_id))
            cached = world.caches_prefixes and group in self._prefilled
            self._prefilled.add(group)
            self._stand(world.prefill_token_s * (sampled + (0.0 if cached else world.prompt_tokens)))
        self._arm()

    def _arm(self) -> None:
        """Set the timer to the next end; the clock has been read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            now_s = self._loop.time()
            left = max(self._ends[0][0] - self._clock, 0.0)
            wait_s = left * self._world.decode.seconds(len(self._running)) + max(self._stands_until_s - now_s, 0.0)
            self._timer = self._loop.call_at(now_s + wait_s, self._step)

    def _step(self) -> None:
        """Responses that end now leave; others take their slots."""
        began_s = time.thread_time()
        self.read_clock()
        while self._ends and self._ends[0][0] <= self._clock + ROUNDING_TOKENS:
            self._end(heapq.heappop(self._ends)[1], "stop")
        self._fill()
        self._wake.set()
        self.cpu_s += time.thread_time() - began_s

    def _end(self, request_id: str, finish_reason: str) -> None:
        running = self._running.pop(request_id)
        sampled = running.length
        if finish_reason == "abort":
            sampled = min(int(self._clock - running.began), running.length - 1)
        self._back.append(_completion(request_id, sampled, self._spans(running.began, sampled), finish_reason))

    def _spans(self, began: float, sampled: int) -> tuple[VersionSpan, ...]:
        """Which version generated which tokens; one that a new version met half-way counts as the new one's."""
        first = bisect.bisect_right(self._versions, (began, LATER)) - 1
        spans = []
        start, version = 0, self._versions[first][1]
        for clock, later in self._versions[first + 1 :]:
            end = min(int(clock - began), sampled)
            if end > start:
                spans.append(VersionSpan(start=start, end=end, version=version))
            start, version = end, later
        if sampled > start:
            spans.append(VersionSpan(start=start, end=sampled, version=version))
        return tuple(spans)


_TOKENS: IntArray = np.full(1 << 16, 7, dtype=np.int32)
_LOGPROBS: FloatArray = np.full(1 << 16, -1.0, dtype=np.float32)
"""All responses are views of these."""


def _completion(request_id: str, count: int, spans: tuple[VersionSpan, ...], finish_reason: str) -> Completion:
    segment = Segment(token_ids=_TOKENS[:count], sampled=True, logprobs=_LOGPROBS[:count], version_spans=spans)
    return Completion(request_id=request_id, segment=segment, finish_reason=finish_reason)
