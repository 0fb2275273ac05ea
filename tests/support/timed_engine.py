"""A rollout engine in virtual time: slots, a pace, a moment of death. For ``virtual_time.run_virtual``."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.records import Completion, GenerationRequest, VersionSpan
from tests.support.fake_workers import PROMPT_TOKENS


class TimedEngine:
    """The oldest ``slots`` requests draw a token every ``token_s``; each token is its own position in the response, whoever draws it."""

    log_file = "engine.log"

    def __init__(
        self,
        name: str,
        *,
        slots: int = 4,
        token_s: float = 1.0,
        length_of: Callable[[str], int] = lambda key: 4,
        dies_at_s: float = float("inf"),
    ) -> None:
        self.name = name
        self.slots = slots
        self.token_s = token_s
        self.version = 0
        self.seen: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        """Request and version of each token drawn, by id."""
        self._length_of = length_of
        self._dies_at_s = dies_at_s
        self._back: list[Completion] = []
        self._next_s = 0.0

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "collect":
            return await self._collect(*args)
        await asyncio.sleep(0)
        self._live()
        getattr(self, method)(*args)
        return None

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

    async def _collect(self, max_wait_s: float) -> list[Completion]:
        until_s = _now_s() + max_wait_s
        while not self._back and _now_s() < until_s:
            self._live()
            next_s = self._next_s if self.running else until_s
            await asyncio.sleep(max(min(next_s, until_s, self._dies_at_s) - _now_s(), 0.0))
            if self.running and _now_s() >= self._next_s:
                self._next_s += self.token_s
                for request_id in list(self.running)[: self.slots]:
                    self._draw(request_id)
        self._live()
        back, self._back = self._back, []
        return back

    def _draw(self, request_id: str) -> None:
        request, versions = self.running[request_id]
        versions.append(self.version)
        drawn = len(request.prompt_token_ids) - PROMPT_TOKENS + len(versions)
        if drawn >= self._length_of(request_id.split("+")[0]):
            self._give(request_id, "stop")

    def _give(self, request_id: str, finish: str) -> None:
        request, versions = self.running.pop(request_id)
        first = len(request.prompt_token_ids) - PROMPT_TOKENS
        self._back.append(
            Completion(
                request_id=request_id,
                token_ids=tuple(range(first, first + len(versions))),
                logprobs=tuple(-0.1 for _ in versions),
                version_spans=tuple(VersionSpan(start=i, end=i + 1, version=v) for i, v in enumerate(versions)),
                finish_reason=finish,
            )
        )

    def _live(self) -> None:
        if _now_s() >= self._dies_at_s:
            raise WorkerLostError(self.name, "signal 9", self.log_file)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
