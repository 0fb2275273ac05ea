"""How often, and how soon, lost workers of one kind are replaced: engines, environment workers. What replaces one is the caller's.

::

    begin(index, error) ──> wait_s ──> bring_back: attempt ──> replaced
          └ not any more                  └ failed: wait longer, attempt again ──> given up
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rljob_runtime.errors import NodeLostError, RuntimeFault, WorkerLostError
from rljob_runtime.overlap.fleet_engine import now_s

FIRST_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 120.0
"""The first replacement begins at once, the second after ``FIRST_BACKOFF_S``, each later one after twice as long, up to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementLimits:
    """What is needed of the spec."""

    max_restarts: int
    """Of each worker within an attempt of the job; 0: none is replaced."""
    start_timeout_s: float
    """From a new process to an engine that is ready for weights, or an environment worker that takes episodes."""
    weights_timeout_s: float = 0.0
    """Until the trainer's weights can travel to an engine: alone, or with the next sync."""
    ask_every_s: float = 15.0
    """How often an engine is asked for a sign of life."""
    answer_timeout_s: float = 30.0
    """Until it has to answer; one that does not is asked once more."""


def backoff_s(restarts: int, max_restarts: int) -> float | None:
    """Seconds until a worker is replaced that was replaced ``restarts`` times before; None: not any more."""
    if restarts >= max_restarts:
        return None
    return min(FIRST_BACKOFF_S * 2 ** (restarts - 1), LONGEST_BACKOFF_S) if restarts else 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is being replaced."""

    error: WorkerLostError
    since_s: float
    wait_s: float
    """Before the next attempt to replace it."""


class Replacements:
    """Workers of one kind, by index: which are being replaced, how often each was, and the lines about it for users."""

    def __init__(self, names: Sequence[str], limits: ReplacementLimits, *, notify: Callable[[str], None], meanwhile: str) -> None:
        """Nothing is lost.

        Args:
            names: of the workers.
            limits: how often.
            notify: takes a line for users.
            meanwhile: what becomes of the work of a lost one, for that line.
        """
        self._names = names
        self._limits = limits
        self._notify = notify
        self._meanwhile = meanwhile
        self._restarts = [0] * len(names)
        self.lost: dict[int, Loss] = {}
        """Those that are being replaced."""
        self._replaced = 0
        self._longest_s = 0.0

    def begin(self, index: int, error: WorkerLostError) -> bool:
        """A worker is lost; whether it is going to be replaced."""
        wait_s = self._next(index, error)
        if wait_s is None:
            return False
        self.lost[index] = Loss(error, now_s(), wait_s)
        return True

    async def bring_back(
        self, index: int, attempt: Callable[[int], Awaitable[None]], failed: Callable[[int], None] = lambda index: None
    ) -> RuntimeFault | None:
        """Replace a worker whose loss has begun, as often as may be tried.

        Args:
            index: of the worker.
            attempt: replaces it; may be called again after it failed.
            failed: called after each attempt that failed.

        Returns:
            Why it was given up; None: it is replaced.
        """
        while True:
            loss = self.lost[index]
            try:
                await asyncio.sleep(loss.wait_s)
                await attempt(index)
            except RuntimeFault as failure:
                failed(index)
                wait_s = self._next(index, failure)
                if wait_s is None:
                    del self.lost[index]
                    return failure
                self.lost[index] = replace(loss, wait_s=wait_s)
                continue
            del self.lost[index]
            elapsed_s = now_s() - loss.since_s
            self._replaced += 1
            self._longest_s = max(self._longest_s, elapsed_s)
            self._notify(f"{self._names[index]} was replaced within {elapsed_s:.1f} s")
            return None

    def take(self) -> tuple[int, float]:
        """How many were replaced since the last call, and the longest time that took."""
        taken = self._replaced, self._longest_s
        self._replaced, self._longest_s = 0, 0.0
        return taken

    def _next(self, index: int, error: RuntimeFault) -> float | None:
        """Seconds until the next attempt to replace a worker, which is counted and reported to users; None: it is given up."""
        used, limit, name = self._restarts[index], self._limits.max_restarts, self._names[index]
        wait_s = backoff_s(used, limit)
        if isinstance(error, NodeLostError):
            self._notify(f"{error}; {name} is not replaced, its node is gone")
            return None
        if wait_s is None:
            self._notify(f"{error}; {name} is not replaced, {used} of {limit} restarts are used (spec.rollout.maxEngineRestarts)")
            return None
        self._restarts[index] = used + 1
        when = f"in {wait_s:.0f} s" if wait_s else "now"
        self._notify(f"{error}; {name} is replaced {when}, restart {used + 1} of {limit}; {self._meanwhile}")
        return wait_s
