"""From judged groups to what each trainer rank trains: advantages, mini-batches, balanced shares.

Deterministic: the same groups give the same batches, whatever order they arrived in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.records import FloatArray, IntArray, TrainBatch, Trajectory

AdvantageFunction = Callable[[FloatArray, IntArray], FloatArray]
"""(rewards (S,), group ids (S,)) -> advantages (S,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """What batching needs of the spec."""

    num_ranks: int
    """Data-parallel trainer ranks."""
    mini_batches: int
    """Optimizer updates per epoch; groups stay whole."""
    epochs: int
    temperature: float


def make_batches(groups: Sequence[Group], *, advantage: AdvantageFunction, config: BatchingConfig, version: int) -> list[list[TrainBatch]]:
    """Batches by rank, each a list with one entry per optimizer update.

    Args:
        groups: the groups of this step.
        advantage: estimator over all samples of the step.
        config: from the spec.
        version: weights version the trainer holds.
    """
    ordered = sorted(groups, key=lambda g: g.group_id)
    samples = [t for g in ordered for t in sorted(g.trajectories, key=lambda t: t.sample_index)]
    rewards = np.array([t.reward.score for t in samples], dtype=np.float32)
    group_ids = np.array([t.group_id for t in samples], dtype=np.int32)
    advantages = advantage(rewards, group_ids)
    position = {g.group_id: i for i, g in enumerate(ordered)}
    chunk_of = [position[t.group_id] * config.mini_batches // len(ordered) for t in samples]
    updates = []
    for chunk in range(config.mini_batches):
        chosen = [i for i, c in enumerate(chunk_of) if c == chunk]
        updates.append(_split(chosen, samples, advantages, config, version))
    return [[update[rank] for update in updates] * config.epochs for rank in range(config.num_ranks)]


def _split(
    chosen: Sequence[int], samples: Sequence[Trajectory], advantages: FloatArray, config: BatchingConfig, version: int
) -> list[TrainBatch]:
    """One update's samples over the ranks: the longest unit first to the rank with the fewest tokens.

    Units are whole groups, so that a rank computes a shared prompt once, or single samples where there are fewer groups than ranks.
    """
    lengths = {i: len(samples[i].prompt.token_ids) + len(samples[i].completion.token_ids) for i in chosen}
    units = [list(members) for _, members in groupby(chosen, key=lambda i: samples[i].group_id)]
    if len(units) < config.num_ranks:
        units = [[i] for i in chosen]
    shares: list[list[int]] = [[] for _ in range(config.num_ranks)]
    loads = [0] * config.num_ranks
    for unit in sorted(units, key=lambda members: (-sum(lengths[i] for i in members), members[0])):
        rank = min(range(config.num_ranks), key=lambda r: (loads[r], r))
        shares[rank] += unit
        loads[rank] += sum(lengths[i] for i in unit)
    shares = [sorted(share) for share in shares]
    response_lengths = [len(samples[i].completion.token_ids) for i in chosen]
    totals = (sum(response_lengths), sum(1 for n in response_lengths if n))
    return [_pack([samples[i] for i in share], advantages[share], config.temperature, totals, version) for share in shares]


def _pack(samples: Sequence[Trajectory], advantages: FloatArray, temperature: float, totals: tuple[int, int], version: int) -> TrainBatch:
    lengths = np.array([len(t.prompt.token_ids) + len(t.completion.token_ids) for t in samples], dtype=np.int32)
    responses = np.array([len(t.completion.token_ids) for t in samples], dtype=np.int32)
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    mask = np.zeros(total, dtype=np.float32)
    for end, response in zip(ends.tolist(), responses.tolist(), strict=True):
        mask[end - response : end] = 1.0
    drawn = mask > 0
    behaviour = np.zeros(total, dtype=np.float32)
    behaviour[drawn] = np.fromiter((x for t in samples for x in t.completion.logprobs), dtype=np.float32, count=int(responses.sum()))
    spread = np.zeros(total, dtype=np.float32)
    spread[drawn] = np.repeat(advantages.astype(np.float32), responses)
    tokens = np.fromiter(
        (x for t in samples for part in (t.prompt.token_ids, t.completion.token_ids) for x in part), dtype=np.int32, count=total
    )
    return TrainBatch(
        token_ids=tokens,
        lengths=lengths,
        response_mask=mask,
        behaviour_logprobs=behaviour,
        advantages=spread,
        temperature=temperature,
        global_tokens=totals[0],
        global_sequences=totals[1],
        version=version,
    )
