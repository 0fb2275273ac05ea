"""Many sequences as few flat arrays: what travels between engines, driver and reward workers.

A message costs by the number of its objects, not by its bytes: arrays are pickled out of band and read where they arrive, so that the
driver handles a response in microseconds, whatever its length. What is unpacked are views; a message stays in memory until the last of
its sequences is let go of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import (
    NO_LOGPROBS,
    Completion,
    FloatArray,
    GenerationRequest,
    IntArray,
    Prompt,
    Sampling,
    Segment,
    VersionSpan,
    pickled_by_values,
)
from rljob_runtime.routes import RouteArray, joined
from rljob_runtime.sampling_mask import SamplingMask

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)

_Value = TypeVar("_Value")


class RequestBatch(list[GenerationRequest]):
    """Requests for one engine; arrives as a list of them.

    What several have in common, by identity, travels once: the prompt of a group, the sampling settings of a job.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle columns: what 256 objects of their own cost is longer than an engine's step."""
        prompts, which_prompt = _distinct([request.prompt_token_ids for request in self])
        samplings, which_sampling = _distinct([request.sampling for request in self])
        return _requests, (
            tuple([request.request_id for request in self]),
            np.array([ids.size for ids in prompts], dtype=np.int64),
            np.concatenate([NO_TOKENS, *prompts], dtype=np.int32),
            which_prompt,
            samplings,
            which_sampling,
            tuple([request.seed for request in self]),
            tuple([(request.num_sampled_before, request.num_routed_before) for request in self]),
        )


def _distinct(values: Sequence[_Value]) -> tuple[tuple[_Value, ...], tuple[int, ...]]:
    """Values without those that are the same object as an earlier one; the place of each there."""
    places: dict[int, int] = {}
    found: list[_Value] = []
    which: list[int] = []
    for value in values:
        place = places.setdefault(id(value), len(found))
        if place == len(found):
            found.append(value)
        which.append(place)
    return tuple(found), tuple(which)


def _requests(
    request_ids: tuple[str, ...],
    lengths: npt.NDArray[np.int64],
    token_ids: IntArray,
    which_prompt: tuple[int, ...],
    samplings: tuple[Sampling, ...],
    which_sampling: tuple[int, ...],
    seeds: tuple[int, ...],
    before: tuple[tuple[int, int], ...],
) -> list[GenerationRequest]:
    """What a :class:`RequestBatch` is pickled as; prompts are views of ``token_ids``."""
    prompts = np.split(token_ids, np.cumsum(lengths[:-1])) if lengths.size else []
    columns = zip(request_ids, which_prompt, which_sampling, seeds, before, strict=True)
    return [
        GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompts[prompt],
            sampling=samplings[sampling],
            seed=seed,
            num_sampled_before=sampled,
            num_routed_before=routed,
        )
        for request_id, prompt, sampling, seed, (sampled, routed) in columns
    ]


@pickled_by_values
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompletionBatch:
    """What an engine returns at once: S completions of T tokens."""

    request_ids: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    lengths: IntArray
    """Shape (S,): sums to T."""
    token_ids: IntArray
    """Shape (T,)."""
    logprobs: FloatArray
    """Shape (T,)."""
    spans: tuple[tuple[tuple[int, int, int], ...], ...]
    """Length S: (start, end, version) of each stretch of one version."""
    masks: tuple[SamplingMask | None, ...] = ()
    """Length S where a completion has a sampling mask, else empty."""
    routes: RouteArray | None = None
    """Shape (sum of the counts, L, K), where a completion has routes."""
    route_counts: tuple[int, ...] = ()
    """Length S where a completion has routes, else empty: of how many tokens; -1 for one without."""


def pack(completions: Sequence[Completion]) -> CompletionBatch:
    """All completions as one message; tokens are copied."""
    segments = [completion.segment for completion in completions]
    masked = any(segment.sampling_mask is not None for segment in segments)
    routes = [segment.routes for segment in segments if segment.routes is not None]
    return CompletionBatch(
        request_ids=tuple(completion.request_id for completion in completions),
        finish_reasons=tuple(completion.finish_reason for completion in completions),
        lengths=np.array([len(segment) for segment in segments], dtype=np.int32),
        token_ids=np.concatenate([NO_TOKENS, *(segment.token_ids for segment in segments)], dtype=np.int32),
        logprobs=np.concatenate([NO_LOGPROBS, *(segment.logprobs for segment in segments)], dtype=np.float32),
        spans=tuple(tuple((span.start, span.end, span.version) for span in segment.version_spans) for segment in segments),
        masks=tuple(segment.sampling_mask for segment in segments) if masked else (),
        routes=joined(routes),
        route_counts=tuple(-1 if segment.routes is None else len(segment.routes) for segment in segments) if routes else (),
    )


def unpack(batch: CompletionBatch) -> list[Completion]:
    """The completions of a message, in its order; their arrays are views of it."""
    completions = []
    ends = np.cumsum(batch.lengths, dtype=np.int64).tolist()
    masks = batch.masks or (None,) * len(ends)
    columns = zip(batch.request_ids, batch.finish_reasons, ends, batch.spans, masks, _routes(batch), strict=True)
    start = 0
    for request_id, reason, end, spans, mask, routes in columns:
        segment = Segment(
            token_ids=batch.token_ids[start:end],
            sampled=True,
            logprobs=batch.logprobs[start:end],
            version_spans=tuple([VersionSpan(start=first, end=last, version=version) for first, last, version in spans]),
            sampling_mask=mask,
            routes=routes,
        )
        completions.append(Completion(request_id=request_id, segment=segment, finish_reason=reason))
        start = end
    return completions


def _routes(batch: CompletionBatch) -> list[RouteArray | None]:
    """Those of each completion, views."""
    if batch.routes is None:
        return [None] * len(batch.request_ids)
    found: list[RouteArray | None] = []
    start = 0
    for count in batch.route_counts:
        found.append(None if count < 0 else batch.routes[start : start + count])
        start += max(count, 0)
    return found


@pickled_by_values
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardBatch:
    """S responses of T tokens to score."""

    sample_ids: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    """Length S."""
    finish_reasons: tuple[str, ...]
    lengths: IntArray
    """Shape (S,): sums to T."""
    token_ids: IntArray
    """Shape (T,): of all segments of each."""

    def part(self, first: int, last: int) -> RewardBatch:
        """Responses ``[first, last)``; arrays are views."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:last].sum())
        return RewardBatch(
            sample_ids=self.sample_ids[first:last],
            prompts=self.prompts[first:last],
            finish_reasons=self.finish_reasons[first:last],
            lengths=self.lengths[first:last],
            token_ids=self.token_ids[begin:end],
        )

    def responses(self) -> list[IntArray]:
        """Token ids of each response, views."""
        return np.split(self.token_ids, np.cumsum(self.lengths[:-1])) if self.lengths.size else []


def reward_batch(
    sample_ids: Sequence[str], prompts: Sequence[Prompt], finish_reasons: Sequence[str], tokens: Sequence[IntArray]
) -> RewardBatch:
    """Responses to be scored as one message; ``tokens`` has the ids of each."""
    return RewardBatch(
        sample_ids=tuple(sample_ids),
        prompts=tuple(prompts),
        finish_reasons=tuple(finish_reasons),
        lengths=np.array([ids.size for ids in tokens], dtype=np.int32),
        token_ids=np.concatenate([NO_TOKENS, *tokens], dtype=np.int32),
    )
