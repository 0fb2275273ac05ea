"""Which RLJob is looked at next: one queue of keys, each key at most once in it and with at most one worker.

::

    add(key) ----------------> ready (news first, then first in) --> N workers --> reconcile(key) -> next check | error
    next check, back-off --> timers (one heap, one timer of the event loop) --^

====================  =======================================================================================================
what                  then
====================  =======================================================================================================
key added twice       looked at once
key of a full list    waits behind all news
added while worked on looked at once more, afterwards
error                 again after 0.1 s, 0.2 s, ... 60 s, or what the server says; a success starts the count anew
server says wait      nothing wakes the key earlier
too many keys         they wait in line; a key costs a hundred bytes, events of a key in line cost nothing
====================  =======================================================================================================
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from rljob_operator.errors import ConflictError, KubeError, UnavailableError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 60.0
RECONCILE_DEADLINE_S: Final = 120.0
"""Limit of one look at one job: about a dozen requests of at most 10 s."""

_NEWS, _OLD = 0, 1
"""Ranks in the line."""

Reconcile = Callable[[Key], Awaitable[datetime | None]]
"""Looks at one job; answers when to look again even if nothing happens."""

logger = logging.getLogger(__name__)


def utc_now() -> datetime:
    """Now."""
    return datetime.now(UTC)


class WorkQueue:
    """The queue and its workers. Belongs to one event loop, whose clock it uses."""

    def __init__(self, reconcile: Reconcile, *, workers: int, metrics: Metrics, clock: Callable[[], datetime] = utc_now) -> None:
        """Nothing runs before :meth:`start`; ``clock`` tells how far away a next check is."""
        self._reconcile = reconcile
        self._num_workers = workers
        self._metrics = metrics
        self._clock = clock
        self._ready: asyncio.PriorityQueue[tuple[int, int, Key | None]] = asyncio.PriorityQueue()
        self._queued: dict[Key, int] = {}
        """Keys in line with their rank; an entry of the line whose rank is another one was overtaken and counts no more."""
        self._active: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._held_until: dict[Key, float] = {}
        self._due: dict[Key, float] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._alarm: asyncio.TimerHandle | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Start the workers."""
        self._workers = [asyncio.create_task(self._work(), name=f"worker {index}") for index in range(self._num_workers)]

    @property
    def is_alive(self) -> bool:
        """Whether all workers run."""
        return bool(self._workers) and not any(worker.done() for worker in self._workers)

    def __len__(self) -> int:
        """Keys that wait in line."""
        return len(self._queued)

    def add(self, key: Key, *, is_news: bool = True) -> None:
        """Have a job looked at as soon as a worker is free, unless the server asked to wait; ``is_news`` False: when there is no news."""
        rank = _NEWS if is_news else _OLD
        if key in self._active:
            self._again.add(key)
        elif self._queued.get(key, _OLD + 1) > rank and not self._stopping:
            if self._held_until.get(key, 0.0) > asyncio.get_running_loop().time():
                return  # its timer is set
            self._held_until.pop(key, None)
            self._queued[key] = rank
            self._ready.put_nowait((rank, next(self._order), key))
            self._metrics.queue_depth.set(len(self._queued))

    def add_old(self, key: Key) -> None:
        """Have a job looked at that a full list told of."""
        self.add(key, is_news=False)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Have a job looked at in ``delay_s`` seconds; replaces what was said before."""
        due = asyncio.get_running_loop().time() + max(0.0, delay_s)
        self._due[key] = due
        heapq.heappush(self._timers, (due, next(self._order), key))
        if len(self._timers) > 2 * len(self._due) + 64:
            # A job that reports every few seconds replaces a deadline of days each time; keep the heap as small as what counts.
            self._timers = [entry for entry in self._timers if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._timers)
        self._set_alarm()

    async def stop(self, deadline_s: float) -> None:
        """Finish what is being worked on, take nothing new; whatever is not done after ``deadline_s`` is cancelled."""
        self._stopping = True
        if self._alarm is not None:
            self._alarm.cancel()
        for _ in self._workers:
            self._ready.put_nowait((_NEWS, -1, None))  # wakes an idle worker
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=deadline_s)
            if late:
                logger.warning("%d reconciles were not done within %g s and are cut off: %s", len(late), deadline_s, sorted(self._active))
            for worker in late:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            rank, _, key = await self._ready.get()
            if key is None or self._stopping:
                return
            if self._queued.get(key) != rank:
                continue
            del self._queued[key]
            self._metrics.queue_depth.set(len(self._queued))
            await self._look_at(key)

    async def _look_at(self, key: Key) -> None:
        """One reconcile and what follows from it."""
        self._active.add(key)
        self._due.pop(key, None)
        # A task of its own: whatever it ends with is an outcome to act on, and never the end of the worker.
        task = asyncio.create_task(self._timed(key), name=f"reconcile {key.namespace}/{key.name}")
        try:
            await asyncio.wait([task])
        finally:
            self._active.discard(key)
            if not task.done():
                task.cancel()
        error = task.exception() if not task.cancelled() else TimeoutError("cancelled")
        if error is None:
            self._failures.pop(key, None)
            next_check = task.result()
            if next_check is not None:
                self.add_after(key, (next_check - self._clock()).total_seconds())
        else:
            self._back_off(key, error)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def _timed(self, key: Key) -> datetime | None:
        async with asyncio.timeout(RECONCILE_DEADLINE_S):
            with self._metrics.reconcile_seconds.time():
                return await self._reconcile(key)

    def _back_off(self, key: Key, error: BaseException) -> None:
        """Say what went wrong and come back later."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 20))
        if isinstance(error, UnavailableError) and error.retry_after_s is not None:
            delay_s = max(delay_s, error.retry_after_s)
            self._held_until[key] = asyncio.get_running_loop().time() + delay_s
        self._metrics.errors.labels(type(error).__name__).inc()
        where = f"{key.namespace}/{key.name}"
        if isinstance(error, ConflictError):
            logger.info("%s: %s; looking again in %g s", where, error, delay_s)
        elif isinstance(error, KubeError):
            logger.warning("%s: %s; trying again in %g s", where, error, delay_s)
        elif isinstance(error, TimeoutError):
            logger.error("%s: not done within %g s; trying again in %g s", where, RECONCILE_DEADLINE_S, delay_s)
        else:
            logger.error("%s: a mistake in the operator; trying again in %g s", where, delay_s, exc_info=error)
        self.add_after(key, delay_s)

    def _set_alarm(self) -> None:
        """One timer of the event loop, for the nearest entry of the heap."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._timers and self._due.get(self._timers[0][2]) != self._timers[0][0]:
            heapq.heappop(self._timers)  # replaced or forgotten since
        if self._timers and not self._stopping:
            self._alarm = asyncio.get_running_loop().call_at(self._timers[0][0], self._ring)

    def _ring(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._timers and self._timers[0][0] <= now:
            due, _, key = heapq.heappop(self._timers)
            if self._due.get(key) == due:
                del self._due[key]
                self._held_until.pop(key, None)
                self.add(key)
        self._alarm = None
        self._set_alarm()
