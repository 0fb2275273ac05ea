"""Scripted engines, reward workers and trainer ranks that answer at once."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.driver.wire import ELSEWHERE, Shared, Worker, send
from rljob_runtime.packed import CompletionBatch, RewardBatch, pack
from rljob_runtime.records import Completion, GenerationRequest, Prompt, RewardResult, Segment, VersionSpan

POOL_TOKENS = 1 << 20
FIRST_TOKEN, LAST_TOKEN = 3, 380
"""Ids of ordinary tokens of the tiny tokenizer."""
TOKENS = np.random.default_rng(0).integers(FIRST_TOKEN, LAST_TOKEN, POOL_TOKENS, dtype=np.int32)
LOGPROBS = -np.random.default_rng(1).random(POOL_TOKENS, dtype=np.float32)
"""Responses are pieces of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a case asks of the driver."""

    prompts: int
    samples: int
    tokens: int
    """Of a response on average; lengths are even between half and one and a half of it."""
    prompt_tokens: int = 256
    engines: int = 64
    slots: int = 256
    trainer_ranks: int = 16
    tensor_parallel: int = 2
    reward_workers: int = 8
    ratio: float = 0.0
    """``overlap.asyncGenerationRatio``."""
    steps: int = 3
    """After one that is not counted."""

    @property
    def tokens_per_step(self) -> int:
        """Sampled tokens of one step, on average."""
        return self.prompts * self.samples * self.tokens


def length_of(request_id: str, mean: int) -> int:
    """Length of a response: a function of its group and sample."""
    key = request_id.split("+")[0].encode()
    return max(mean // 2 + zlib.crc32(key) % (mean + 1), 1)


class Engine(Worker):
    """Ends what it was given, a few responses per call."""

    batch = 8
    """Responses of one answer at most."""

    def __init__(self, index: int, mean_tokens: int) -> None:
        """An engine that serves version 0."""
        super().__init__(f"engine-{index}")
        self._mean_tokens = mean_tokens
        self._waiting: deque[str] = deque()
        self._wake = asyncio.Event()
        self._version = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._waiting.extend(request.request_id for request in requests)
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing is aborted in these cases."""
        raise AssertionError(f"abort of {request_ids}")

    async def collect(self, max_wait_s: float) -> Any:
        """Up to ``batch`` responses; waits for requests."""
        if not self._waiting:
            self._wake.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._wake.wait()
            except TimeoutError:
                return self._answer([])
        with ELSEWHERE:
            ids = [self._waiting.popleft() for _ in range(min(self.batch, len(self._waiting)))]
            return self._answer(ids)

    def _answer(self, request_ids: Sequence[str]) -> CompletionBatch:
        return pack([self._completion(request_id) for request_id in request_ids])

    def _completion(self, request_id: str) -> Completion:
        count = length_of(request_id, self._mean_tokens)
        start = zlib.crc32(request_id.encode()) % (POOL_TOKENS - count)
        segment = Segment(
            token_ids=TOKENS[start : start + count],
            sampled=True,
            logprobs=LOGPROBS[start : start + count],
            version_spans=(VersionSpan(start=0, end=count, version=self._version),),
        )
        return Completion(request_id=request_id, segment=segment, finish_reason="stop")

    def prepare_receiver(self, receiver: str, settings: Any) -> None:
        """It takes whatever comes."""

    def stats(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def update(self, manifest: Any, version: int, timeout_s: float, on_running: str, *parts: Any) -> int:
        """Serve new weights."""
        self._version = version
        return version


class RewardWorker(Worker):
    """Scores by the sample's name."""

    def score(self, batch: RewardBatch) -> list[RewardResult]:
        """One result for each."""
        with ELSEWHERE:
            scores = [float(zlib.crc32(name.encode()) % 2) for name in batch.sample_ids]
            return [
                RewardResult(sample_id=name, score=score, parts={"task": score}, passed=score > 0)
                for name, score in zip(batch.sample_ids, scores, strict=True)
            ]


class TrainerRank(Worker):
    """Takes batches and reads nothing of them."""

    def share(self, value: Any) -> Shared:
        """Sent once; from then on in Ray's store, which is no memory of the driver's."""
        send(value)
        return Shared(None)

    def train_step(self, batches: Sequence[Any], step: int) -> dict[str, float]:
        """Nothing is trained."""
        return {"train/total_loss": 0.0}

    def prepare_sender(self, sender: str, manifest: Any, settings: Any) -> None:
        """Nothing to prepare."""

    def send_weights(self, version: int, part: int) -> np.ndarray:
        """A few bytes that stand for weights."""
        return np.zeros(64, dtype=np.uint8)


class Prompts:
    """Prompts 0, 1, 2, ..."""

    def __init__(self, tokens: int) -> None:
        """Each with so many tokens."""
        self._next = 0
        self._token_ids = np.arange(FIRST_TOKEN, FIRST_TOKEN + tokens, dtype=np.int32)

    def next(self, count: int) -> list[Prompt]:
        """The next ones."""
        first, self._next = self._next, self._next + count
        return [
            Prompt(index=i, text="a question", token_ids=self._token_ids.copy(), answer="1", source="scripted")
            for i in range(first, first + count)
        ]

    def state(self) -> dict[str, object]:
        """Its position."""
        return {"next": self._next}
