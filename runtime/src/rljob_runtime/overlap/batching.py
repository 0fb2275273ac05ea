"""From a step's samples to what each trainer rank trains: mini-batches and balanced shares.

Deterministic: the same samples give the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from rljob_runtime.overlap.arrange import StepSamples
from rljob_runtime.overlap.balance import Parts, imbalance, partition
from rljob_runtime.overlap.rule import Outcome
from rljob_runtime.records import FloatArray, IntArray, TrainBatch
from rljob_runtime.routes import RouteArray
from rljob_runtime.sampling_mask import SamplingMask

BALANCED = 1.02
"""A busiest rank with so many times the least possible load is good enough, and groups are cut only for a gain of so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """What batching needs of the spec."""

    num_ranks: int
    """Data-parallel trainer ranks."""
    mini_batches: int
    """Optimizer updates per epoch; groups stay whole."""
    epochs: int
    temperature: float
    include_staleness: bool = False
    """Whether the loss asks how old each token is."""
    include_teacher: bool = False
    """Whether the loss asks for the teacher's log-probs."""
    include_scores: bool = False
    """Whether the loss asks for raw scores."""
    linear_tokens: float = 24576.0
    """Length at which a token's attention costs what its linear layers do: 6 * hidden size, here for 4096."""
    shared_prompts: bool = True
    """Whether a rank computes a prompt once for all samples of the group that it has."""


