"""One engine as the fleet sees it: what it runs, whether it may be given more, and when it counts as lost.

::

    submit, abort ──> outbox ──> worker          worker ──> collect ──> receive     until lost: `exchange` returns how
                                                    └─ stats ──> tokens: progress

| wait        | for                          | bounded by        | then                         |
|-------------|------------------------------|-------------------|------------------------------|
| submit,abort| the worker's answer          | CALL_TIMEOUT_S    | it is lost                   |
| collect     | a finished response          | COLLECT_WAIT_S    | asked for its tokens, at times |
| progress    | a token                      | stall_timeout_s   | it is lost                   |
| salvage     | what a lost one still has    | SALVAGE_TIMEOUT_S | sampled again elsewhere      |
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import DeadlineError, EngineLostError, RuntimeFault, WorkerLostError
from rljob_runtime.overlap.occupancy import BusySpans, Occupancy
from rljob_runtime.overlap.portions import Portions
from rljob_runtime.overlap.samples import PrefixCache, Sample
from rljob_runtime.overlap.until_lost import until_lost
from rljob_runtime.packed import CompletionBatch, RequestBatch, unpack
from rljob_runtime.records import Completion, GenerationRequest

COLLECT_WAIT_S = 1.0
"""Longest silence of one collect call; only decides how soon a stall is noticed."""
CALL_TIMEOUT_S = 60.0
"""Deadline of calls that only hand something over; an engine that does not answer within it is lost."""
SALVAGE_TIMEOUT_S = 10.0
"""Deadline of the last call to a lost engine whose process may live."""
CHECKS_PER_STALL = 8
"""How often tokens are counted within the stall timeout while no response ends."""

Receive = Callable[["FleetEngine", CompletionBatch], Awaitable[None]]
"""Takes responses that an engine returned."""


class FleetEngine:
    """One engine; its worker may be replaced by another process under the same name."""

    def __init__(self, index: int, worker: Worker, slots: int, sends: Portions) -> None:
        """Nothing runs there yet; ``sends`` are the messages that all engines of a fleet are sent."""
        self._sends = sends
        self.index = index
        self.worker = worker
        self.running: dict[str, Sample] = {}
        """By the id of the request, in the order of submission."""
        self.cancelled: set[str] = set()
        """Those of them that were cancelled meanwhile."""
        self.paused = False
        self.loss: WorkerLostError | None = None
        """How it was lost; None: it serves, or could."""
        self.comes_back = False
        """Whether its replacement is under way."""
        self.occupancy = Occupancy(slots)
        self.busy_spans = BusySpans()
        self.cache = PrefixCache()
        self.returned = asyncio.Event()
        """Set when a replacement serves."""
        self.released = asyncio.Event()
        """Set when nothing more is wanted of what was lost."""
        self._marked = asyncio.Event()
        self._outbox: deque[tuple[str, list[Any]]] = deque()
        """Submissions and aborts, which must arrive in order."""
        self._to_send = asyncio.Event()
        self._busy = asyncio.Event()
        self._progress_s = 0.0
        """When it last gave a token, as far as is known."""
        self._checked_s = 0.0
        self._tokens = -1.0
        """What it had sampled then, since its start."""

    @property
    def open(self) -> bool:
        """Whether it is given requests."""
        return not self.paused and self.loss is None

    @property
    def gone(self) -> bool:
        """Whether it is lost and will not be replaced."""
        return self.loss is not None and not self.comes_back

    def submit(self, samples: Sequence[Sample], requests: list[GenerationRequest]) -> None:
        """Give it requests."""
        if not self.running:
            self._progress_s = self._checked_s = now_s()
        for sample, request in zip(samples, requests, strict=True):
            sample.engine, sample.cache = self.index, self.cache
            self.running[request.request_id] = sample
        if self._outbox and self._outbox[-1][0] == "submit":  # one message: it costs more than what it holds
            self._outbox[-1][1].extend(requests)
        else:
            self._send("submit", RequestBatch(requests))
        self._busy.set()
        self._load_changed()

    def forget(self) -> None:
        """It has nothing cached any more: its weights changed, or its cache left the device."""
        self.cache = PrefixCache()

    def abort(self, request_ids: list[str]) -> None:
        """Have it give requests back with the tokens they have."""
        if request_ids and self.loss is None:
            self._send("abort", request_ids)

    def _send(self, method: str, payload: list[Any]) -> None:
        self._outbox.append((method, payload))
        self._to_send.set()

    def release(self, request_id: str) -> tuple[Sample, bool]:
        """A request is no longer here; its sample, and whether that was cancelled. ``released_some`` follows the last of several."""
        sample = self.running.pop(request_id)
        sample.affinity.num_there -= sample.affinity.engine == self.index
        cancelled = request_id in self.cancelled
        self.cancelled.discard(request_id)
        return sample, cancelled

    def released_some(self) -> None:
        """Its load is less from now on."""
        self._load_changed()

    def _load_changed(self) -> None:
        time_s = now_s()
        self.occupancy.change(len(self.running), time_s)
        self.busy_spans.change(bool(self.running), time_s)

    def lose(self, error: WorkerLostError, *, comes_back: bool) -> None:
        """It is lost from now on; :meth:`exchange` ends."""
        self.loss, self.comes_back = error, comes_back
        self.returned.clear()
        self.released.clear()
        self._marked.set()

    def rejoin(self) -> None:
        """A replacement serves in its place, and has been given nothing yet."""
        self.loss, self.comes_back = None, False
        self._outbox.clear()
        self._tokens = -1.0
        self._marked.clear()
        self.returned.set()

    async def exchange(self, receive: Receive, stall_timeout_s: float) -> WorkerLostError:
        """Send requests and collect responses until it is lost, as this or somebody else finds out; returns how.

        Responses that are on their way at that moment are dropped: the driver has not seen them, so that they are sampled again.
        """
        return await until_lost(self._send_forever(), self._collect_forever(receive, stall_timeout_s), self._until_marked())

    async def salvage(self) -> list[Completion]:
        """What it still has: whole responses, and unfinished ones as ``abort``. Nothing where its process is gone or does not answer."""
        if not isinstance(self.loss, EngineLostError):
            return []
        try:
            parts: CompletionBatch = await self.worker.call("salvage", timeout_s=SALVAGE_TIMEOUT_S)
        except RuntimeFault:
            return []
        return [part for part in unpack(parts) if part.request_id in self.running]

    async def _until_marked(self) -> None:
        await self._marked.wait()
        if self.loss is not None:
            raise self.loss

    async def _send_forever(self) -> None:
        while True:
            while not self._outbox:
                self._to_send.clear()
                await self._to_send.wait()
            await self._sends.turn(1)
            method, payload = self._outbox.popleft()
            await self._call(method, payload)

    async def _collect_forever(self, receive: Receive, stall_timeout_s: float) -> None:
        while True:
            if not self.running:
                self._busy.clear()
                await self._busy.wait()
            answer: CompletionBatch = await self._call("collect", COLLECT_WAIT_S)
            if answer.request_ids:
                self._progress_s = self._checked_s = now_s()
                await receive(self, answer)
            elif self.running and now_s() - self._checked_s > stall_timeout_s / CHECKS_PER_STALL:
                await self._check_progress(stall_timeout_s)

    async def _check_progress(self, stall_timeout_s: float) -> None:
        """Count its tokens: long responses may end much later than they begin.

        Raises:
            EngineLostError: there was none for too long.
        """
        tokens = float((await self._call("stats"))["generated_tokens"])
        self._checked_s = now_s()
        if tokens != self._tokens:
            self._tokens, self._progress_s = tokens, self._checked_s
        elif self._checked_s - self._progress_s > stall_timeout_s:
            why = f"it gave no token for {stall_timeout_s:.0f} s while {len(self.running)} requests ran (rollout.stallTimeoutSeconds)"
            raise EngineLostError(self.worker.name, why, self.worker.log_file)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self.worker.call(method, *args, timeout_s=CALL_TIMEOUT_S)
        except DeadlineError as error:
            raise EngineLostError(self.worker.name, f"no answer to {method} within {CALL_TIMEOUT_S:.0f} s", self.worker.log_file) from error


def now_s() -> float:
    """The event loop's clock: monotonic, and virtual in simulations."""
    return asyncio.get_running_loop().time()
