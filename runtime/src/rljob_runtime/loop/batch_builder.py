"""From groups to train batches: score what the rule asks for, apply it, share the result out over ranks.

::

    groups ── arrange ──> StepSamples ──┬── reference: log-probs ──┐   each a forward pass over all samples of the step,
                                        ├── trainer: log-probs   ──┤   balanced over the ranks that make it
                                        └── critic: values       ──┴──> Rule.apply ──> train_batches ──> policy, critic

| wait   | for                                   | bounded by                  | unblocked by     |
|--------|---------------------------------------|-----------------------------|------------------|
| make   | a forward pass on all ranks of a role | training.stepTimeoutSeconds | the slowest rank |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.offload.turns import Turns
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.batching import BatchingConfig, gather_scores, score_batches, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.records import FloatArray, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """Who computes what the rule asks for; empty where it does not ask."""

    references: Sequence[Worker] = ()
    trainers: Sequence[Worker] = ()
    """With a recomputed proximal policy: its log-probs are those at the beginning of the step."""
    tensor_parallel_size: int = 1
    """Trainers that share one data-parallel rank, next to each other."""
    critics: Sequence[Worker] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the workers train on."""

    policy: list[list[TrainBatch]]
    """By data-parallel rank, then by update; no updates where everything was left out."""
    critic: list[list[TrainBatch]]
    """By rank of the critic; empty without one."""
    metrics: dict[str, float]


class BatchMaker:
    """One per job; keeps the rule's running state."""

    def __init__(self, *, rule: Rule, scorers: Scorers, batching: BatchingConfig, turns: Turns, timeout_s: float) -> None:
        """Wire the parts; ``timeout_s`` bounds one forward pass."""
        self._rule = rule
        self._scorers = scorers
        self._batching = batching
        self._turns = turns
        self._timeout_s = timeout_s

    def state(self) -> Mapping[str, object]:
        """Of the rule, for a checkpoint."""
        return self._rule.state()

    async def make(self, groups: Sequence[Group], version: int) -> Prepared:
        """Batches of one step.

        Args:
            groups: to be trained.
            version: weights the trainer holds.

        Raises:
            DeadlineError: a forward pass took too long.
        """
        step = await self._scored(arrange(groups, version))
        outcome = self._rule.apply(step)
        policy = train_batches(step, split(step, self._batching), outcome, self._batching)
        metrics = outcome.metrics
        if policy.skipped_updates:
            metrics = metrics | {"train/skipped_updates": float(policy.skipped_updates * self._batching.epochs)}
        critic: list[list[TrainBatch]] = []
        if self._scorers.critics:
            config = replace(self._batching, num_ranks=len(self._scorers.critics))
            critic = train_batches(step, split(step, config), outcome, config).by_rank
        return Prepared(policy=policy.by_rank, critic=critic, metrics=metrics)

    async def _scored(self, step: StepSamples) -> StepSamples:
        scorers, number, temperature = self._scorers, step.version + 1, self._batching.temperature
        if scorers.references:
            async with self._turns.scoring(number):
                step = replace(step, reference_logprobs=await self._pass(step, scorers.references, "compute_logprobs", temperature))
        if scorers.trainers:
            async with self._turns.training(number):
                step = replace(step, proximal_logprobs=await self._pass(step, scorers.trainers, "compute_logprobs", temperature))
        if scorers.critics:
            async with self._turns.valuing(number):
                step = replace(step, values=await self._pass(step, scorers.critics, "compute_values"))
        return step

    async def _pass(self, step: StepSamples, workers: Sequence[Worker], method: str, *settings: object) -> FloatArray:
        """One forward pass over all samples, shared out over the workers; every rank takes part, for it holds collectives."""
        together = self._scorers.tensor_parallel_size if workers is self._scorers.trainers else 1
        batches = score_batches(step, len(workers) // together, self._batching)
        shares = [batches[rank // together] for rank in range(len(workers))]
        calls = [w.start(method, b.token_ids, b.lengths, *settings, b.wanted) for w, b in zip(workers, shares, strict=True)]
        answers = await gather_all(calls, self._timeout_s)
        return gather_scores(step, batches, answers[::together])