Shares = tuple[tuple[IntArray, ...], ...]
"""The sequences of each update and rank, ascending: indexes into (Q,) arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer update, over all ranks."""

    shares: tuple[IntArray, ...]
    """The sequences of each rank, ascending: indexes into (Q,) arrays."""
    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What the trainer ranks train in a step; written out rank by rank, so that one rank's arrays need be there at a time."""

    step: StepSamples
    outcome: Outcome
    config: BatchingConfig
    updates: tuple[Update, ...]
    """Of each epoch."""
    skipped_updates: int
    """Updates per epoch that were left out because no token of theirs is trained."""

    def of_rank(self, rank: int) -> list[TrainBatch]:
        """One batch per optimizer update, as many on every rank; epochs repeat the same objects."""
        return [_pack(update.shares[rank], update, self.step, self.outcome, self.config) for update in self.updates] * self.config.epochs

    @property
    def by_rank(self) -> list[list[TrainBatch]]:
        """Those of every rank."""
        return [self.of_rank(rank) for rank in range(self.config.num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBatch:
    """Sequences for one rank of a forward pass; t tokens and s sequences, none where there are more ranks than sequences."""

    token_ids: IntArray
    """Shape (t,)."""
    lengths: IntArray
    """Shape (s,): sums to t."""
    wanted: FloatArray
    """Shape (t,): 1 where a token was sampled."""
    sequences: IntArray
    """Shape (s,): indexes into (Q,) arrays."""
    sampling_mask: SamplingMask | None = None
    """Of t positions."""
    routes: RouteArray | None = None
    """Shape (t, L, K); None where the pass does not replay them."""


def split(step: StepSamples, config: BatchingConfig) -> Shares:
    """Divide a step's sequences over updates and ranks; every sequence is in one share.

    Groups are whole within an update, and the first groups are in the first. Within an update they are whole on a rank, so that it computes
    a shared prompt once, unless ranks are better balanced with groups cut into two, four or more pieces.
    """
    groups, position = np.unique(step.groups_of_sequences, return_inverse=True)
    update_of = position * config.mini_batches // max(len(groups), 1)
    return tuple(_divide(np.flatnonzero(update_of == update), step, config.num_ranks, config) for update in range(config.mini_batches))


def train_batches(step: StepSamples, shares: Shares, outcome: Outcome, config: BatchingConfig) -> Batches:
    """What each rank trains.

    Denominators count the trained tokens and sequences of an update over all ranks. An update in which nothing is trained is left out on
    all ranks; where all are, ranks have no batches.

    Args:
        step: all samples.
        shares: from :func:`split`.
        outcome: of the learning rule for these samples.
        config: from the spec.
    """
    counts = _trained_tokens(step, outcome)
    updates = []
    for update in shares:
        of_update = np.concatenate([counts[sequences] for sequences in update])
        if tokens := int(of_update.sum()):
            updates.append(Update(shares=update, tokens=tokens, sequences=int(np.count_nonzero(of_update))))
    return Batches(step=step, outcome=outcome, config=config, updates=tuple(updates), skipped_updates=len(shares) - len(updates))


def score_batches(
    step: StepSamples, num_ranks: int, config: BatchingConfig, *, members: npt.NDArray[np.int64] | None = None, with_routes: bool = False
) -> list[ScoreBatch]:
    """Divide a step's sequences over the ranks of a forward pass; every sequence is in one batch, one batch per rank.

    Args:
        step: all samples.
        num_ranks: of the pass.
        config: from the spec.
        members: shape (q,): ascending indexes of the sequences that are scored; None: all.
        with_routes: whether the pass replays routes, where there are any.
    """
    shares = _divide(np.arange(step.lengths.size) if members is None else members, step, num_ranks, config)
    batches = []
    for sequences in shares:
        batches.append(
            ScoreBatch(
                token_ids=step.rows(step.token_ids, sequences),
                lengths=step.lengths[sequences],
                wanted=step.rows(step.response_mask, sequences),
                sequences=sequences,
                sampling_mask=None if step.sampling_mask is None else step.sampling_mask.take(step.places(sequences)),
                routes=step.rows(step.routes, sequences) if with_routes and step.routes is not None else None,
            )
        )
    return batches


def gather_scores(step: StepSamples, batches: Sequence[ScoreBatch], answers: Sequence[npt.NDArray[np.floating]]) -> FloatArray:
    """Bring the ranks' answers back into the order of the step.

    Args:
        step: what :func:`score_batches` divided.
        batches: by rank.
        answers: by rank, each of shape (t,).

    Returns:
        Shape (T,); 0 where a sequence is in no batch.

    Raises:
        ValueError: an answer has another shape.
    """
    result = np.zeros(step.token_ids.size, dtype=np.float32)
    for rank, (batch, answer) in enumerate(zip(batches, answers, strict=True)):
        if answer.shape != batch.token_ids.shape:
            raise ValueError(f"rank {rank} answered with shape {answer.shape} for tokens of shape {batch.token_ids.shape}")
        result[step.places(batch.sequences)] = answer
    return result


def _divide(members: npt.NDArray[np.int64], step: StepSamples, num_ranks: int, config: BatchingConfig) -> tuple[IntArray, ...]:
    """Sequences of each rank: whole groups, or pieces of groups where these make the busiest rank's load smaller."""
    if num_ranks == 1 or not members.size:
        return tuple(members.astype(np.int32) if rank == 0 else np.zeros(0, dtype=np.int32) for rank in range(num_ranks))
    costs = _Costs(step, config)
    borders = np.flatnonzero(np.diff(step.groups_of_sequences[members])) + 1
    found = [group.tolist() for group in np.split(members, borders)]
    loads = costs.loads(found)
    order = sorted(range(len(found)), key=lambda i: (-loads[i], found[i][0]))
    groups = [found[i] for i in order]
    best = _assign(groups, costs, num_ranks)
    least = sum(loads) / num_ranks
    pieces, largest = 2, max(len(group) for group in groups)
    while best[0][0] > BALANCED * least and pieces < 2 * largest:
        for cut in sorted({len(groups) % num_ranks, len(groups)} - {0}):  # only those that do not go round, or all
            units = [part.tolist() for group in groups[:cut] for part in np.array_split(group, min(pieces, len(group)))]
            option = _assign(units + groups[cut:], costs, num_ranks)
            if option[0][0] * BALANCED < best[0][0]:
                best = option
        pieces *= 2
    return tuple(np.array(share, dtype=np.int32) for share in best[1])


def _assign(units: list[list[int]], costs: _Costs, num_ranks: int) -> tuple[tuple[float, float], Parts]:
    """Units over ranks, and how unequal the ranks' loads are."""
    parts = partition(costs.loads(units), num_ranks)
    shares = [sorted(i for unit in part for i in units[unit]) for part in parts]
    return imbalance(costs.loads(shares)), shares


class _Costs:
    """What ranks compute: ``linear_tokens * n + n^2`` for a sequence of n tokens, each group's prompt once."""

    def __init__(self, step: StepSamples, config: BatchingConfig) -> None:
        """Of a step's sequences."""
        self._whole = _cost(step.lengths, config)
        self._shared = _cost(step.prompt_lengths, config) if config.shared_prompts else None
        self._prompts = step.prompts_of_sequences

    def loads(self, units: Sequence[Sequence[int]]) -> list[float]:
        """The load of each unit of sequences, none of them empty but for a rank without any."""
        unit_of = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
        chosen = np.fromiter(chain.from_iterable(units), dtype=np.int64, count=unit_of.size)
        costs = self._whole[chosen]
        if self._shared is not None:
            prompts = self._prompts[chosen].astype(np.int64)
            _, first = np.unique(unit_of * (1 << 32) + prompts, return_index=True)
            again = np.ones(chosen.size, dtype=np.bool_)
            again[first] = False
            costs = costs - np.where(again, self._shared[chosen], 0.0)
        return np.bincount(unit_of, costs, len(units)).tolist()


def _cost(tokens: IntArray, config: BatchingConfig) -> npt.NDArray[np.float64]:
    sizes = tokens.astype(np.float64)
    return config.linear_tokens * sizes + sizes**2


def _trained_tokens(step: StepSamples, outcome: Outcome) -> npt.NDArray[np.int64]:
    """Shape (Q,): trained tokens of each sequence."""
    if outcome.trained is step.response_mask and step.lengths.size == step.response_lengths.size:  # all that was sampled, sample by sample
        return step.response_lengths.astype(np.int64)
    trained = outcome.trained > 0
    ends = step.ends.tolist()
    return np.array([np.count_nonzero(trained[end - size : end]) for end, size in zip(ends, step.lengths.tolist(), strict=True)], np.int64)


def _pack(sequences: IntArray, update: Update, step: StepSamples, outcome: Outcome, config: BatchingConfig) -> TrainBatch:
    """One rank's batch of one update."""

    def at(values: FloatArray | None) -> FloatArray | None:
        return None if values is None else step.rows(values, sequences)

    mask, samples = step.rows(outcome.trained, sequences), step.sample_of[sequences]
    behavior = step.rows(step.behavior_logprobs, sequences)
    if outcome.trained is not step.response_mask:
        behavior = np.where(mask > 0, behavior, np.float32(0.0))
    return TrainBatch(
        token_ids=step.rows(step.token_ids, sequences),
        lengths=step.lengths[sequences],
        response_mask=mask,
        behavior_logprobs=behavior,
        advantages=step.rows(outcome.advantages, sequences),
        reference_logprobs=at(step.reference_logprobs),
        teacher_logprobs=at(step.teacher_logprobs) if config.include_teacher else None,
        proximal_logprobs=at(step.proximal_logprobs),
        staleness=at(step.staleness) if config.include_staleness else None,
        values=at(step.values),
        returns=at(outcome.returns),
        scores=step.scores[samples] if config.include_scores else None,
        sample_weights=None if outcome.sample_weights is None else outcome.sample_weights[samples],
        sampling_mask=None if step.sampling_mask is None else step.sampling_mask.take(step.places(sequences)),
        routes=None if step.routes is None else step.rows(step.routes, sequences),
        kl_coefficient=outcome.kl_coefficient,
        temperature=config.temperature,
        global_tokens=update.tokens,
        global_sequences=update.sequences,
        version=step.version,
    )
