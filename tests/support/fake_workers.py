"""Workers without threads or processes: every call is answered at once, in an order the test chooses."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljob_runtime.checkpoint_files import FileSum, damaged, sum_file
from rljob_runtime.errors import CallDeadlineError, EngineLostError, WorkerLostError
from rljob_runtime.packed import CompletionBatch, RewardBatch, pack
from rljob_runtime.records import Completion, GenerationRequest, IntArray, Prompt, RewardResult
from tests.support.records import make_completion, make_prompt, make_segment


class Answered:
    """A Pending whose value is known."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def result(self, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        return self._make()


class Unanswered:
    """A Pending of a process that is stopped: it ends with the deadline, or with the process."""

    def __init__(self, engine: "ServingEngine", method: str) -> None:
        self._engine, self._method, self._killed = engine, method, engine.killed

    async def result(self, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                await self._killed.wait()
        except TimeoutError:
            raise CallDeadlineError(self._engine.name, self._method, f"{timeout_s:g} s", self._engine.log_file) from None
        raise WorkerLostError(self._engine.name, "signal 9", self._engine.log_file)


class ScriptedEngine:
    """Finishes queued requests in a seeded random order, a few at a time; records what it was asked."""

    log_file = "engine.log"

    def __init__(
        self, name: str = "engine-0", seed: int = 0, tokens_of: Callable[[GenerationRequest], tuple[int, ...]] | None = None
    ) -> None:
        self.name = name
        self.version = 0
        self.seen: list[GenerationRequest] = []
        self.dead = False
        self.failed = False
        self.stalled = False
        self._queue: list[tuple[GenerationRequest, int]] = []
        self._aborted: list[GenerationRequest] = []
        self._random = random.Random(seed)
        self._tokens_of = tokens_of or (lambda request: (7, 8))

    def start(self, method: str, *args: Any) -> Answered:
        return Answered(lambda: getattr(self, method)(*args))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self.start(method, *args).result(timeout_s)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.seen += requests
        self._queue += [(r, self.version) for r in requests]

    def abort(self, request_ids: Sequence[str]) -> None:
        """A request that is aborted comes back without a token: ``DrawingEngine`` has some."""
        self._aborted += [r for r, _ in self._queue if r.request_id in request_ids]
        self._queue = [(r, v) for r, v in self._queue if r.request_id not in request_ids]

    def salvage(self) -> CompletionBatch:
        return pack([make_completion(r.request_id, (), version, "abort") for r, version in self._queue])

    def restart(self) -> None:
        """Another process takes its place."""
        self.dead = self.failed = self.stalled = False
        self.version, self._queue, self._aborted = 0, [], []

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": 0.0}

    def collect(self, max_wait_s: float) -> CompletionBatch:
        if self.dead:
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        if self.failed:
            raise EngineLostError(self.name, "its thread ended", self.log_file)
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            return pack([make_completion(r.request_id, (), self.version, "abort") for r in aborted])
        if self.stalled:
            return pack([])
        count = self._random.randint(1, 5)
        taken = [self._queue.pop(self._random.randrange(len(self._queue))) for _ in range(min(count, len(self._queue)))]
        return pack([make_completion(r.request_id, self._tokens_of(r), version) for r, version in taken])


PROMPT_TOKENS = 3
"""Of every prompt that ``make_prompt`` makes."""


class DrawingEngine(ScriptedEngine):
    """Samples token by token, each its own position in the response, so that a lost or repeated one shows; some requests a step."""

    def __init__(self, name: str = "engine-0", seed: int = 0, length: int = 5) -> None:
        super().__init__(name, seed)
        self.length = length
        self.running: dict[str, tuple[GenerationRequest, list[int], list[int]]] = {}
        """Request, sampled tokens and the version of each, by id."""
        self._back: list[Any] = []
        self.aside = False
        """Whether nothing may be asked of it."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert not self.aside, f"{self.name} was given requests while it was aside"
        self.seen += requests
        self.running |= {r.request_id: (r, [], []) for r in requests}

    def abort(self, request_ids: Sequence[str]) -> None:
        self._back += [self._give(i, "abort") for i in request_ids if i in self.running]

    def collect(self, max_wait_s: float) -> CompletionBatch:
        for request_id in self._random.sample(sorted(self.running), k=min(len(self.running), self._random.randint(0, 4))):
            request, tokens, versions = self.running[request_id]
            tokens.append(len(request.prompt_token_ids) - PROMPT_TOKENS + len(tokens))
            versions.append(self.version)
            if len(tokens) == request.sampling.max_tokens or tokens[-1] == self.length_of(request_id) - 1:
                self._back.append(self._give(request_id, "stop"))
        back, self._back = self._back, []
        return pack(back)

    def length_of(self, request_id: str) -> int:
        """Tokens of a whole response, whatever engine samples it."""
        return 1 + sum(map(ord, request_id.split("+")[0])) % self.length

    def _give(self, request_id: str, finish: str) -> Completion:
        _, tokens, versions = self.running.pop(request_id)
        return Completion(request_id=request_id, segment=make_segment(tokens, versions=versions), finish_reason=finish)


class CountingPrompts:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.handed_out = 0

    def state(self) -> dict[str, object]:
        return {"next": self.handed_out}

    def next(self, count: int) -> list[Prompt]:
        first, self.handed_out = self.handed_out, self.handed_out + count
        return [make_prompt(i) for i in range(first, first + count)]


class ScriptedRewards:
    """Scores every sample; samples whose id is ``failing`` get an error instead."""

    def __init__(self, failing: Callable[[str], bool] = lambda sample_id: False) -> None:
        self.failing = failing
        self.calls = 0

    async def score(self, batch: RewardBatch) -> list[RewardResult]:
        self.calls += 1
        await asyncio.sleep(0)
        return [
            RewardResult(sample_id=name, score=None, error="reward 'task': ran past its limit", timeouts=("task",), retries=1)
            if self.failing(name)
            else RewardResult(sample_id=name, score=float(i % 2), parts={"task": float(i % 2)}, passed=bool(i % 2))
            for i, name in enumerate(batch.sample_ids)
        ]


def no_texts(responses: Sequence[IntArray]) -> list[str]:
    """A decoder."""
    return ["x" * len(r) for r in responses]


class ServingEngine(ScriptedEngine):
    """A scripted engine that also takes weights: a version counter and a log of the phases."""

    def __init__(self, name: str = "engine-0", seed: int = 0) -> None:
        super().__init__(name, seed)
        self.phases: list[str] = []
        self.wrong_from: int | None = None
        """Version from which every score is off by 0.01: what a wrong tensor would do."""
        self.forgets_version = False
        self._coming = 0
        self.lost = asyncio.Event()
        self.stopped = False
        """Whether its process lives and answers nothing."""
        self.killed = asyncio.Event()

    def start(self, method: str, *args: Any) -> Any:
        return Unanswered(self, method) if self.stopped else super().start(method, *args)

    def restart(self) -> None:
        super().restart()
        self.lost, self.killed, self.stopped = asyncio.Event(), asyncio.Event(), False
        self.phases.append("restart")

    def prepare_receiver(self, receiver: str, settings: Any) -> None:
        """It takes whatever comes."""

    def begin_update(self, manifest: Any, version: int) -> None:
        self._coming = version
        self.phases.append(f"begin v{version}")

    def load_bucket(self, index: int, data: Any) -> None:
        self.phases.append(f"bucket {index}")

    def finish_update(self, timeout_s: float, on_running: str) -> int:
        self.phases.append("finish")
        if not self.forgets_version:
            self.version = self._coming
        return self.version

    def update(self, manifest: Any, version: int, timeout_s: float, on_running: str, *parts: Any) -> int:
        self.begin_update(manifest, version)
        for index, data in enumerate(parts):
            self.load_bucket(index, data)
        return self.finish_update(timeout_s, on_running)

    def score(self, sequences: Sequence[tuple[int, ...]], timeout_s: float) -> list[tuple[float, ...]]:
        wrong = self.wrong_from is not None and self.version >= self.wrong_from
        return [tuple(-0.99 if wrong else -1.0 for _ in s[1:]) for s in sequences]

    async def address(self, timeout_s: float) -> tuple[str, int]:
        return "127.0.0.1", 0

    async def watch(self) -> None:
        await self.lost.wait()
        raise WorkerLostError(self.name, "signal 9", self.log_file)

    async def drained(self) -> None:
        await asyncio.Event().wait()


class CountingTrainer:
    """A trainer whose weights are the number of updates it has made."""

    log_file = "trainer.log"

    def __init__(self, name: str = "trainer-0") -> None:
        self.name = name
        self.updates = 0
        self.batches: list[Any] = []
        self.on_step: Callable[[int], None] = lambda step: None
        self.lost = asyncio.Event()
        self.draining = asyncio.Event()
        """Its pod is asked to end."""
        self.writes_slowly = False
        """Whether checkpoints are never done when somebody asks; waiting for them helps."""

    def start(self, method: str, *args: Any) -> Answered:
        return Answered(lambda: getattr(self, method)(*args))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self.start(method, *args).result(timeout_s)

    def train_step(self, batches: Sequence[Any], step: int) -> dict[str, float]:
        self.on_step(step + 1)  # 1 for the first step
        self.updates += 1
        self.batches.append(batches)
        return {"train/total_loss": float(self.updates)}

    def prepare_sender(self, sender: str, manifest: Any, settings: Any) -> None:
        self._manifest = manifest

    def send_weights(self, version: int, part: int) -> Any:
        return np.zeros(self._manifest.buckets[part].size_bytes, dtype=np.uint8)

    def compute_logprobs(self, tokens: Any, lengths: Any, temperature: float) -> Any:
        return np.full(int(lengths.sum()), -1.0, dtype=np.float32)

    def checkpoint_bytes(self) -> int:
        return len(str(self.updates))

    def begin_checkpoint(self, folder: str) -> None:
        self._copied = (Path(folder), str(self.updates))

    def written_checkpoint(self) -> tuple[FileSum, ...] | None:
        """Once it is no longer held up."""
        return None if self.writes_slowly else self.finish_checkpoint(0.0)

    def finish_checkpoint(self, timeout_s: float) -> tuple[FileSum, ...]:
        folder, updates = self._copied
        (folder / "updates").write_text(updates)
        return (sum_file(folder, "updates"),)

    def save_checkpoint(self, folder: str) -> tuple[FileSum, ...]:
        self.begin_checkpoint(folder)
        return self.finish_checkpoint(0.0)

    def damaged_files(self, folder: str, files: Sequence[FileSum]) -> list[str]:
        return damaged(Path(folder), files)

    async def watch(self) -> None:
        await self.lost.wait()
        raise WorkerLostError(self.name, "signal 9", self.log_file)

    async def drained(self) -> None:
        await self.draining.wait()
