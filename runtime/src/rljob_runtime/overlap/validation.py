"""Validation of one weights version: fixed prompts, answered by the engines beside the training's own, scored, summed up.

::

    prompts ── samples, handed out before the training's ──> EngineFleet ──> on_finished ──> rewards ──> Validated: metrics, trajectories

Training's responses go on at the same engines, or wait with the tokens they have (``pauseGeneration``).

| wait      | for                                       | bounded by    | then                                      |
|-----------|-------------------------------------------|---------------|-------------------------------------------|
| run       | all validation responses and their reward | ``timeout_s`` | DeadlineError naming version and what lacks |
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from rljob_runtime.errors import DeadlineError, RuntimeFault
from rljob_runtime.overlap.episodes import Environments
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.fleet_engine import now_s
from rljob_runtime.overlap.played import played_metrics
from rljob_runtime.overlap.samples import Owner, Response, Sample
from rljob_runtime.overlap.scheduler import ScoreResponses
from rljob_runtime.packed import reward_batch
from rljob_runtime.records import Completion, GenerationRequest, Prompt, RewardResult, Sampling, Trajectory

SEED_OFFSET = 0x76616C6964
"""Keeps validation's random numbers apart from training's; the same for every version, so that curves differ by the weights alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """What validation needs of the spec."""

    every_steps: int
    """0 switches it off."""
    at_start: bool
    """Also the weights before the first step."""
    pauses: bool
    """Whether training's responses wait meanwhile."""
    samples_per_prompt: int
    sampling: Sampling
    seed: int
    timeout_s: float
    """Deadline of one validation."""

    def due(self, version: int, *, last: int) -> bool:
        """Whether weights ``version`` are validated: every n-th, the run's first if asked, and the last in any case.

        So are those that a resumed run begins with: what followed its checkpoint was dropped from the report, that validation with it.

        Args:
            version: of the weights just published.
            last: version at the end of the run.
        """
        if not self.every_steps:
            return False
        if version == 0:
            return self.at_start
        return version % self.every_steps == 0 or version == last


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """What the validation of one version brought."""

    metrics: dict[str, float]
    """``validation/*``."""
    trajectories: tuple[Trajectory, ...]
    """One per response, in the order of the prompts; their group is the prompt's place. Some have no score."""

    @property
    def problems(self) -> Counter[str]:
        """What went wrong in scoring, and how often."""
        return Counter(t.reward.error for t in self.trajectories if t.reward.error is not None)


class Validator:
    """Answers the same prompts under one version after another; one validation at a time."""

    priority = 0
    """Before training's responses: the next weights wait for the end of a validation."""

    def __init__(
        self,
        *,
        fleet: EngineFleet,
        prompts: Sequence[Prompt],
        config: ValidationConfig,
        score: ScoreResponses | None = None,
        environments: Environments | None = None,
    ) -> None:
        """Wire the parts; ``prompts`` are answered in every validation, or played where ``environments`` score them, not ``score``."""
        self._fleet = fleet
        self.prompts = prompts
        self._score = score
        self.config = config
        seed = config.seed + SEED_OFFSET
        self._player = None if environments is None else environments.player(self, fleet, config.sampling, seed)
        self._responses: dict[str, Response] = {}
        self._wanted = 0
        self._complete = asyncio.Event()

    def request_of(self, sample: Sample) -> GenerationRequest:
        """The next part of a response."""
        return sample.request(self.config.sampling, self.config.seed + SEED_OFFSET)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        """Takes whole responses."""
        self.on_played([(sample, sample.response(completion, now_s())) for sample, completion in finished])

    def on_started(self, sample: Sample) -> None:
        """Nothing depends on when a validation episode began."""

    def on_played(self, played: list[tuple[Sample, Response]]) -> None:
        """Takes whole responses or episodes."""
        self._responses |= {sample.key: response for sample, response in played}
        if len(self._responses) >= self._wanted:
            self._complete.set()

    async def run(self, version: int) -> Validated:
        """Validate the weights that all engines serve.

        Raises:
            DeadlineError: it did not end in time.
        """
        generation = self._fleet if self._player is None else self._player
        samples = [
            Sample(owner=self, group_id=number, index=index, prompt=prompt, prefix=f"v{version}/")
            for number, prompt in enumerate(self.prompts)
            for index in range(self.config.samples_per_prompt)
        ]
        self._responses, self._wanted = {}, len(samples)
        self._complete.clear()
        started_s = now_s()
        try:
            async with asyncio.timeout(self.config.timeout_s), self._place(version):
                generation.add(samples)
                await self._complete.wait()
                trajectories = await self._scored(samples)
        except TimeoutError as error:
            if isinstance(error, RuntimeFault):  # of an engine or a reward worker, which it names
                raise
            raise DeadlineError(
                f"validation of weights v{version}: {len(self._responses)} of {len(samples)} responses within "
                f"{self.config.timeout_s:.0f} s (spec.training.stepTimeoutSeconds)"
            ) from error
        finally:
            generation.cancel(samples)
        metrics = self._summed(version, trajectories) | {"time/validate_s": now_s() - started_s}
        return Validated(metrics=metrics, trajectories=trajectories)

    @asynccontextmanager
    async def _place(self, version: int) -> AsyncIterator[None]:
        """Room at the engines: all of it, or beside training's responses."""
        if not self.config.pauses:
            yield
            return
        owner: Owner = self if self._player is None else self._player
        async with self._fleet.reserved(owner, what=f"validation of weights v{version}", timeout_s=self.config.timeout_s):
            yield

    async def _scored(self, samples: Sequence[Sample]) -> tuple[Trajectory, ...]:
        responses = [self._responses[sample.key] for sample in samples]
        return tuple(
            response.scored(sample.group_id, sample.index, reward)
            for sample, response, reward in zip(samples, responses, await self._rewards(samples, responses), strict=True)
        )

    async def _rewards(self, samples: Sequence[Sample], responses: Sequence[Response]) -> Sequence[RewardResult]:
        """Of each response; episodes have theirs from their environment."""
        if self._score is None:
            return [response.reward for response in responses if response.reward is not None]
        return await self._score(
            reward_batch(
                sample_ids=[sample.key for sample in samples],
                prompts=[sample.prompt for sample in samples],
                finish_reasons=[response.finish_reason for response in responses],
                tokens=[response.segments[0].token_ids for response in responses],
            )
        )

    def _summed(self, version: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        lengths = np.array([trajectory.num_sampled for trajectory in trajectories])
        scored = [(trajectory.prompt, trajectory.reward) for trajectory in trajectories if trajectory.reward.score is not None]
        metrics = {
            "validation/version": float(version),
            "validation/prompts": float(len(self.prompts)),
            "validation/errors": float(len(trajectories) - len(scored)),
            "validation/tokens": float(lengths.sum()),
            "validation/mean_tokens": float(lengths.mean()),
            "validation/truncated_fraction": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        }
        if scored:
            metrics["validation/mean"] = float(np.mean([result.score for _, result in scored]))
            metrics["validation/pass_rate"] = float(np.mean([result.passed for _, result in scored]))
        named: dict[str, list[float]] = {}
        for prompt, result in scored:
            named.setdefault(f"validation/source/{prompt.source}", []).append(result.score or 0.0)
            named.setdefault(f"validation/tag/{prompt.tag}", []).append(result.score or 0.0)
            for name, score in result.parts.items():
                named.setdefault(f"validation/part/{name}", []).append(score)
        metrics |= {f"validation/{name}": value for name, value in played_metrics(trajectories).items()}
        return metrics | {name: float(np.mean(scores)) for name, scores in named.items()}
