"""Sampling settings in SGLang's form, and a response in progress from the pieces that its server streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljob_runtime.engine.stop_strings import StopFinder
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.records import Completion, GenerationRequest, Sampling, Segment, VersionSpan
from rljob_runtime.sampling_mask import SamplingMask

STREAM_INTERVAL = 16
"""Tokens of one piece; a response with stop strings comes token by token, so that little is sampled behind one."""
SEED_RANGE = 2**63


def truncates(sampling: Sampling) -> bool:
    """Whether tokens are left out of what is sampled from."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def generate_body(request: GenerationRequest, name: str, *, extra_eos: int | None, vocab_size: int, max_model_len: int) -> dict[str, Any]:
    """Body of ``/generate``.

    SGLang's plain log-probs are those after temperature but before top-k, top-p and min-p; those of the distribution that is sampled from
    come with the sampling mask, which it gives where top-k is finite.
    """
    sampling = request.sampling
    stops = sampling.stop_token_ids if extra_eos is None else (*sampling.stop_token_ids, extra_eos)
    params: dict[str, Any] = {
        "max_new_tokens": min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": sorted(set(stops)),
        "sampling_seed": request.seed % SEED_RANGE,
        "stream_interval": 1 if sampling.stop_strings else STREAM_INTERVAL,
    }
    if truncates(sampling):
        params["top_k"] = min(sampling.top_k or vocab_size, vocab_size)
    return {
        "rid": name,
        "input_ids": request.prompt_token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "return_sampling_mask": truncates(sampling),
    }


def group_body(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Body of ``/generate`` for several requests: a list per field. One stream brings the pieces of all responses, each with its name.

    Args:
        bodies: of :func:`generate_body`.
    """
    return {name: [body[name] for body in bodies] for name in bodies[0]}


@dataclass(slots=True)
class Response:
    """A response in progress."""

    sampling: Sampling
    finder: StopFinder | None
    """Where stop strings end it."""
    begun_at: int
    """Version that was served when it began."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask_ids: list[list[int]] = field(default_factory=list)
    received: int = 0
    """Tokens that the server has sent."""
    stopped: bool = False
    """Whether a stop string is complete; what comes behind it is left out."""
    spans: tuple[VersionSpan, ...] = ()
    """Known when the server has ended it."""

    def take(self, piece: Mapping[str, Any]) -> int:
        """Take one piece; how many tokens it brought.

        The last piece of a request that was aborted in the server's queue says nothing of the prompt, and repeats its last token with the
        log-probs of all. The server may have joined it with a piece not sent before: tokens beyond ``completion_tokens`` are repeated.
        """
        meta = piece["meta_info"]
        new: list[int] = piece["output_ids"]
        if "prompt_tokens" not in meta:
            new = new[: meta["completion_tokens"] - self.received]
        self.received += len(new)
        masked = truncates(self.sampling)
        logprobs: list[float] = []
        masks: list[list[int]] = [[]] * len(new)
        if new and masked:
            logprobs, masks = meta["output_token_sampling_logprobs"], meta["output_token_sampling_mask"]
        elif new:
            logprobs = [row[0] for row in meta["output_token_logprobs"]]
        if "prompt_tokens" not in meta:
            logprobs, masks = logprobs[: len(new)], masks[: len(new)]
        if not len(new) == len(logprobs) == len(masks):
            raise RuntimeFault(f"SGLang returned {len(new)} tokens, {len(logprobs)} log-probs and {len(masks)} sampling masks of one piece")
        for token_id, logprob, mask in zip(new, logprobs, masks, strict=True):
            if self.stopped:
                break
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.mask_ids.append(mask)
            self.stopped = self.finder is not None and self.finder.completes(token_id)
        if meta["finish_reason"] is not None:
            self.spans = self._cut(meta.get("weight_versions", []))
        return len(new)

    def completion(self, request_id: str, finish_reason: str) -> Completion:
        """The response, which the server has ended."""
        if self.token_ids and (not self.spans or self.spans[-1].end != len(self.token_ids)):
            raise RuntimeFault(f"SGLang gave no weight versions for the {len(self.token_ids)} tokens of request {request_id}: {self.spans}")
        segment = Segment(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            sampled=True,
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=self.spans,
            sampling_mask=self._mask() if self.sampling.returns_mask else None,
        )
        return Completion(request_id=request_id, segment=segment, finish_reason=finish_reason)

    def salvaged(self, request_id: str, version: int) -> Completion:
        """What is known of it although the server never ended it: nothing where weights changed, as its tokens' versions are not known."""
        known = self if self.begun_at == version else Response(sampling=self.sampling, finder=None, begun_at=version)
        known.spans = (VersionSpan(start=0, end=len(known.token_ids), version=version),) if known.token_ids else ()
        return known.completion(request_id, "abort")

    def _cut(self, spans: list[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
        """Those of the tokens that are kept."""
        end = len(self.token_ids)
        return tuple(
            VersionSpan(start=span["start"], end=min(span["end"], end), version=int(span["version"]))
            for span in spans
            if span["start"] < end
        )

    def _mask(self) -> SamplingMask:
        counts = np.array([len(ids) for ids in self.mask_ids], dtype=np.int32)
        return SamplingMask(token_ids=np.array([one for ids in self.mask_ids for one in ids], dtype=np.int32), counts=counts)
