"""Work queue of RLJob keys: each key is queued at most once and processed by at most one worker at a time.

::

    add(key) ----------------> ready (events first, then FIFO) --> N workers --> reconcile(key) -> next check | error
    next check, backoff --> timers (one heap, one event loop timer) --^    |
                                                                           | longer than 2 s, this time or the last time
                                                                           v
                                                        slow lane (the same order) --> 16 workers

A reconcile takes milliseconds, unless it waits for another component, for example for an admission webhook that hangs, up to 34 s for each
write. A job whose reconcile was slow is reconciled in the slow lane, so that jobs that were never slow wait at most 2 s for it, once.

==========================  ==================================================================================================
event                       effect
==========================  ==================================================================================================
key added twice             reconciled once
key added by a resync       queued behind all events
key added while processed   reconciled once more, afterwards
error                       retried after 0.1 s, 0.2 s, ... 60 s, less up to a quarter, or the server's Retry-After; a success resets it
Retry-After                 nothing wakes the key earlier
the clock is set            every key with a timer is reconciled: its next check was relative to the clock before
a reconcile is slow         goes on in the slow lane if a worker is free there, else is cancelled and starts again in that lane
too many keys               they wait; a queued key takes about a hundred bytes, further events for it nothing
==========================  ==================================================================================================
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final

from rljob_operator.clock import utc_now
from rljob_operator.errors import ConflictError, KubeError, UnavailableError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 60.0
RECONCILE_DEADLINE_S: Final = 240.0
"""Timeout of one reconcile: children in three stages, each behind a webhook that takes its time, the status, and a few reads."""

PATIENCE_S: Final = 2.0
"""A reconcile that takes longer waits for another component and no longer holds up others."""
NUM_SLOW: Final = 16
"""Maximum number of concurrent reconciles in the slow lane."""

CLOCK_POLL_S: Final = 1.0
MAX_CLOCK_DRIFT_S: Final = 0.5
"""Between two looks; more is not drift: somebody set the clock, or the machine slept."""

_STARTED, _EVENT, _RESYNC, _STOP = -1, 0, 1, 2
"""Priorities; the lower number is served first. In the slow lane a reconcile that has started comes first."""

Reconcile = Callable[[Key], Awaitable[datetime | None]]
"""Reconciles one job; returns when to reconcile it again even without an event."""

logger = logging.getLogger(__name__)


class WorkQueue:
    """The queue and its workers. Belongs to one event loop, whose clock it uses."""

    def __init__(
        self,
        reconcile: Reconcile,
        *,
        workers: int,
        metrics: Metrics,
        clock: Callable[[], datetime] = utc_now,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Nothing runs before :meth:`start`.

        Args:
            reconcile: called for each key.
            workers: number of concurrent reconciles, those in the slow lane apart.
            metrics: of the operator.
            clock: what next checks are relative to.
            jitter: from 0 to 1, spreads retries.
        """
        self._reconcile = reconcile
        self._num_workers = workers
        self._metrics = metrics
        self._clock = clock
        self._jitter = jitter
        self._ready: asyncio.PriorityQueue[tuple[int, int, Key | None]] = asyncio.PriorityQueue()
        self._queued: dict[Key, int] = {}
        """Queued keys with their priority; a queue entry with another priority is stale and is skipped."""
        self._lane: asyncio.PriorityQueue[tuple[int, int, Key | None]] = asyncio.PriorityQueue()
        """The slow lane; its keys that have not started are queued keys, too."""
        self._started: dict[Key, asyncio.Task[datetime | None]] = {}
        """Reconciles that the slow lane has yet to take over."""
        self._num_slow = 0
        """Reconciles that it is running."""
        self._slow: set[Key] = set()
        """Keys whose last reconcile was slow."""
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._throttled_until: dict[Key, float] = {}
        self._due: dict[Key, float] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._clock_watch: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the workers."""
        self._clock_watch = asyncio.create_task(self._watch_clock(), name="clock")
        self._workers = [asyncio.create_task(self._work(), name=f"worker {index}") for index in range(self._num_workers)]
        self._workers += [asyncio.create_task(self._work_slowly(), name=f"slow worker {index}") for index in range(NUM_SLOW)]

    @property
    def is_alive(self) -> bool:
        """Whether all workers are running."""
        return bool(self._workers) and not any(worker.done() for worker in self._workers)

    def __len__(self) -> int:
        """Number of queued keys."""
        return len(self._queued)

    @property
    def num_timers(self) -> int:
        """Number of deadlines in memory, those that later ones have replaced included."""
        return len(self._timers)

    def add(self, key: Key) -> None:
        """Queue a job because of an event."""
        self._add(key, _EVENT)

    def add_from_resync(self, key: Key) -> None:
        """Queue a job because of a full list, behind all events."""
        self._add(key, _RESYNC)

    def _add(self, key: Key, priority: int) -> None:
        if key in self._processing:
            self._dirty.add(key)
        elif self._queued.get(key, _RESYNC + 1) > priority and not self._stopping:
            if self._throttled_until.get(key, 0.0) > asyncio.get_running_loop().time():
                return  # the server asked to wait; a timer is set
            self._throttled_until.pop(key, None)
            self._queued[key] = priority
            self._ready.put_nowait((priority, next(self._order), key))
            self._metrics.queue_depth.set(len(self._queued))

    def add_after(self, key: Key, delay_s: float) -> None:
        """Queue a job after ``delay_s`` seconds; replaces an earlier delay."""
        due = asyncio.get_running_loop().time() + max(0.0, delay_s)
        self._due[key] = due
        heapq.heappush(self._timers, (due, next(self._order), key))
        if len(self._timers) > 2 * len(self._due) + 64:
            # A job with an event every few seconds replaces a deadline of days each time; drop the stale entries.
            self._timers = [entry for entry in self._timers if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._timers)
        self._set_timer()

    async def stop(self, deadline_s: float) -> None:
        """Finish the reconciles in progress, start no new ones, and cancel what is not done after ``deadline_s``."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._clock_watch is not None:
            self._clock_watch.cancel()
        for _ in self._workers:
            self._ready.put_nowait((_STARTED, -1, None))  # wakes an idle worker
            self._lane.put_nowait((_STOP, -1, None))
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=deadline_s)
            if late:
                logger.warning(
                    "%d reconciles were not done within %g s and are cancelled: %s", len(late), deadline_s, sorted(self._processing)
                )
            for unfinished in (*late, *self._started.values()):
                unfinished.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            priority, order, key = await self._ready.get()
            if key is None or self._stopping:
                return
            if self._queued.get(key) != priority:
                continue
            if key in self._slow:
                self._lane.put_nowait((priority, order, key))  # still queued
                continue
            task = self._begin(key)
            await self._wait(key, task, PATIENCE_S)
            if task.done():
                self._end(key, task)
            else:
                await self._hand_over(key, task)

    async def _work_slowly(self) -> None:
        while True:
            priority, _, key = await self._lane.get()
            if key is None:
                return
            if priority != _STARTED and (self._stopping or self._queued.get(key) != priority):
                continue
            began_s = asyncio.get_running_loop().time()
            task = self._started.pop(key) if priority == _STARTED else self._begin(key)
            self._num_slow += 1
            try:
                await self._wait(key, task)
            finally:
                self._num_slow -= 1
            if priority != _STARTED and asyncio.get_running_loop().time() - began_s <= PATIENCE_S:
                self._slow.discard(key)
            self._end(key, task)

    async def _hand_over(self, key: Key, task: asyncio.Task[datetime | None]) -> None:
        """Let the slow lane run a reconcile that takes long."""
        if self._stopping:
            await self._wait(key, task)
            self._end(key, task)
            return
        self._slow.add(key)
        logger.info("%s/%s: the reconcile takes longer than %g s; others go on", key.namespace, key.name, PATIENCE_S)
        if self._num_slow + len(self._started) < NUM_SLOW:
            self._started[key] = task
            self._lane.put_nowait((_STARTED, next(self._order), key))
            return
        # As if the process had died: what was written is found by the next try.
        task.cancel()
        await self._wait(key, task)
        if not task.cancelled():
            self._end(key, task)
            return
        self._processing.discard(key)
        self._dirty.discard(key)
        self._queued[key] = _EVENT
        self._metrics.queue_depth.set(len(self._queued))
        self._lane.put_nowait((_EVENT, next(self._order), key))

    def _begin(self, key: Key) -> asyncio.Task[datetime | None]:
        """Start a reconcile, as a separate task: whatever it raises is an outcome to handle and never ends a worker."""
        del self._queued[key]
        self._metrics.queue_depth.set(len(self._queued))
        self._processing.add(key)
        self._due.pop(key, None)
        return asyncio.create_task(self._timed(key), name=f"reconcile {key.namespace}/{key.name}")

    async def _wait(self, key: Key, task: asyncio.Task[datetime | None], timeout_s: float | None = None) -> None:
        """Wait for a reconcile, which ends with its worker."""
        try:
            await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            self._processing.discard(key)
            task.cancel()
            raise

    def _end(self, key: Key, task: asyncio.Task[datetime | None]) -> None:
        """Schedule the next reconcile."""
        self._processing.discard(key)
        error = task.exception() if not task.cancelled() else TimeoutError("cancelled")
        if error is None:
            self._failures.pop(key, None)
            next_check = task.result()
            if next_check is not None:
                self.add_after(key, (next_check - self._clock()).total_seconds())
        else:
            self._back_off(key, error)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    async def _timed(self, key: Key) -> datetime | None:
        async with asyncio.timeout(RECONCILE_DEADLINE_S):
            with self._metrics.reconcile_seconds.time():
                return await self._reconcile(key)

    def _back_off(self, key: Key, error: BaseException) -> None:
        """Log an error and schedule the retry."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        # An outage fails many jobs at once; without jitter they would all come back at once.
        delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 20)) * (1.0 - 0.25 * self._jitter())
        if isinstance(error, UnavailableError) and error.retry_after_s is not None:
            delay_s = max(delay_s, error.retry_after_s)
            self._throttled_until[key] = asyncio.get_running_loop().time() + delay_s
        self._metrics.errors.labels(type(error).__name__).inc()
        where = f"{key.namespace}/{key.name}"
        if isinstance(error, ConflictError):
            logger.info("%s: %s; reconciling again in %g s", where, error, delay_s)
        elif isinstance(error, KubeError):
            logger.warning("%s: %s; retrying in %g s", where, error, delay_s)
        elif isinstance(error, TimeoutError):
            logger.error("%s: not done within %g s; retrying in %g s", where, RECONCILE_DEADLINE_S, delay_s)
        else:
            logger.error("%s: unexpected error; retrying in %g s", where, delay_s, exc_info=error)
        self.add_after(key, delay_s)

    def _set_timer(self) -> None:
        """Set the event loop timer for the earliest entry of the heap."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._timers and self._due.get(self._timers[0][2]) != self._timers[0][0]:
            heapq.heappop(self._timers)  # replaced or dropped since
        if self._timers and not self._stopping:
            self._timer = asyncio.get_running_loop().call_at(self._timers[0][0], self._on_timer)

    async def _watch_clock(self) -> None:
        """Timers run on the event loop's clock; a next check that was far away on a wrong clock may be due on the right one."""
        ahead_s = self._ahead_s()
        while True:
            await asyncio.sleep(CLOCK_POLL_S)
            before_s, ahead_s = ahead_s, self._ahead_s()
            if abs(ahead_s - before_s) > MAX_CLOCK_DRIFT_S:
                logger.warning(
                    "the clock jumped by %.1f s; looking at the %d jobs that wait for a time", ahead_s - before_s, len(self._due)
                )
                for key in list(self._due):
                    self.add_from_resync(key)

    def _ahead_s(self) -> float:
        return self._clock().timestamp() - asyncio.get_running_loop().time()

    def _on_timer(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._timers and self._timers[0][0] <= now:
            due, _, key = heapq.heappop(self._timers)
            if self._due.get(key) == due:
                del self._due[key]
                self._throttled_until.pop(key, None)
                self.add(key)
        self._timer = None
        self._set_timer()
