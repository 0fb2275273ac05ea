"""The validation under way: beside whatever the loop does, until its metrics are there or nothing can end it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.validation import Validated, Validator
from rljob_runtime.report import Level, Reporter
from rljob_runtime.weightsync.publisher import WeightPublisher

LOOK_S = 1.0
"""How often a wait for a validation looks whether engines are left."""
MAX_PROBLEMS = 3
"""Of a step or validation, that are shown."""


def report_problems(reporter: Reporter, where: str, problems: Counter[str]) -> None:
    """Show the most frequent problems in scoring."""
    for problem, count in problems.most_common(MAX_PROBLEMS):
        reporter.event(f"{where}: {problem}{f' ({count} times)' if count > 1 else ''}", Level.WARNING)


@dataclass(slots=True, kw_only=True)
class Validating:
    """At most one validation at a time."""

    validator: Validator | None
    """None: nothing is ever due."""
    total_steps: int
    fleet: EngineFleet
    supervisor: EngineSupervisor
    judging: Judging | None
    publisher: WeightPublisher
    reporter: Reporter
    stop: asyncio.Event
    """The run is to end at the next opportunity: within a pod's grace period, which is shorter than many validations."""
    _task: asyncio.Task[Validated] | None = None

    @property
    def runs(self) -> bool:
        """Whether one was begun whose metrics nobody took yet."""
        return self._task is not None

    @property
    def can_be_taken(self) -> bool:
        """Whether :meth:`end` waits for nothing."""
        return self._task is None or self._task.done()

    def is_due(self, step: int) -> bool:
        """Whether the weights of a step are to be validated."""
        return self.validator is not None and self.validator.config.due(step, last=self.total_steps)

    def begin(self, step: int) -> None:
        """Validate the weights just published, when due, beside whatever follows."""
        if self.validator is not None and self.is_due(step) and self._task is None:
            self._task = asyncio.ensure_future(self.validator.run(step))

    async def end(self) -> dict[str, float] | None:
        """Metrics of the validation under way; empty when there is none, or none can end; None: an engine or judges need the devices."""
        if self._task is None:
            return {}
        while not self._task.done():
            await asyncio.wait({self._task}, timeout=LOOK_S)
            if self._task.done():
                break
            if self.stop.is_set():
                await self.close()
                self.reporter.event("the validation under way is given up: the run is to stop", Level.WARNING)
                return {}
            if self.supervisor.wanted.is_set() or (self.judging is not None and self.judging.holds_up):
                return None
            if self.publisher.is_awaited and not self.fleet.serves:
                await self.close()
                lost = "the last engine was lost, and the trainer has newer weights already"
                self.reporter.event(f"the validation under way is given up: {lost}", Level.WARNING)
                return {}
        task, self._task = self._task, None
        validated = await task
        report_problems(self.reporter, f"validation of weights v{validated.metrics['validation/version']:.0f}", validated.problems)
        return validated.metrics

    async def close(self) -> None:
        """Give up what runs."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # what it failed with has an end of its own: it is the loop's, or not wanted
