"""When judges and reward models that share devices score.

::

    judges share with no engine    generate ═══════════════════ train ══ sync ══ generate
                                   score  ═══════════════════ (judges hold their devices as long)
    judges share with an engine    generate ══════ score ══ train ══ sync ══ generate
                                            engines leave, judges come and leave

In the first case calls pass while responses are generated. In the second they wait until nothing is generated, or a batch is whole but
for its scores: no call holds a device while it waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.scoring_gate import ScoringGate

LOOK_S = 0.05
"""How often a wait looks whether anything is generated: it costs nothing, and engines that ended stand still meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """Of a job whose judges share devices."""

    workers: JobWorkers
    gate: ScoringGate
    fleet: EngineFleet

    @property
    def is_phase(self) -> bool:
        """Whether scoring is a phase of its own: judges share with engines."""
        return self.workers.judges_displace_engines

    @property
    def awaited(self) -> bool:
        """Whether something waits for that phase."""
        return self.is_phase and bool(self.gate.waiting)

    @property
    def holds_up(self) -> bool:
        """Whether only scores can bring anything: some wait, and nothing is generated."""
        return self.awaited and not self.fleet.num_running

    @asynccontextmanager
    async def beside(self, step: int) -> AsyncIterator[None]:
        """Responses are scored inside the block, where judges share with no engine."""
        if self.is_phase:
            yield
            return
        async with self.workers.judging(step):
            self.gate.open()
            try:
                yield
                await self.gate.close()
            finally:
                self.gate.shut()

    async def phase(self, step: int) -> bool:
        """Score what waits, with engines off the devices; whether there was anything. Call while nobody leases them."""
        if not self.awaited:
            return False
        async with self.workers.judging(step):
            await self.gate.pass_waiting()
        return True

    async def wanted(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until scoring has to be next: nothing is generated, or ``is_enough`` says so."""
        idle = 0
        while True:
            idle = idle + 1 if self.holds_up else 0
            # Twice: between two engines' answers nothing may seem to run for a moment.
            if idle > 1 or (self.awaited and is_enough()):
                return
            await asyncio.sleep(LOOK_S)
