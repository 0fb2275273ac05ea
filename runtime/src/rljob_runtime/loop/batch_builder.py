"""From groups to train batches: score what the rule asks for, apply it, share the result out over ranks.

::

    groups ── arrange ──> StepSamples ──┬── reference: log-probs ──┐   each a forward pass over all samples of the step,
                                        ├── trainer: log-probs   ──┤   balanced over the ranks that make it
                                        └── critic: values       ──┴──> Rule.apply ──> train_batches ──> policy, critic

| wait   | for                                   | bounded by                  | unblocked by     |
|--------|---------------------------------------|-----------------------------|------------------|
| build  | a forward pass on all ranks of a role | training.stepTimeoutSeconds | the slowest rank |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_runtime.cluster.protocol import gather_all
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.loop.sharing import by_worker, sent
from rljob_runtime.loop.workers import Component, JobWorkers, Scoring
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.batching import Batches, BatchingConfig, gather_scores, score_batches, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.records import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the workers train on."""

    policy: list[Any]
    """By data-parallel rank its batches, by update, or what was shared with it in their place where they are large; no updates where
    everything was left out."""
    critic: list[Any]
    """The same by data-parallel rank of the critic; empty without one."""
    metrics: dict[str, float]

    def clear(self) -> None:
        """Let go of the batches one by one."""
        for shares in (self.policy, self.critic):
            while shares:
                shares.pop()


class BatchBuilder:
    """One per job; keeps the rule's running state."""

    def __init__(self, *, rule: Rule, workers: JobWorkers, batching: BatchingConfig, timeout_s: float) -> None:
        """Wire the parts; ``timeout_s`` bounds one forward pass."""
        self._rule = rule
        self._workers = workers
        self.batching = batching
        self._timeout_s = timeout_s

    def rule_state(self) -> Mapping[str, object]:
        """Running state of the learning rule, for a checkpoint."""
        return self._rule.state()

    async def build(self, groups: Sequence[Group], version: int) -> Prepared:
        """Batches of one step.

        Args:
            groups: to be trained.
            version: weights the trainer holds.

        Raises:
            DeadlineError: a forward pass took too long.
        """
        if not self._workers.scorers:
            return await asyncio.to_thread(lambda: self._prepare(arrange(groups, version)))
        step = [await self._scored(await asyncio.to_thread(arrange, groups, version))]
        return await asyncio.to_thread(lambda: self._prepare(step.pop()))

    def _prepare(self, step: StepSamples) -> Prepared:
        """Apply the rule, write and send the batches; in a thread: a large step takes seconds, and so does letting go of its arrays."""
        outcome = self._rule.apply(step)
        policy = train_batches(step, split(step, self.batching), outcome, self.batching)
        metrics = outcome.metrics
        if policy.skipped_updates:
            metrics = metrics | {"train/skipped_updates": float(policy.skipped_updates * self.batching.epochs)}
        critic: list[Any] = []
        learner = self._workers.critic
        if learner is not None:
            config = replace(self.batching, num_ranks=len(learner.workers) // learner.ranks_per_share)
            unmasked = replace(step, sampling_mask=None, routes=None)  # values are no log-probs, and a critic's routers its own
            critic = _sent_by_rank(learner, train_batches(unmasked, split(unmasked, config), outcome, config))
        return Prepared(policy=_sent_by_rank(self._workers.trainer, policy), critic=critic, metrics=metrics)

    async def _scored(self, step: StepSamples) -> StepSamples:
        """The samples with the results of every forward pass that the job asks for."""
        covered: dict[str, npt.NDArray[np.bool_]] = {}
        for component, scoring in self._workers.scorers:
            own = np.array(self._workers.scored_by(component, step.tags), dtype=np.bool_)
            covered[scoring.result] = covered.get(scoring.result, np.zeros_like(own)) | own
            sequences, earlier = np.flatnonzero(own[step.sample_of]), getattr(step, scoring.result)
            scored = np.zeros(step.token_ids.size, dtype=np.float32)
            if sequences.size:  # a teacher may have no prompt in a step
                async with component.leased(step.version + 1):
                    scored = await self._pass(step, component, scoring, sequences)
            result: dict[str, Any] = {scoring.result: scored if earlier is None else earlier + scored}  # each sequence is scored once
            step = replace(step, **result)
        for name, by_someone in covered.items():
            if not by_someone.all():
                tag = step.tags[int(np.argmin(by_someone))]
                raise RuntimeFault(f"no component computes {name} of prompts with the tag {tag}; give it to a Teacher (teaches.sources)")
        return step

    async def _pass(self, step: StepSamples, component: Component, scoring: Scoring, sequences: npt.NDArray[np.int64]) -> FloatArray:
        """One forward pass over some sequences, shared out over the workers; every rank takes part, for it holds collectives."""
        workers, together = component.workers, component.ranks_per_share
        settings = (self.batching.temperature,) if scoring.takes_sampling else ()
        routed = scoring.takes_routes and step.routes is not None
        num_ranks = len(workers) // together
        batches = await asyncio.to_thread(score_batches, step, num_ranks, self.batching, members=sequences, with_routes=routed)
        masked = scoring.takes_sampling and (step.sampling_mask is not None or routed)
        arguments = await by_worker(
            workers,
            [
                (b.token_ids, b.lengths, *settings, b.wanted, *((b.sampling_mask,) if masked else ()), *((b.routes,) if routed else ()))
                for b in batches
            ],
        )
        calls = [w.start(scoring.method, *given) for w, given in zip(workers, arguments, strict=True)]
        answers = await gather_all(calls, self._timeout_s)
        return await asyncio.to_thread(gather_scores, step, batches, answers[::together])


def _sent_by_rank(component: Component, batches: Batches) -> list[Any]:
    """Batches of each data-parallel rank, written and sent one rank after the other: one rank's arrays are here at a time."""
    workers, together = component.workers, component.ranks_per_share
    return [sent(workers[rank * together], batches.of_rank(rank)) for rank in range(batches.config.num_ranks)]
