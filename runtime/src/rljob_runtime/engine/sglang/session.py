"""The part of the SGLang engine that only its event loop touches: which requests the server has, and what is done to it between them.

At most ``max_num_seqs`` requests are with the server, the others wait here, where an abort or an update does not have to look for them. An
update retracts what runs: the server puts it back into its queue with its tokens, and computes keys and values again under the new
weights. So does an offload that keeps it; while memory is away the server stays paused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rljob_runtime.engine.protocol import EngineConfig, EngineResidenceError, OnOffload
from rljob_runtime.engine.residence import DISCARDED, EngineResidence, check_running, names
from rljob_runtime.engine.sglang import response as responses
from rljob_runtime.engine.sglang import weights
from rljob_runtime.engine.sglang.client import RefusedError, SglangClient
from rljob_runtime.engine.sglang.memory import tags
from rljob_runtime.engine.stop_strings import Decode, StopFinder, reach
from rljob_runtime.errors import DeadlineError, EngineDiedError, WeightSyncError
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.records import Bucket, Completion, GenerationRequest, OnRunning
from rljob_runtime.weightsync.parcel import Payload, view
from rljob_runtime.weightsync.transport import IncomingUpdate

logger = logging.getLogger(__name__)
SWITCH_GRACE_S = 30.0
"""Least time for a switch that has begun: given up half-way the engine would be lost."""
GROUP_SIZE = 64
"""Most requests of one HTTP call. What one costs the server is shared by all of them; more of them would not be answered faster."""


@dataclass(slots=True)
class _Active:
    """A request that the server has."""

    request: GenerationRequest
    name: str
    response: responses.Response
    begun: bool = False
    """Whether its first tokens came: an abort before that may reach the server's scheduler before the request does, and is lost then."""
    aborted: bool = False
    aborting: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Counters:
    """What ``Engine.stats`` promises, besides what runs now."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    """Seconds with a request at the server."""
    steps: int = 0
    """Pieces of responses that came: the server does not tell its steps."""
    updates: int = 0
    update_s: float = 0.0


@dataclass(kw_only=True)
class SglangSession:
    """Requests and updates of one server."""

    client: SglangClient
    config: EngineConfig
    vocab_size: int
    extra_eos: int | None
    decode: Decode | None
    """Where requests may have stop strings."""
    publish: Callable[[Sequence[Completion]], None]
    """Takes what ended; also called when the version or the reason below changes."""
    fail: Callable[[str], None]
    """The engine is lost."""
    version: int = 0
    weights_undefined: str | None = None
    """Why nothing may be generated until a full update succeeds; None in normal times."""
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        """Nothing runs yet."""
        self.residence = EngineResidence(releasable=self.config.release != "never")
        self._waiting: deque[GenerationRequest] = deque()
        self._active: dict[str, _Active] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._names = (f"{number}." for number in itertools.count())
        """The server aborts by the beginning of a name: the full stop keeps 1 from ending 10."""
        self._scoring = 0
        self._changed = asyncio.Condition()
        self._busy = False
        """Whether an update or a switch is under way."""
        self._server_updates = False
        """Whether an update of the server's was begun and not ended."""
        self._busy_since: float | None = None
        self._refilling: asyncio.Handle | None = None
        """Requests that wait are about to take the places of some that ended."""

    def stats(self) -> dict[str, float]:
        """See ``Engine.stats``."""
        count = self.counters
        busy_s = count.busy_s + (time.monotonic() - self._busy_since if self._busy_since is not None else 0.0)
        return {
            "running": float(len(self._active)),
            "waiting": float(len(self._waiting)),
            "generated_tokens": float(count.generated_tokens),
            "prompt_tokens": float(count.prompt_tokens),
            "cached_tokens": float(count.cached_tokens),
            "busy_s": busy_s,
            "steps": float(count.steps),
            "updates": float(count.updates),
            "update_s": count.update_s,
        }

    def watched(self, act: Callable[..., None], *arguments: object) -> None:
        """Do something that the event loop was asked for and nobody waits for: where it fails, the engine is lost."""
        try:
            act(*arguments)
        except Exception as error:
            logger.exception("the SGLang engine failed")
            self.fail(f"the SGLang engine failed: {type(error).__name__}: {error}; see its log, and start a new engine")

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; ids must be new."""
        self._waiting.extend(requests)
        self._start_waiting()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now with what they have; unknown ids are ignored."""
        wanted = set(request_ids)
        ended = [request for request in self._waiting if request.request_id in wanted]
        if ended:
            self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
            self.publish([self._response(request).completion(request.request_id, "abort") for request in ended])
        for request_id in wanted & self._active.keys():
            self._active[request_id].aborted = True
            self._end(self._active[request_id])

    def salvage(self) -> list[Completion]:
        """Unfinished responses as they stand; for another thread, when this one does nothing any more."""
        found = [active.response.salvaged(request_id, self.version) for request_id, active in list(self._active.items())]
        return found + [self._response(request).completion(request.request_id, "abort") for request in list(self._waiting)]

    async def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probs of tokens 1..n-1 of each sequence; from the first token on, so that no cached prefix is used.

        Raises:
            EngineResidenceError: weights or cache are offloaded.
            WeightSyncError: an update broke off.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: not self._busy)
            if (refusal := self.residence.refusal("score")) is not None:
                raise EngineResidenceError(refusal)
            if self.weights_undefined is not None:
                raise WeightSyncError(f"score: {self.weights_undefined}; send a full update")
            self._scoring += 1
        try:
            groups = [sequences[first : first + GROUP_SIZE] for first in range(0, len(sequences), GROUP_SIZE)]
            return [scores for group in await asyncio.gather(*map(self._score, groups)) for scores in group]
        finally:
            async with self._changed:
                self._scoring -= 1
                self._changed.notify_all()

    async def apply_update(self, incoming: IncomingUpdate, on_running: OnRunning, deadline: float) -> int:
        """Load a full set of weights between two steps of the server.

        Raises:
            WeightSyncError: refused before anything changed, also because the weights are offloaded, or the server failed to load: the
                weights are undefined then.
            DeadlineError: the deadline passed.
        """
        version = incoming.version
        self.residence.check_update(version)
        if on_running == "keep" and self.config.enable_prefix_caching:
            raise WeightSyncError(
                f"update to version {version} with 'keep': SGLang cannot drop cached prefixes of the old weights while responses run; "
                "write engine.prefixCaching: false, or overlap.updateMode: Interrupt"
            )
        async with self._alone(f"update to version {version}", deadline):
            self.residence.check_update(version)
            begin = time.perf_counter()
            undefined: str | None = f"the update to version {version} broke off"
            try:
                await self._replace_weights(incoming, on_running, deadline)
                self.version, undefined = version, None
                self.counters.updates += 1
                self.counters.update_s = time.perf_counter() - begin
            finally:
                self.weights_undefined = undefined
        return version

    async def offload(self, kinds: Collection[StateKind], on_running: OnOffload, deadline: float) -> frozenset[StateKind]:
        """Have the server give memory back between two steps; see ``Engine.offload``.

        Returns:
            The kinds that left.

        Raises:
            EngineResidenceError: refused, nothing changed.
            DeadlineError: not begun before the deadline.
            EngineDiedError: broke off half-way.
        """
        wanted = self.residence.to_offload(kinds)
        async with self._alone("offload", deadline):
            if wanted and on_running == "refuse":
                check_running(sum(active.begun for active in self._active.values()))
            elif wanted and on_running == "abort":
                self.abort([request.request_id for request in self._waiting] + list(self._active))
                async with self._changed:
                    await _in_time(self._changed.wait_for(lambda: not self._active), "offload", deadline, "the end of aborted responses")
            if wanted:
                if StateKind.PARAMS in wanted and self.config.release == "discard":
                    self.weights_undefined = self.weights_undefined or DISCARDED
                with self.residence.moving(wanted, Residence.OFFLOADED):
                    calls = (("/pause_generation", {"mode": "retract"}), ("/release_memory_occupation", {"tags": tags(wanted)}))
                    await self._switch("offload", wanted, calls, deadline)
        return wanted

    async def load(self, kinds: Collection[StateKind], deadline: float) -> frozenset[StateKind]:
        """Have the server take memory again; see ``Engine.load``. Returns and raises as :meth:`offload`."""
        wanted = self.residence.to_load(kinds)
        async with self._alone("load", deadline):
            if wanted:
                with self.residence.moving(wanted, Residence.ON_DEVICE):
                    await self._switch("load", wanted, (("/resume_memory_occupation", {"tags": tags(wanted)}),), deadline)
                if not self.residence.away() and self.weights_undefined is None:
                    await self._switch("load", wanted, (("/continue_generation", {}),), deadline)
        return wanted

    async def _switch(
        self, direction: str, wanted: frozenset[StateKind], calls: Sequence[tuple[str, Mapping[str, object]]], deadline: float
    ) -> None:
        """Calls of the server that move memory; the engine is lost where one fails.

        Raises:
            EngineDiedError: one did.
        """
        left_s = max(SWITCH_GRACE_S, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                for path, body in calls:
                    await self.client.post(path, body)
        except (RefusedError, TimeoutError, aiohttp.ClientError, OSError) as exc:
            why = f"{type(exc).__name__}: {exc}" if str(exc) else f"no answer within {left_s:.0f} s"
            reason = f"SGLang's {direction} of {names(wanted)} broke off half-way: {why}; start a new engine"
            self.fail(reason)
            raise EngineDiedError(reason) from exc

    @asynccontextmanager
    async def _alone(self, what: str, deadline: float) -> AsyncIterator[None]:
        """Nothing is scored inside the block, no other update or switch is under way, and nothing new goes to the server.

        Raises:
            DeadlineError: what is under way did not end in time.
        """
        async with self._changed:
            await _in_time(self._changed.wait_for(lambda: not self._scoring and not self._busy), what, deadline, "scoring")
            self._busy = True
        try:
            yield
        finally:
            async with self._changed:
                self._busy = False
                self._changed.notify_all()
            self.publish([])
            self._start_waiting()

    async def _replace_weights(self, incoming: IncomingUpdate, on_running: OnRunning, deadline: float) -> None:
        """Pause, load bucket after bucket, drop what was computed with the old weights, go on."""
        version = incoming.version
        call = self._update_call(version, deadline)
        await call("/pause_generation", {"mode": "retract" if on_running == "recompute" else "in_place"})
        if self._server_updates:  # an earlier update broke off
            await call("/end_weight_update", {})
        self._server_updates = True
        await call("/begin_weight_update", {})
        last = len(incoming.manifest.buckets) - 1
        arriving = incoming.receive(deadline)
        while (arrived := await asyncio.to_thread(_next, arriving)) is not None:
            bucket, data = arrived
            kept = await asyncio.to_thread(weights.shared, view(data))
            body = weights.update_body(bucket, kept, self.config.tensor_parallel_size, str(version) if bucket.index == last else None)
            await call("/update_weights_from_tensor", body)
        await call("/end_weight_update", {})
        self._server_updates = False
        if self.residence.away():  # the cache left empty, and the server goes on when it is back
            return
        if on_running == "recompute":
            await call("/flush_cache", {})
        await call("/continue_generation", {})

    def _update_call(self, version: int, deadline: float) -> Callable[..., asyncio.Future[None]]:
        """A call of the server that belongs to an update."""

        async def call(path: str, body: dict[str, object]) -> None:
            try:
                await _in_time(self.client.post(path, body), f"update to version {version}", deadline, path)
            except RefusedError as exc:
                raise WeightSyncError(f"update to version {version}: {exc}; send a full update") from exc

        return lambda path, body: asyncio.ensure_future(call(path, body))

    def _start_waiting(self) -> None:
        """Hand requests to the server while it has room, all of its memory, and its weights are defined."""
        self._refilling = None
        if self._busy or self.residence.away() or self.weights_undefined is not None:
            return
        room = min(len(self._waiting), self.config.max_num_seqs - len(self._active))
        if room <= 0:
            return
        started = []
        for request in (self._waiting.popleft() for _ in range(room)):
            self._active[request.request_id] = _Active(request=request, name=next(self._names), response=self._response(request))
            started.append(self._active[request.request_id])
        self._busy_since = self._busy_since if self._busy_since is not None else time.monotonic()
        for first in range(0, room, GROUP_SIZE):
            self._start(self._generate(started[first : first + GROUP_SIZE]))

    async def _generate(self, group: Sequence[_Active]) -> None:
        """Have the server answer requests through one stream, and take the responses piece by piece until it has ended all of them.

        Raises:
            EngineDiedError: the stream ended before them.
        """
        bodies = [
            responses.generate_body(
                active.request,
                active.name,
                extra_eos=self.extra_eos,
                vocab_size=self.vocab_size,
                max_model_len=self.config.max_model_len,
            )
            for active in group
        ]
        unfinished = {active.name: active for active in group}
        async for piece in self.client.stream("/generate", responses.group_body(bodies)):
            active = unfinished[piece["meta_info"]["id"]]
            if (reason := self._take(active, piece)) is None:
                self.publish([])
                continue
            del unfinished[active.name]
            await self._finish(active, reason)
        if unfinished:
            raise EngineDiedError(f"the server closed the connection before the end of {len(unfinished)} responses")

    def _take(self, active: _Active, piece: Mapping[str, Any]) -> str | None:
        """Take one piece of a response; why it ended, or None where it goes on."""
        meta = piece["meta_info"]
        self.counters.steps += 1
        was_ended = active.aborted or active.response.stopped
        if (ended := meta["finish_reason"]) is not None and ended["type"] == "abort" and not was_ended:
            raise RefusedError(f"it was aborted by the server: {ended}")
        self.counters.generated_tokens += active.response.take(piece)
        if not active.begun:
            self.counters.prompt_tokens += meta.get("prompt_tokens", 0)
            self.counters.cached_tokens += meta.get("cached_tokens", 0)
            active.begun = True
        if ended is not None:
            return "stop" if active.response.stopped else str(ended["type"])
        if active.response.stopped or active.aborted:
            self._end(active)
        return None

    async def _finish(self, active: _Active, reason: str) -> None:
        """Hand a response over that the server has ended, and give its place to one that waits."""
        del self._active[active.request.request_id]
        async with self._changed:
            self._changed.notify_all()
        if not self._active and self._busy_since is not None:
            self.counters.busy_s += time.monotonic() - self._busy_since
            self._busy_since = None
        self.publish([active.response.completion(active.request.request_id, reason)])
        if self._waiting and self._refilling is None:  # responses that ended with it free more places: one call for all of them
            self._refilling = asyncio.get_running_loop().call_soon(self.watched, self._start_waiting)

    def _end(self, active: _Active) -> None:
        """Have the server end a request, as soon as it has begun."""

        async def abort() -> None:
            await self.client.post("/abort_request", {"rid": active.name})

        if active.begun and active.aborting is None:
            active.aborting = self._start(abort())

    async def _score(self, group: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Sequences of one call."""
        bodies = [
            {
                "rid": next(self._names),
                "input_ids": list(sequence),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            for sequence in group
        ]
        answers = await self.client.post("/generate", responses.group_body(bodies))
        return [tuple(row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]) for answer in answers]

    def _response(self, request: GenerationRequest) -> responses.Response:
        """An empty response to a request."""
        texts, before = request.sampling.stop_strings, request.num_sampled_before
        finder = None
        if texts and self.decode is not None:
            seen = request.prompt_token_ids[-min(before, reach(texts)) :].tolist() if before else ()
            finder = StopFinder(self.decode, texts, seen)
        return responses.Response(sampling=request.sampling, finder=finder, begun_at=self.version)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside; the engine is lost with it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # tasks that nobody refers to may vanish
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"SGLang's server gave no usable answer: {type(error).__name__}: {error}; start a new engine")


async def _in_time(wait: Awaitable[object], what: str, deadline: float, during: str) -> None:
    """Wait until ``deadline``, a ``time.monotonic`` value.

    Raises:
        DeadlineError: it passed.
    """
    try:
        await asyncio.wait_for(wait, max(deadline - time.monotonic(), 0.0))
    except TimeoutError as exc:
        raise DeadlineError(f"{what}: the deadline passed during {during}; allow more time and send it again") from exc


def _next(arriving: Iterator[tuple[Bucket, Payload]]) -> tuple[Bucket, Payload] | None:
    """The next bucket; None after the last."""
    return next(arriving, None)
