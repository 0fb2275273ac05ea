"""Replaces lost environment workers in place: a new process with the same settings, which begins empty.

::

    EnvironmentRouter ── lost ──> Replacements: a wait ──> the old process ends ──> new process ──> the router gives it episodes

| wait               | for                              | bounded by              | then                          |
|--------------------|----------------------------------|-------------------------|-------------------------------|
| old process        | its end                          | END_TIMEOUT_S           | nothing waits longer          |
| new process        | its environments and tokenizer   | start_timeout_s         | tried again, or given up      |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rljob_runtime.errors import RuntimeFault, WorkerLostError
from rljob_runtime.loop.replacement import ReplacementLimits, Replacements
from rljob_runtime.overlap.environment_router import Replacement

StartWorker = Callable[[int, float], Awaitable[None]]
"""Starts a worker, by its index, whose process was ended, within so many seconds."""
EndWorker = Callable[[int], Awaitable[None]]
"""Ends what is left of a worker."""


class EnvironmentReplacer:
    """One per attempt of a job."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        start: StartWorker,
        end: EndWorker,
        limits: ReplacementLimits,
        notify: Callable[[str], None],
    ) -> None:
        """Wire the parts.

        Args:
            names: of the workers.
            start: starts one again.
            end: ends the process of a lost one.
            limits: how often and how long.
            notify: takes a line for users.
        """
        self._start, self._end, self._limits = start, end, limits
        self._replacements = Replacements(names, limits, notify=notify, meanwhile="its episodes begin again with their seeds")

    def replace(self, index: int, error: WorkerLostError) -> Replacement:
        """What replaces a worker that was lost, or ends what is left of it where it is not replaced."""
        if not self._replacements.begin(index, error):
            return self._give_up(index, error)
        return self._replacements.bring_back(index, self._attempt)

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call; none where nothing was replaced."""
        replaced, longest_s = self._replacements.take()
        return {"environment/replaced": float(replaced), "environment/replacement_s": longest_s} if replaced else {}

    async def _give_up(self, index: int, error: WorkerLostError) -> RuntimeFault:
        await self._end(index)  # a stuck process may go on later, or use a core forever
        return error

    async def _attempt(self, index: int) -> None:
        await self._end(index)
        await self._start(index, self._limits.start_timeout_s)
