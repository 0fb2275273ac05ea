"""Passes of the event loop: how long each was, and why: its own work, the interpreter's lock, or a machine with other work.

An event that comes just after a pass began waits for all of it. What a driver can change of that are its own work and the time in which
its threads keep the interpreter's lock from the loop; the rest is the time in which all cores were busy with something else.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.driver.wire import ELSEWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One pass of the event loop over what was ready, without what was spent elsewhere."""

    wall_s: float
    work_s: float
    """Processor time of the loop's own thread."""
    lock_s: float
    """It waited, for no core, while other threads of the driver computed: at most so long for the lock that they held."""

    @property
    def own_s(self) -> float:
        """What the driver itself makes of it; the rest is the machine's."""
        return self.work_s + self.lock_s


NO_PAUSE = Pause(wall_s=0.0, work_s=0.0, lock_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocks:
    """Readings of one moment in the loop's thread, less what was spent elsewhere until then."""

    wall_s: float
    work_s: float
    process_s: float
    """Processor time of all threads."""
    queued_s: float
    """Ready to run, but on no core; what time elsewhere was no processor time counts as that."""

    @classmethod
    def read(cls, queued_s: float) -> _Clocks:
        return cls(
            wall_s=time.perf_counter() - ELSEWHERE.wall_s,
            work_s=time.thread_time() - ELSEWHERE.cpu_s,
            process_s=time.process_time() - ELSEWHERE.cpu_s,
            queued_s=queued_s - (ELSEWHERE.wall_s - ELSEWHERE.cpu_s),
        )

    def until(self, end: _Clocks) -> Pause:
        """The pass between two readings."""
        wall_s, work_s = end.wall_s - self.wall_s, end.work_s - self.work_s
        others_s = end.process_s - self.process_s - work_s
        waited_s = wall_s - work_s - max(end.queued_s - self.queued_s, 0.0)
        return Pause(wall_s=wall_s, work_s=work_s, lock_s=max(min(waited_s, others_s), 0.0))


class MeteredSelector(selectors.DefaultSelector):
    """An event loop's selector: from its answer to the next question the loop runs what is ready, and nothing that comes meanwhile."""

    def __init__(self, passed: Callable[[Pause], None]) -> None:
        """Made in the loop's thread; ``passed`` is given every pass."""
        super().__init__()
        self._passed = passed
        self._began: _Clocks | None = None
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        """Linux's account of this thread."""

    def close(self) -> None:
        """See the base."""
        os.close(self._schedstat)
        super().close()

    def select(self, timeout: float | None = None) -> list[Any]:
        """See the base. The lock is released only outside of passes: before a first reading, and after a last one."""
        if self._began is not None:
            end = _Clocks.read(0.0)
            self._passed(self._began.until(replace(end, queued_s=end.queued_s + self._queued_s())))
        ready = super().select(timeout)
        self._began = _Clocks.read(self._queued_s())
        return ready

    def _queued_s(self) -> float:
        """Seconds for which this thread was ready to run but on no core, since its start (second field, ns)."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
