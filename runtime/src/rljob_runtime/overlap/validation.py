"""Validation of one weights version: fixed prompts, answered by the engines beside the training's own, scored, summed up.

::

    prompts ── samples, handed out before the training's ──> EngineFleet ──> on_finished ──> rewards ──> metrics of that version

Training's responses go on at the same engines, or wait with the tokens they have (``pauseGeneration``).

| wait      | for                                       | bounded by    | then                                      |
|-----------|-------------------------------------------|---------------|-------------------------------------------|
| run       | all validation responses and their reward | ``timeout_s`` | DeadlineError naming version and what lacks |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from rljob_runtime.errors import DeadlineError, RuntimeFault
from rljob_runtime.overlap.fleet import EngineFleet, now_s
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.overlap.scheduler import ScoreResponses
from rljob_runtime.records import Completion, GenerationRequest, Prompt, RewardRequest, RewardResult, Sampling

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


class Validator:
    """Answers the same prompts under one version after another; one validation at a time."""

    priority = 0
    """Before training's responses: the next weights wait for the end of a validation."""

    def __init__(
        self,
        *,
        fleet: EngineFleet,
        prompts: Sequence[Prompt],
        decode: Callable[[list[tuple[int, ...]]], list[str]],
        score: ScoreResponses,
        config: ValidationConfig,
    ) -> None:
        """Wire the parts; ``prompts`` are answered in every validation."""
        self._fleet = fleet
        self.prompts = prompts
        self._decode = decode
        self._score = score
        self.config = config
        self._completions: dict[str, Completion] = {}
        self._wanted = 0
        self._complete = asyncio.Event()

    def request_of(self, sample: Sample) -> GenerationRequest:
        """The next part of a response."""
        return sample.request(self.config.sampling, self.config.seed + SEED_OFFSET)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        """Takes whole responses."""
        self._completions |= {sample.key: completion for sample, completion in finished}
        if len(self._completions) >= self._wanted:
            self._complete.set()

    async def run(self, version: int) -> dict[str, float]:
        """Validate the weights that all engines serve.

        Returns:
            Metrics ``validation/*``.

        Raises:
            DeadlineError: it did not end in time.
        """
        samples = [
            Sample(owner=self, group_id=number, index=index, prompt=prompt, prefix=f"v{version}/")
            for number, prompt in enumerate(self.prompts)
            for index in range(self.config.samples_per_prompt)
        ]
        self._completions, self._wanted = {}, len(samples)
        self._complete.clear()
        started_s = now_s()
        try:
            async with asyncio.timeout(self.config.timeout_s), self._place(version):
                self._fleet.add(samples)
                await self._complete.wait()
                results = await self._scored(samples)
        except TimeoutError as error:
            if isinstance(error, RuntimeFault):  # of an engine or a reward worker, which it names
                raise
            raise DeadlineError(
                f"validation of weights v{version}: {len(self._completions)} of {len(samples)} responses within "
                f"{self.config.timeout_s:.0f} s (spec.training.stepTimeoutSeconds)"
            ) from error
        finally:
            self._fleet.cancel(samples)
        return self._summed(version, samples, results) | {"time/validate_s": now_s() - started_s}

    @asynccontextmanager
    async def _place(self, version: int) -> AsyncIterator[None]:
        """Room at the engines: all of it, or beside training's responses."""
        if not self.config.pauses:
            yield
            return
        async with self._fleet.reserved(self, what=f"validation of weights v{version}", timeout_s=self.config.timeout_s):
            yield

    async def _scored(self, samples: Sequence[Sample]) -> list[RewardResult]:
        completions = [self._completions[sample.key] for sample in samples]
        texts = self._decode([completion.token_ids for completion in completions])
        return await self._score(
            [
                RewardRequest(sample_id=sample.key, prompt=sample.prompt, response_text=text, finish_reason=completion.finish_reason)
                for sample, completion, text in zip(samples, completions, texts, strict=True)
            ]
        )

    def _summed(self, version: int, samples: Sequence[Sample], results: Sequence[RewardResult]) -> dict[str, float]:
        completions = [self._completions[sample.key] for sample in samples]
        lengths = np.array([len(completion.token_ids) for completion in completions])
        scored = [(sample, result) for sample, result in zip(samples, results, strict=True) if result.score is not None]
        metrics = {
            "validation/version": float(version),
            "validation/prompts": float(len(self.prompts)),
            "validation/errors": float(len(results) - len(scored)),
            "validation/tokens": float(lengths.sum()),
            "validation/mean_tokens": float(lengths.mean()),
            "validation/truncated_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
        }
        if scored:
            metrics["validation/mean"] = float(np.mean([result.score for _, result in scored]))
            metrics["validation/pass_rate"] = float(np.mean([result.passed for _, result in scored]))
        named: dict[str, list[float]] = {}
        for sample, result in scored:
            named.setdefault(f"validation/source/{sample.prompt.source}", []).append(result.score or 0.0)
            named.setdefault(f"validation/tag/{sample.prompt.tag}", []).append(result.score or 0.0)
            for name, score in result.parts.items():
                named.setdefault(f"validation/part/{name}", []).append(score)
        return metrics | {name: float(np.mean(scores)) for name, scores in named.items()}
