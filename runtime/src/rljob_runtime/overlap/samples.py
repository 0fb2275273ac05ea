"""One response in the making: what engines have sampled of it so far, whichever engines these were."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.overlap.routing import GroupAffinity
from rljob_runtime.records import (
    Completion,
    EpisodeRecord,
    GenerationRequest,
    Prompt,
    RewardResult,
    Sampling,
    Segment,
    Trajectory,
    VersionSpan,
)
from rljob_runtime.routes import joined as joined_routes
from rljob_runtime.sampling_mask import joined

ABORTED = "abort"


class PrefixCache:
    """What an engine has cached under one set of weights; nothing but an identity: each set of weights has another one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Response:
    """A whole response, or a whole episode: all that is known before its group is complete."""

    prompt: Prompt
    segments: tuple[Segment, ...]
    finish_reason: str
    reward: RewardResult | None = None
    """Where its environment gave it; None: reward functions are to be asked."""
    episode: EpisodeRecord | None = None
    generation_s: float = 0.0
    """See :class:`~rljob_runtime.records.Trajectory`."""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum(len(segment) for segment in self.segments if segment.sampled)

    def scored(self, group_id: int, sample_index: int, reward: RewardResult) -> Trajectory:
        """With its score, as it is trained and shown."""
        return Trajectory(
            group_id=group_id,
            sample_index=sample_index,
            prompt=self.prompt,
            segments=self.segments,
            finish_reason=self.finish_reason,
            reward=reward,
            episode=self.episode,
            generation_s=self.generation_s,
        )


class Owner(Protocol):
    """Who has responses generated."""

    @property
    def priority(self) -> int:
        """Requests of a lower one are handed out first."""

    def request_of(self, sample: Sample) -> GenerationRequest:
        """What to ask for the next part of a sample."""

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        """Take responses that have ended, in the order of their end; must not wait."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """A response of one prompt; goes on with its tokens on another engine when the first one lets go of it (partial rollout)."""

    owner: Owner
    group_id: int
    index: int
    """Within the group."""
    prompt: Prompt
    prefix: str = ""
    """Prefix of its key: the key space of an owner other than training."""
    suffix: str = ""
    """Of its key: which turn of an episode it is."""
    sampled_before: int = 0
    """Tokens that the episode has sampled in earlier turns."""
    affinity: GroupAffinity = field(default_factory=GroupAffinity)
    """The same object in all samples that should stay together."""
    parts: tuple[Segment, ...] = ()
    """What engines have sampled of it so far, one after another."""
    num_sampled: int = 0
    """Tokens of these."""
    masked: bool = False
    """Whether engines were asked for sampling masks."""
    routed: bool = False
    """Whether engines were asked for routes."""
    num_routed: int = 0
    """The routes of the first so many tokens, the prompt's included, are known."""
    attempts: int = 0
    engine: int | None = None
    """Engine that was given it last."""
    cache: PrefixCache | None = None
    """What that engine then had cached: as long as it is the engine's, ..."""
    held_tokens: int = 0
    """... so many tokens at the beginning are cached there."""
    request_id: str = ""
    """Of the last request, at that engine."""
    begun_s: float = 0.0
    """When an engine was given it first."""

    @property
    def key(self) -> str:
        """Unique within a run."""
        return f"{self.prefix}{self.group_id}/{self.index}{self.suffix}"

    def request(self, sampling: Sampling, job_seed: int) -> GenerationRequest:
        """What to ask the next engine: the prompt and all that was sampled, and as many tokens as are left.

        Each attempt samples with a seed of its own: with the first one's the same random numbers would meet other positions.
        """
        self.request_id = f"{self.key}+{self.attempts}" if self.attempts else self.key
        self.attempts += 1
        self.masked, self.routed = sampling.returns_mask, sampling.returns_routes
        return GenerationRequest(
            request_id=self.request_id,
            prompt_token_ids=np.concatenate([self.prompt.token_ids, *(part.token_ids for part in self.parts)])
            if self.num_sampled
            else self.prompt.token_ids,  # the same array for all samples of a group: one message carries it once
            sampling=replace(sampling, max_tokens=sampling.max_tokens - self.num_sampled) if self.num_sampled else sampling,
            seed=sample_seed(job_seed, self.prompt.index, self.index, self.sampled_before + self.num_sampled),
            num_sampled_before=self.num_sampled,
            num_routed_before=self.num_routed if self.routed else 0,
        )

    def response(self, completion: Completion, now_s: float) -> Response:
        """The whole response, which ended now, where it is all there is."""
        return Response(
            prompt=self.prompt,
            segments=(completion.segment,),
            finish_reason=completion.finish_reason,
            generation_s=now_s - self.begun_s,
        )

    def take(self, part: Completion) -> Completion | None:
        """Add what an engine returned; the whole response once it has ended, None while it is to go on.

        Raises:
            RuntimeFault: the engine left out the sampling mask, without which the trainer's log-probs would be of another distribution; or
                routes, so that others would be at the wrong tokens.
        """
        if self.masked and part.segment.sampling_mask is None:
            raise RuntimeFault(
                f"the engine returned response {part.request_id} without its sampling mask, which rollout.topP, topK and minP need; "
                "use an engine that returns it, or remove these fields"
            )
        self.parts += (part.segment,)
        self.num_sampled += len(part.segment)
        if self.routed and len(part.segment):
            self._take_routes(part)
        self.held_tokens = len(self.prompt.token_ids) + self.num_sampled if len(part.segment) else 0  # no token: it was never computed
        if part.finish_reason == ABORTED:
            return None
        if self.attempts == len(self.parts) == len(part.segment.version_spans) == 1:  # all in one, as nearly all responses are
            return part
        return Completion(request_id=self.key, segment=_joined(self.parts), finish_reason=part.finish_reason)

    def _take_routes(self, part: Completion) -> None:
        """Count the routes of a part, which lead from those that were known to the token before its last."""
        found = 0 if part.segment.routes is None else len(part.segment.routes)
        wanted = len(self.prompt.token_ids) + self.num_sampled - 1 - self.num_routed
        if found != wanted:
            raise RuntimeFault(
                f"the engine returned response {part.request_id} with routes of {found} tokens, and {wanted} are missing, "
                "which training.routerReplay needs; use an engine that returns them, or write Disabled"
            )
        self.num_routed += found


