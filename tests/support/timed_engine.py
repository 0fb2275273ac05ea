"""A rollout engine in virtual time: slots, a pace, moments of death. For ``virtual_time.run_virtual``."""

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from rljob_runtime.errors import EngineLostError, WorkerLostError
from rljob_runtime.packed import CompletionBatch, pack
from rljob_runtime.records import Completion, GenerationRequest
from tests.support.fake_workers import PROMPT_TOKENS
from tests.support.records import make_segment


class Fault(StrEnum):
    """What happens to an engine."""

    KILLED = "killed"
    """Its process is gone."""
    FAILED = "failed"
    """Its thread ended; the process answers, and has what was sampled."""
    HANGS = "hangs"
    """It samples nothing any more and reports nothing."""


class TimedEngine:
    """The oldest ``slots`` requests sample a token every ``token_s``; each token is its own position in the response on any engine."""

    log_file = "engine.log"

    def __init__(
        self,
        name: str,
        *,
        slots: int = 4,
        token_s: float = 1.0,
        length_of: Callable[[str], int] = lambda key: 4,
        dies_at_s: float = float("inf"),
        faults: Sequence[tuple[float, Fault]] = (),
    ) -> None:
        self.name = name
        self.slots = slots
        self.token_s = token_s
        self.version = 0
        self.seen: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        """Request and version of each token sampled, by id."""
        self._length_of = length_of
        self._faults = sorted([*faults, (dies_at_s, Fault.KILLED)])
        self._sampled = 0
        self.sampled_ever = 0
        """Tokens sampled by all processes that ran here."""
        self._back: list[Completion] = []
        self._next_s = 0.0

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "collect":
            return await self._collect(*args)
        await asyncio.sleep(0)
        self._live(answers=method == "salvage")
        return getattr(self, method)(*args)

    def restart(self) -> None:
        """Another process takes its place."""
        self._faults = [fault for fault in self._faults if fault[0] > _now_s()]
        self.running, self._back, self._sampled = {}, [], 0

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": float(self._sampled)}

    def salvage(self) -> CompletionBatch:
        for request_id in list(self.running):
            self._give(request_id, "abort")
        back, self._back = self._back, []
        return pack(back)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if not self.running:
            self._next_s = _now_s() + self.token_s
        self.seen += requests
        for request in requests:
            assert request.request_id not in self.running
            self.running[request.request_id] = (request, [])

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self.running:
                self._give(request_id, "abort")

    async def _collect(self, max_wait_s: float) -> CompletionBatch:
        until_s = _now_s() + max_wait_s
        while not self._back and _now_s() < until_s:
            self._live()
            next_s = self._next_s if self.running and self._fault is None else until_s
            fault_s = self._faults[0][0] if self._fault is None else until_s
            await asyncio.sleep(max(min(next_s, until_s, fault_s) - _now_s(), 0.0))
            if self.running and _now_s() >= self._next_s and self._fault is None:
                self._next_s += self.token_s
                for request_id in list(self.running)[: self.slots]:
                    self._draw(request_id)
        self._live()
        back, self._back = self._back, []
        return pack(back)

    def _draw(self, request_id: str) -> None:
        request, versions = self.running[request_id]
        versions.append(self.version)
        self._sampled += 1
        self.sampled_ever += 1
        sampled = len(request.prompt_token_ids) - PROMPT_TOKENS + len(versions)
        if sampled >= self._length_of(request_id.split("+")[0]):
            self._give(request_id, "stop")

    def _give(self, request_id: str, finish: str) -> None:
        request, versions = self.running.pop(request_id)
        first = len(request.prompt_token_ids) - PROMPT_TOKENS
        segment = make_segment(range(first, first + len(versions)), logprobs=[-0.1] * len(versions), versions=versions)
        self._back.append(Completion(request_id=request_id, segment=segment, finish_reason=finish))

    @property
    def _fault(self) -> Fault | None:
        """What has happened to it."""
        at_s, fault = self._faults[0]
        return fault if _now_s() >= at_s else None

    def _live(self, *, answers: bool = False) -> None:
        """Raises what a call gets; ``answers``: one that a process answers whose engine has failed."""
        if self._fault is Fault.KILLED:
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        if self._fault is Fault.FAILED and not answers:
            raise EngineLostError(self.name, "its thread ended", self.log_file)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
