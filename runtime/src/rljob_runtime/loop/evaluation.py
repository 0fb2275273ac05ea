"""A validation-only run: the model as the engines loaded it from its folder, validated once. No trainer, no weight sync.

::

    prompts ──> Validator ──> EngineFleet ──> engines ──> rewards ──> metrics of weights v0 ──> Reporter

| wait             | for                          | bounded by                                       | unblocked by        |
|------------------|------------------------------|--------------------------------------------------|---------------------|
| validator.run    | its responses and rewards    | training.stepTimeoutSeconds                      | the last one scored |
| engines          | a response                   | rollout.stallTimeoutSeconds                      | any response        |
| workers' watch   | the end of a worker          | the whole run                                    | a dead process      |
"""

from __future__ import annotations

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.loop.watching import run_beside, watch_workers
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.offload.worker_group import lease_owner
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.validation import Validator
from rljob_runtime.records import StepRecord
from rljob_runtime.report import Reporter


class Evaluation:
    """One per attempt."""

    def __init__(self, *, workers: JobWorkers, fleet: EngineFleet, validator: Validator, reporter: Reporter) -> None:
        """Wire the parts."""
        self._workers = workers
        self._fleet = fleet
        self._validator = validator
        self._reporter = reporter

    async def run(self) -> None:
        """Validate, and record the result as step 0.

        Raises:
            RuntimeFault: something broke, or it took too long.
        """
        with self._reporter.phase("validation"), lease_owner("driver"):
            await run_beside(self._validate(), [self._fleet.run(), watch_workers(self._workers, self._lose)])

    async def _validate(self) -> None:
        async with self._workers.generating(0):
            metrics = await self._validator.run(0)
        self._reporter.record(StepRecord(step=0, version=0, metrics=metrics))

    def _lose(self, index: int, error: WorkerLostError) -> None:
        self._fleet.lose(index, error)
