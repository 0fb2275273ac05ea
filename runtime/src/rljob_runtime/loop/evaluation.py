"""A validation-only run: the model as the engines loaded it from its folder, validated once. No trainer, no weight sync.

::

    prompts ──> Validator ──> EngineFleet ──> engines ──> rewards ──> metrics and trajectories of weights v0 ──> Reporter

| wait             | for                          | bounded by                                       | unblocked by        |
|------------------|------------------------------|--------------------------------------------------|---------------------|
| validator.run    | its responses and rewards    | training.stepTimeoutSeconds                      | the last one scored |
| engines          | a token                      | rollout.stallTimeoutSeconds                      | a replacement       |
| workers' watch   | the end of a worker          | the whole run                                    | a dead process      |
"""

from __future__ import annotations

import asyncio

from rljob_runtime.errors import RewardsFailedError
from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.loop.validating import report_problems
from rljob_runtime.loop.watching import run_beside, watch_workers
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.offload.worker_group import lease_owner
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.validation import Validated, Validator
from rljob_runtime.records import StepRecord
from rljob_runtime.report import Decode, Reporter


class Evaluation:
    """One per attempt."""

    def __init__(
        self,
        *,
        workers: JobWorkers,
        fleet: EngineFleet,
        supervisor: EngineSupervisor,
        validator: Validator,
        reporter: Reporter,
        decode: Decode,
        judging: Judging | None = None,
        router: EnvironmentRouter | None = None,
    ) -> None:
        """Wire the parts.

        ``decode`` makes texts of the responses that are kept to be read, ``judging`` is there where judges share devices, ``router`` where
        episodes are played.
        """
        self._judging = judging
        self._router = router
        self._workers = workers
        self._fleet = fleet
        self._supervisor = supervisor
        self._validator = validator
        self._reporter = reporter
        self._decode = decode

    async def run(self) -> None:
        """Validate, and record the result as step 0.

        Raises:
            RewardsFailedError: no response has a score.
            RuntimeFault: something broke, or it took too long.
        """
        with self._reporter.phase("validation"), lease_owner("driver"):
            beside = [self._fleet.run(), self._supervisor.run(), watch_workers(self._workers.indispensable, lambda name: None)]
            if self._router is not None:
                beside.append(self._router.run())
            await run_beside(self._validate(), beside)

    async def _validate(self) -> None:
        validated = await self._validated()
        self._reporter.record(StepRecord(step=0, version=0, metrics=validated.metrics))
        await asyncio.to_thread(self._reporter.trajectories, 0, validated.trajectories, self._decode)
        report_problems(self._reporter, "validation", validated.problems)
        if all(trajectory.reward.score is None for trajectory in validated.trajectories):
            (worst, _), *_ = validated.problems.most_common(1) or [("not known", 0)]
            raise RewardsFailedError(
                f"none of {len(validated.trajectories)} responses got a score, the most frequent error is: {worst}; "
                "correct the reward or the data, or set rewards[].onError to a score"
            )

    async def _validated(self) -> Validated:
        """Responses and, beside or after them, their scores."""
        judging = self._judging
        if judging is None:
            async with self._workers.generating(0):
                return await self._validator.run(0)
        validating = asyncio.ensure_future(self._validator.run(0))
        try:
            async with self._workers.generating(0), judging.beside(0):
                wanted = asyncio.ensure_future(judging.wanted())
                try:
                    await asyncio.wait({validating, wanted}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    wanted.cancel()
            await judging.phase(0)
            return await validating
        finally:
            validating.cancel()
