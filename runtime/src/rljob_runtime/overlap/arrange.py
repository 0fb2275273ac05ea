"""One step's samples as flat arrays, in an order of their own: what the learning rule and the batches are made from.

Deterministic: the same groups give the same arrays, whatever order they arrived in.

This runs in a thread beside the event loop. It writes and copies run by run: that costs Python a microsecond for a segment, not for a
token. numpy's calls that hold the interpreter's lock over a whole array (``repeat``, ``cumsum``, ``count_nonzero``) would stop the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.packed import NO_TOKENS
from rljob_runtime.records import FloatArray, IntArray, Segment, Trajectory
from rljob_runtime.routes import NO_ROUTE, RouteArray, place
from rljob_runtime.sampling_mask import SamplingMask, spread

BoolArray = npt.NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """All samples of a step: T tokens, S samples, Q sequences (a prompt, then what follows it), S or more.

    A sample is one sequence; an episode whose turns have prompts of their own is one for each turn, in order. Samples of one group stand
    together; groups are ordered by id, samples by index. Forward passes fill the last four in.
    """

    trajectories: tuple[Trajectory, ...]
    token_ids: IntArray
    """Shape (T,)."""
    lengths: IntArray
    """Shape (Q,): tokens of prompt and all segments; sums to T."""
    prompt_lengths: IntArray
    """Shape (Q,): tokens before the first segment."""
    sample_of: IntArray
    """Shape (Q,): which of the S samples, ascending."""
    response_lengths: IntArray
    """Shape (S,): sampled tokens."""
    response_mask: FloatArray
    """Shape (T,): 1 where a token was sampled, else 0."""
    behavior_logprobs: FloatArray
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
    routes: RouteArray | None = None
    """Shape (T, L, K), where engines returned routes; ``NO_ROUTE`` at tokens without."""
    reference_logprobs: FloatArray | None = None
    """Shape (T,), of the frozen reference."""
    teacher_logprobs: FloatArray | None = None
    """Shape (T,), of the teacher that the policy is to become like."""
    proximal_logprobs: FloatArray | None = None
    """Shape (T,), of the trainer at the beginning of the step."""
    values: FloatArray | None = None
    """Shape (T,), of the critic before each token is sampled, at the beginning of the step."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Length S: what says which rewards and teachers are each sample's."""
        return tuple(trajectory.prompt.tag for trajectory in self.trajectories)

    @property
    def groups_of_sequences(self) -> IntArray:
        """Shape (Q,): the group of each sequence."""
        return self.group_ids[self.sample_of]

    @property
    def prompts_of_sequences(self) -> IntArray:
        """Shape (Q,): equal where sequences have the same prompt, as the first ones of a group's samples do."""
        first = np.diff(self.sample_of, prepend=-1) != 0
        return np.where(first, self.groups_of_sequences, -1 - np.arange(first.size, dtype=np.int32))

    def rows(self, values: npt.NDArray[Number], sequences: npt.NDArray[np.integer]) -> npt.NDArray[Number]:
        """What a (T,) array has for the tokens of these sequences, one after another, shape (t,); copied run by run."""
        ends = self.ends[sequences].tolist()
        sizes = self.lengths[sequences].tolist()
        return np.concatenate([values[:0], *(values[end - size : end] for end, size in zip(ends, sizes, strict=True))])

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Shape (Q,): where the tokens of each sequence end in (T,) arrays."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def places(self, sequences: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Where the tokens of these sequences stand in (T,) arrays, one after another, shape (t,)."""
        lengths = self.lengths[sequences].astype(np.int64)
        starts = np.cumsum(self.lengths, dtype=np.int64)[sequences] - lengths
        return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))


