"""What every engine refuses of a request before it queues it, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljob_api.v1alpha1.learning import MAX_TOP_K
from rljob_runtime.errors import DataError
from rljob_runtime.records import GenerationRequest, IntArray, Sampling

MIN_TEMPERATURE = 0.01
"""Engines silently change positive temperatures near 0 (vLLM raises them, SGLang becomes greedy), so they are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What an engine serves."""

    max_model_len: int
    vocab_size: int
    finds_texts: bool
    returns_routes: bool = False

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Look at each prompt and each sampling setting once, however many requests share it.

        Raises:
            DataError: names the first request that cannot be served.
        """
        for request in {id(request.prompt_token_ids): request for request in requests}.values():
            where, prompt = f"request {request.request_id}", request.prompt_token_ids
            if not 1 <= len(prompt) < self.max_model_len:
                most = self.max_model_len - 1
                raise DataError(f"{where}: the prompt has {len(prompt)} tokens; 1 to {most} fit (max_model_len - 1)")
            self._check_tokens(where, prompt)
        for request in {id(request.sampling): request for request in requests}.values():
            self._check_sampling(f"request {request.request_id}", request.sampling)

    def check_scored(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """Refuse sequences that cannot be scored.

        Raises:
            DataError: one is too short or too long, or has a token that the model does not know.
        """
        longest = self.max_model_len - 1
        for sequence in sequences:
            if not 2 <= len(sequence) <= longest:
                raise DataError(f"score: a sequence has {len(sequence)} tokens; 2 to {longest} can be scored (max_model_len - 1)")
            self._check_tokens("score", sequence)

    def _check_sampling(self, where: str, sampling: Sampling) -> None:
        """Refuse settings that engines do not have, or silently change."""
        if sampling.max_tokens < 1 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
            raise DataError(f"{where}: {sampling} is out of range; max_tokens >= 1, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1")
        if sampling.returns_mask and not 1 <= sampling.top_k <= MAX_TOP_K:
            raise DataError(f"{where}: top_k is {sampling.top_k}; a sampling mask needs 1 to {MAX_TOP_K}")
        if sampling.returns_routes and not self.returns_routes:
            raise DataError(f"{where}: asks for routes, and the engine was started without returns_routes")
        if sampling.stop_strings and not self.finds_texts:
            raise DataError(f"{where}: the engine was started without a tokenizer for stop strings {list(sampling.stop_strings)}")
        if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature <= 2:
            raise DataError(f"{where}: temperature {sampling.temperature} is out of range; 0 (greedy) or {MIN_TEMPERATURE} to 2")

    def _check_tokens(self, where: str, token_ids: Sequence[int] | IntArray) -> None:
        """Refuse tokens the model has no embedding for."""
        least, most = int(np.min(token_ids)), int(np.max(token_ids))
        if least < 0 or most >= self.vocab_size:
            raise DataError(
                f"{where}: token ids go from {least} to {most}, the model knows 0 to {self.vocab_size - 1}; "
                "tokenizer and model do not belong together"
            )
