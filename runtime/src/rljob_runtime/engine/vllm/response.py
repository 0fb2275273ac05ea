"""A response in progress in vLLM: what its core has sampled of it, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.v1.engine import EngineCoreOutput

from rljob_runtime.engine.stop_strings import StopFinder
from rljob_runtime.engine.vllm.sampling import NO_IDS, possible_tokens
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.records import Completion, GenerationRequest, IntArray, Segment, VersionSpan
from rljob_runtime.routes import RouteArray
from rljob_runtime.sampling_mask import SamplingMask


@dataclass(slots=True)
class Response:
    """A response in progress."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masked: bool = False
    mask_ids: list[IntArray] = field(default_factory=list)
    """Ids that could have been sampled, of each token; none where the set was wider than what vLLM was asked for."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version) of each stretch of one version."""
    finder: StopFinder | None = None
    """Where stop strings end it."""
    routed_from: int | None = None
    """Where its request asks for routes: the token, the prompt's included, whose route is the first of them."""
    prompt_tokens: int = 0
    routes: list[RouteArray] = field(default_factory=list)
    """Shape (n, L, K) each, of ``num_routed`` tokens from there on, one after another."""
    num_routed: int = 0

    @classmethod
    def of(cls, request: GenerationRequest, finder: StopFinder | None) -> Response:
        """The response to a request, still without tokens."""
        sampling = request.sampling
        return cls(
            masked=sampling.returns_mask,
            finder=finder,
            routed_from=request.num_routed_before if sampling.returns_routes else None,
            prompt_tokens=request.prompt_token_ids.size,
        )

    def take(self, output: EngineCoreOutput, version: int, vocab_size: int) -> bool:
        """Take new tokens, at least one; whether they complete a stop string. What comes behind it is left out."""
        new: list[int] = output.new_token_ids
        stopped = False
        if self.finder is not None:
            end = next((index for index, token_id in enumerate(new, start=1) if self.finder.completes(token_id)), None)
            new, stopped = new[:end], end is not None
        kept = len(new)
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((len(self.token_ids), version))
        self.token_ids += new
        self.logprobs += output.new_logprobs.logprobs[:kept, 0].tolist()
        if self.masked:
            self.mask_ids += possible_tokens(output.new_logprobs, vocab_size)[:kept]
        return stopped

    def take_routes(self, routes: RouteArray, place: int | None = None) -> None:
        """Take what was chosen for tokens from ``place`` on; None: from the first that is not known.

        What is known stays: tokens that a preemption or an update has computed once more were sampled with the first routes.
        """
        if self.routed_from is None:
            return
        known = 0 if place is None else self.routed_from + self.num_routed - place
        if known < 0:
            raise RuntimeFault(f"vLLM computed tokens from place {place} on, and routes of {-known} before that are missing; see its log")
        if new := max(len(routes) - known, 0):
            self.routes.append(routes[known:])
            self.num_routed += new

    def completion(self, request_id: str, finish_reason: str) -> Completion:
        """The response as a completion."""
        ends = [start for start, _ in self.spans[1:]] + [len(self.token_ids)] * bool(self.spans)  # no tokens: no span
        spans = tuple(VersionSpan(start=start, end=end, version=version) for (start, version), end in zip(self.spans, ends, strict=True))
        segment = Segment(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            sampled=True,
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=spans,
            sampling_mask=self._mask(),
            routes=self._routes(),
        )
        return Completion(request_id=request_id, segment=segment, finish_reason=finish_reason)

    def whole(self) -> Response:
        """A copy without tokens that lack their log-prob or their mask."""
        length = min(len(self.token_ids), len(self.logprobs), len(self.mask_ids) if self.masked else len(self.token_ids))
        routes = tuple(self.routes)
        if self.routed_from is not None:
            length = max(0, min(length, self.routed_from + sum(map(len, routes)) + 1 - self.prompt_tokens))
        return Response(
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            masked=self.masked,
            mask_ids=self.mask_ids[:length],
            spans=[(start, version) for start, version in self.spans if start < length],
            routed_from=self.routed_from,
            prompt_tokens=self.prompt_tokens,
            routes=list(routes),
        )

    def _routes(self) -> RouteArray | None:
        """Of all tokens before the last; None where they were not asked for, or there is no token."""
        if self.routed_from is None or not self.token_ids:
            return None
        wanted = self.prompt_tokens + len(self.token_ids) - 1 - self.routed_from
        return np.concatenate(self.routes)[:wanted]

    def _mask(self) -> SamplingMask | None:
        if not self.masked:
            return None
        counts = np.array([ids.size for ids in self.mask_ids], dtype=np.int32)
        return SamplingMask(token_ids=np.concatenate([NO_IDS, *self.mask_ids]), counts=counts)
