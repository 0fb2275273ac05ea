"""What is seen of the driver while it runs: passes of its event loop, its memory, its processor time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.driver.pauses import NO_PAUSE, Pause
from bench.driver.wire import ELSEWHERE
from rljob_runtime.loop.batch_builder import BatchBuilder, Prepared
from rljob_runtime.overlap.buffer import Group


def rss_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Meter:
    """What is seen of the driver while it runs."""

    longest: Pause = NO_PAUSE
    """By wall time."""
    longest_own: Pause = NO_PAUSE
    """By what the driver itself made of it."""
    passes: int = 0
    passes_above_50_ms: int = 0
    own_passes_above_50_ms: int = 0
    """Those of them that would be so on a machine without other work."""
    longest_collection_s: float = 0.0
    """Processor time of a garbage collection, in whichever thread: all hold the interpreter's lock."""
    build_peak_bytes: int = 0
    in_flight_bytes: list[int] = field(default_factory=list)
    """At the beginning of each build: all responses of a step are there."""
    tokens: list[int] = field(default_factory=list)
    """Sampled tokens of each step."""
    rss_at_step: list[int] = field(default_factory=list)
    """At the end of each step's build, before the next responses come."""
    build_cpu_s: list[float] = field(default_factory=list)
    marks: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Readings at the beginning of the first build and of the last one: wall and CPU seconds, and those of them spent elsewhere."""
    ended: bool = False
    """What follows, such as the report of the run, is no part of the loop."""
    _sampling: bool = False
    _collection_began: threading.local = field(default_factory=threading.local)

    @property
    def _counts(self) -> bool:
        """Whether the first step is over and the last one is not."""
        is_first_step = not self.marks or (len(self.marks) == 1 and self._sampling)
        return not is_first_step and not self.ended

    def passed(self, pause: Pause) -> None:
        """The event loop has made a pass over what was ready."""
        if self._counts:
            self.longest = max(self.longest, pause, key=lambda pause: pause.wall_s)
            self.longest_own = max(self.longest_own, pause, key=lambda pause: pause.own_s)
            self.passes += 1
            self.passes_above_50_ms += pause.wall_s > 0.05
            self.own_passes_above_50_ms += pause.own_s > 0.05

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """The interpreter begins or ends a garbage collection; one of ``gc.callbacks``."""
        if phase == "start":
            self._collection_began.cpu_s = time.thread_time()
        elif self._counts:
            self.longest_collection_s = max(self.longest_collection_s, time.thread_time() - self._collection_began.cpu_s)

    def sample(self) -> None:
        """Watch the resident memory during builds, in a thread."""
        while True:
            if self._sampling:
                self.build_peak_bytes = max(self.build_peak_bytes, rss_bytes())
            time.sleep(0.01)

    def begin_build(self, tokens: int) -> None:
        """A step's groups have been taken."""
        self.marks[1 if self.marks else 0 :] = [(time.perf_counter(), time.process_time(), ELSEWHERE.wall_s, ELSEWHERE.cpu_s)]
        self.in_flight_bytes.append(rss_bytes())
        self.tokens.append(tokens)
        self._sampling = True

    def end_build(self, cpu_s: float) -> None:
        """Its batches are ready."""
        self._sampling = False
        self.rss_at_step.append(rss_bytes())
        self.build_cpu_s.append(cpu_s)


class MeasuredBuilder(BatchBuilder):
    """The real one between two readings."""

    def __init__(self, meter: Meter, **settings: Any) -> None:
        """``settings`` are the base's."""
        super().__init__(**settings)
        self._meter = meter

    async def build(self, groups: Sequence[Group], version: int) -> Prepared:
        """See the base."""
        with ELSEWHERE:
            self._meter.begin_build(sum(t.num_sampled for g in groups for t in g.trajectories))
        began_s = time.process_time()
        prepared = await super().build(groups, version)
        self._meter.end_build(time.process_time() - began_s)
        return prepared
