"""Passes of the event loop: how long each was, and why: its own work, the interpreter's lock, or a machine with other work.

An event that comes just after a pass began waits for all of it. What a driver can change of that are its own work and the time in which
its threads keep the interpreter's lock from the loop; the rest is the time in which all cores were busy with something else. In a virtual
machine a thread's processor time also counts while the hypervisor runs something else on its core (steal time), so that is taken off.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.driver.wire import ELSEWHERE

STAT_BYTES = 4096
"""Of /proc/stat; its first lines are those of the cores."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One pass of the event loop over what was ready, without what was spent elsewhere."""

    wall_s: float
    work_s: float
    """Processor time of the loop's own thread."""
    lock_s: float
    """It waited, for no core, while other threads of the driver computed: at most so long for the lock that they held."""
    stolen_s: float
    """The hypervisor ran something else on a core of this machine, on the one where it did so longest; in steps of Linux's clock tick, and
    also of what was spent elsewhere meanwhile: at most so much of the pass is not the driver's."""

    @property
    def own_s(self) -> float:
        """What the driver itself makes of it; the rest is the machine's."""
        return max(self.work_s + self.lock_s - self.stolen_s, 0.0)


NO_PAUSE = Pause(wall_s=0.0, work_s=0.0, lock_s=0.0, stolen_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Readings of one moment in the loop's thread, less what was spent elsewhere until then."""

    wall_s: float
    work_s: float
    process_s: float
    """Processor time of all threads."""
    queued_s: float
    """Ready to run, but on no core; what time elsewhere was no processor time counts as that."""
    stolen_s: tuple[float, ...]
    """Of each core."""

    @classmethod
    def read(cls, queued_s: float, stolen_s: tuple[float, ...]) -> Clocks:
        return cls(
            wall_s=time.perf_counter() - ELSEWHERE.wall_s,
            work_s=time.thread_time() - ELSEWHERE.cpu_s,
            process_s=time.process_time() - ELSEWHERE.cpu_s,
            queued_s=queued_s - (ELSEWHERE.wall_s - ELSEWHERE.cpu_s),
            stolen_s=stolen_s,
        )

    def until(self, end: Clocks) -> Pause:
        """The pass between two readings."""
        wall_s, work_s = end.wall_s - self.wall_s, end.work_s - self.work_s
        others_s = end.process_s - self.process_s - work_s
        waited_s = wall_s - work_s - max(end.queued_s - self.queued_s, 0.0)
        stolen_s = max(b - a for a, b in zip(self.stolen_s, end.stolen_s, strict=True))
        return Pause(wall_s=wall_s, work_s=work_s, lock_s=max(min(waited_s, others_s), 0.0), stolen_s=stolen_s)


class MeteredSelector(selectors.DefaultSelector):
    """An event loop's selector: from its answer to the next question the loop runs what is ready, and nothing that comes meanwhile."""

    def __init__(self, passed: Callable[[Pause], None]) -> None:
        """Made in the loop's thread; ``passed`` is given every pass."""
        super().__init__()
        self._passed = passed
        self._began: Clocks | None = None
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        """Linux's account of this thread."""
        self._stat = os.open("/proc/stat", os.O_RDONLY)
        """Linux's account of the cores."""

    def close(self) -> None:
        """See the base."""
        os.close(self._schedstat)
        os.close(self._stat)
        super().close()

    def select(self, timeout: float | None = None) -> list[Any]:
        """See the base. The lock is released only outside of passes: before a first reading, and after a last one."""
        if self._began is not None:
            end = Clocks.read(0.0, ())
            queued_s = end.queued_s + self._queued_s()
            with ELSEWHERE:
                self._passed(self._began.until(replace(end, queued_s=queued_s, stolen_s=self._stolen_s())))
        ready = super().select(timeout)
        with ELSEWHERE:
            stolen_s = self._stolen_s()
        self._began = Clocks.read(self._queued_s(), stolen_s)
        return ready

    def _queued_s(self) -> float:
        """Seconds for which this thread was ready to run but on no core, since its start (second field, ns)."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _stolen_s(self) -> tuple[float, ...]:
        """Seconds that the hypervisor took from each core since the machine's start (proc(5): the eighth figure, in clock ticks)."""
        lines = os.pread(self._stat, STAT_BYTES, 0).splitlines()
        return tuple(int(line.split()[8]) / TICKS_PER_S for line in lines if re.match(rb"cpu\d", line))
