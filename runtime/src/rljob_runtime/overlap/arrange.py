"""One step's samples as flat arrays, in an order of their own: what the learning rule and the batches are made from.

Deterministic: the same groups give the same arrays, whatever order they arrived in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.records import FloatArray, IntArray, Trajectory
from rljob_runtime.sampling_mask import SamplingMask, spread

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """All samples of a step: T tokens (prompt, then response of every sample), S samples.

    Samples of one group stand together; groups are ordered by id, samples by index. Forward passes fill the last three in.
    """

    trajectories: tuple[Trajectory, ...]
    token_ids: IntArray
    """Shape (T,)."""
    lengths: IntArray
    """Shape (S,): prompt plus response tokens; sums to T."""
    response_lengths: IntArray
    """Shape (S,): sampled tokens."""
    response_mask: FloatArray
    """Shape (T,): 1 where a token was sampled, else 0."""
    behaviour_logprobs: FloatArray
    """Shape (T,): from the engine; 0 where the mask is 0."""
    staleness: FloatArray
    """Shape (T,): by how many weight versions a sampled token is older than the trainer; 0 where the mask is 0."""
    group_ids: IntArray
    """Shape (S,)."""
    scores: FloatArray
    """Shape (S,): raw scores."""
    passed: BoolArray
    """Shape (S,): whether the response counts as solved."""
    truncated: BoolArray
    """Shape (S,): whether the response was cut at the token limit."""
    sources: tuple[str, ...]
    """Length S: name of each sample's data source."""
    version: int
    """Weights version the trainer holds."""
    sampling_mask: SamplingMask | None = None
    """Of T positions, where sampling left tokens out."""
    reference_logprobs: FloatArray | None = None
    """Shape (T,), of the frozen reference."""
    proximal_logprobs: FloatArray | None = None
    """Shape (T,), of the trainer at the beginning of the step."""
    values: FloatArray | None = None
    """Shape (T,), of the critic before each token is sampled, at the beginning of the step."""

    def places(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Where the tokens of these samples stand in (T,) arrays, sample after sample, shape (t,)."""
        lengths = self.lengths[samples].astype(np.int64)
        starts = np.cumsum(self.lengths, dtype=np.int64)[samples] - lengths
        return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))


def arrange(groups: Sequence[Group], version: int) -> StepSamples:
    """Order samples and write them into arrays.

    Args:
        groups: the groups of this step.
        version: weights version the trainer holds.

    Raises:
        ValueError: some responses have a sampling mask and some have none, or it is not as long as the response.
    """
    ordered = sorted(groups, key=lambda g: g.group_id)
    samples = tuple(t for g in ordered for t in sorted(g.trajectories, key=lambda t: t.sample_index))
    lengths = np.array([len(t.prompt.token_ids) + len(t.completion.token_ids) for t in samples], dtype=np.int32)
    responses = np.array([len(t.completion.token_ids) for t in samples], dtype=np.int32)
    total, sampled_total = int(lengths.sum()), int(responses.sum())
    mask, behaviour, staleness = np.zeros((3, total), dtype=np.float32)
    for sample, end, response in zip(samples, np.cumsum(lengths).tolist(), responses.tolist(), strict=True):
        start = end - response
        mask[start:end] = 1.0
        for span in sample.completion.version_spans:
            staleness[start + span.start : start + span.end] = version - span.version
    behaviour[mask > 0] = np.fromiter((x for t in samples for x in t.completion.logprobs), dtype=np.float32, count=sampled_total)
    masks = [t.completion.sampling_mask for t in samples if t.completion.sampling_mask is not None]
    if masks and len(masks) != len(samples):
        raise ValueError(f"{len(masks)} of {len(samples)} responses have a sampling mask; all must, or none")
    tokens = (x for t in samples for part in (t.prompt.token_ids, t.completion.token_ids) for x in part)
    return StepSamples(
        trajectories=samples,
        token_ids=np.fromiter(tokens, dtype=np.int32, count=total),
        lengths=lengths,
        response_lengths=responses,
        response_mask=mask,
        behaviour_logprobs=behaviour,
        staleness=staleness,
        group_ids=np.array([t.group_id for t in samples], dtype=np.int32),
        scores=np.array([t.reward.score for t in samples], dtype=np.float32),
        passed=np.array([t.reward.passed for t in samples], dtype=np.bool_),
        truncated=np.array([t.completion.finish_reason == "length" for t in samples], dtype=np.bool_),
        sources=tuple(t.prompt.source for t in samples),
        version=version,
        sampling_mask=spread(masks, mask > 0) if masks else None,
    )
