"""One response in the making: what engines have sampled of it so far, whichever engines these were."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Protocol

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.overlap.routing import GroupAffinity
from rljob_runtime.records import Completion, GenerationRequest, Prompt, Sampling, VersionSpan
from rljob_runtime.sampling_mask import SamplingMask, joined

ABORTED = "abort"


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
    affinity: GroupAffinity = field(default_factory=GroupAffinity)
    """The same object in all samples that should stay together."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    masks: tuple[SamplingMask, ...] = ()
    masked: bool = False
    """Whether engines were asked for sampling masks."""
    attempts: int = 0
    engine: int | None = None
    """Engine that was given it last: its prefix may still be cached there."""
    request_id: str = ""
    """Of the last request, at that engine."""

    @property
    def key(self) -> str:
        """Unique within a run."""
        return f"{self.prefix}{self.group_id}/{self.index}"

    def request(self, sampling: Sampling, job_seed: int) -> GenerationRequest:
        """What to ask the next engine: the prompt and all that was sampled, and as many tokens as are left.

        Each attempt samples with a seed of its own: with the first one's the same random numbers would meet other positions.
        """
        self.request_id = f"{self.key}+{self.attempts}" if self.attempts else self.key
        self.attempts += 1
        self.masked = sampling.returns_mask
        return GenerationRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.token_ids + self.token_ids,
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self.token_ids)) if self.token_ids else sampling,
            seed=sample_seed(job_seed, self.prompt.index, self.index, len(self.token_ids)),
        )

    def take(self, part: Completion) -> Completion | None:
        """Add what an engine returned; the whole response once it has ended, None while it is to go on.

        Raises:
            RuntimeFault: the engine left out the sampling mask, without which the trainer's log-probs would be of another distribution.
        """
        if self.masked and part.sampling_mask is None:
            raise RuntimeFault(
                f"the engine returned response {part.request_id} without its sampling mask, which rollout.topP, topK and minP need; "
                "use an engine that returns it, or remove these fields"
            )
        offset = len(self.token_ids)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.masks += () if part.sampling_mask is None else (part.sampling_mask,)
        self.spans = _joined(self.spans, part.version_spans, offset)
        if part.finish_reason == ABORTED:
            return None
        return Completion(
            request_id=self.key,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            version_spans=self.spans,
            finish_reason=part.finish_reason,
            sampling_mask=joined(self.masks) if self.masks else None,
        )


def sample_seed(job_seed: int, prompt_index: int, sample: int, num_sampled: int = 0) -> int:
    """Seed of one response after ``num_sampled`` tokens: a function of job, prompt and sample, so that a resumed run samples the same."""
    name = f"{job_seed}/{prompt_index}/{sample}" + (f"/{num_sampled}" if num_sampled else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def _joined(spans: tuple[VersionSpan, ...], more: tuple[VersionSpan, ...], offset: int) -> tuple[VersionSpan, ...]:
    """Spans one after another, neighbours of one version as one."""
    joined = list(spans)
    for span in more:
        moved = VersionSpan(start=span.start + offset, end=span.end + offset, version=span.version)
        if joined and joined[-1].version == moved.version:
            moved = replace(joined.pop(), end=moved.end)
        joined.append(moved)
    return tuple(joined)