def arrange(groups: Sequence[Group], version: int) -> StepSamples:
    """Order samples and write them into arrays.

    Args:
        groups: the groups of this step.
        version: weights version the trainer holds.

    Raises:
        ValueError: some sampled segments have a sampling mask and some have none, or one, log-probs or version spans are not as long as
            their segment.
    """
    ordered = sorted(groups, key=lambda g: g.group_id)
    samples = tuple(t for g in ordered for t in sorted(g.trajectories, key=lambda t: t.sample_index))
    sequences = [(index, *sequence) for index, t in enumerate(samples) for sequence in t.sequences]
    parts: list[IntArray] = [NO_TOKENS]
    for _, prompt, segments in sequences:
        parts.append(prompt)
        parts += [segment.token_ids for segment in segments]
    token_ids = np.concatenate(parts)
    mask, behavior, staleness = (np.zeros(token_ids.size, dtype=np.float32) for _ in range(3))
    masks: list[SamplingMask | None] = []
    lengths, sampled_of = [], [0] * len(samples)
    begin = 0
    for index, prompt, segments in sequences:
        first = begin
        begin += prompt.size
        for segment in segments:
            end = begin + segment.token_ids.size
            if segment.sampled:
                mask[begin:end] = 1.0
                behavior[begin:end] = segment.logprobs
                if not _is_of(segment, version):
                    _write_ages(staleness[begin:end], samples[index], segment, version)
                masks.append(segment.sampling_mask)
                sampled_of[index] += end - begin
            begin = end
        lengths.append(begin - first)
    return StepSamples(
        trajectories=samples,
        token_ids=token_ids,
        lengths=np.array(lengths, dtype=np.int32),
        prompt_lengths=np.array([prompt.size for _, prompt, _ in sequences], dtype=np.int32),
        sample_of=np.array([index for index, _, _ in sequences], dtype=np.int32),
        response_lengths=np.array(sampled_of, dtype=np.int32),
        response_mask=mask,
        behavior_logprobs=behavior,
        staleness=staleness,
        group_ids=np.array([t.group_id for t in samples], dtype=np.int32),
        scores=np.array([t.reward.score for t in samples], dtype=np.float32),
        passed=np.array([t.reward.passed for t in samples], dtype=np.bool_),
        truncated=np.array([t.finish_reason == "length" for t in samples], dtype=np.bool_),
        sources=tuple(t.prompt.source for t in samples),
        version=version,
        sampling_mask=_mask_of(masks, mask),
        routes=_routes_of([(prompt, segments) for _, prompt, segments in sequences], token_ids.size),
    )


def _is_of(segment: Segment, version: int) -> bool:
    """Whether all of a sampled segment is known to be of one version, as nearly all is in synchronous runs."""
    if len(segment.version_spans) != 1:
        return False
    span = segment.version_spans[0]
    return span.version == version and span.start == 0 and span.end == segment.token_ids.size


def _write_ages(ages: FloatArray, trajectory: Trajectory, segment: Segment, version: int) -> None:
    """Write by how many versions each token of a sampled segment is older than the trainer into ``ages``, shape (R,), of zeros.

    Raises:
        ValueError: the version spans are not one after another from the first token to the last.
    """
    end = 0
    for span in segment.version_spans:
        if span.start != end:
            break
        end = span.end
        if span.version != version:
            ages[span.start : end] = version - span.version
    if end != len(segment):
        raise ValueError(
            f"sample {trajectory.group_id}/{trajectory.sample_index}: a segment of {len(segment)} tokens has versions for other ones: "
            f"{segment.version_spans}"
        )


def _routes_of(sequences: Sequence[tuple[IntArray, tuple[Segment, ...]]], num_tokens: int) -> RouteArray | None:
    """The routes of all segments, at their places among all tokens; None where no segment has any.

    Raises:
        ValueError: some reach further back than their sequence, or are of another model.
    """
    found = [segment.routes for _, segments in sequences for segment in segments if segment.routes is not None]
    if not found:
        return None
    routes = np.full((num_tokens, *found[0].shape[1:]), NO_ROUTE, dtype=np.result_type(*{each.dtype for each in found}))
    begin = 0
    for prompt, segments in sequences:
        size = prompt.size + sum(map(len, segments))
        own, end = routes[begin : begin + size], prompt.size
        for segment in segments:
            end += len(segment)
            if segment.routes is not None and len(segment.routes):
                place(own, end, segment.routes)
        begin += size
    return routes


def _mask_of(masks: Sequence[SamplingMask | None], sampled: FloatArray) -> SamplingMask | None:
    """The sampling masks of all sampled segments, at their places among all tokens.

    Raises:
        ValueError: some have one and some have none, or one is not as long as its segment.
    """
    found = [mask for mask in masks if mask is not None]
    if found and len(found) != len(masks):
        raise ValueError(f"{len(found)} of {len(masks)} sampled segments have a sampling mask; all must, or none")
    return spread(found, sampled > 0) if found else None