def sample_seed(job_seed: int, prompt_index: int, sample: int, num_sampled: int = 0) -> int:
    """Seed of one response after ``num_sampled`` tokens: a function of job, prompt and sample, so that a resumed run samples the same."""
    name = f"{job_seed}/{prompt_index}/{sample}" + (f"/{num_sampled}" if num_sampled else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def first_tokens(segment: Segment, count: int) -> Segment:
    """The first ``count`` tokens of a sampled segment, at least one; whether those behind them were sampled changes nothing about them."""
    if count == len(segment):
        return segment
    mask, routes = segment.sampling_mask, segment.routes
    return replace(
        segment,
        token_ids=segment.token_ids[:count],
        logprobs=segment.logprobs[:count],
        version_spans=tuple(replace(span, end=min(span.end, count)) for span in segment.version_spans if span.start < count),
        sampling_mask=None if mask is None else mask.take(np.arange(count)),
        routes=None if routes is None else routes[: len(routes) - (len(segment) - count)],
    )


def _joined(parts: tuple[Segment, ...]) -> Segment:
    """Parts of one response as one segment; neighboring spans of one version become one."""
    if len(parts) == 1 and len(parts[0].version_spans) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.version_spans:
            moved = VersionSpan(start=span.start + offset, end=span.end + offset, version=span.version)
            if spans and spans[-1].version == moved.version:
                moved = replace(spans.pop(), end=moved.end)
            spans.append(moved)
        offset += len(part)
    if len(parts) == 1:
        return parts[0] if len(spans) == len(parts[0].version_spans) else replace(parts[0], version_spans=tuple(spans))
    masks = [part.sampling_mask for part in parts if part.sampling_mask is not None]
    return Segment(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        sampled=True,
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_spans=tuple(spans),
        sampling_mask=joined(masks) if masks else None,
        routes=joined_routes([part.routes for part in parts if part.routes is not None]),
    )
