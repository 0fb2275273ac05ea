"""An engine in memory for tests of the driver: no threads, no sleeps, no model, every order of events at the test's choice.

Tokens are a fixed function of (prompt, seed, position), so two runs agree and a lost or doubled response shows. Time is virtual: a
step costs ``step_s``, and ``collect`` runs steps until a response ends or its virtual wait is over.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljob_runtime.engine.protocol import ByteArray, EngineResidenceError, OnOffload
from rljob_runtime.engine.residence import DISCARDED, EngineResidence, check_running, names
from rljob_runtime.errors import DataError, DeadlineError, EngineDiedError, WeightSyncError
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.packed import CompletionBatch, pack
from rljob_runtime.records import Bucket, Completion, GenerationRequest, OnRunning, Segment, VersionSpan, WeightManifest
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.weightsync.parcel import view
from rljob_runtime.weightsync.transport import IncomingUpdate, Receiver, make_end
from rljob_runtime.weightsync.transports.object_store import PackedReceiver

LengthRule = Callable[[GenerationRequest], int]


@dataclass(slots=True)
class _Running:
    """A response in progress."""

    request: GenerationRequest
    length: int
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    holds_cache: bool = False
    """Sampled a token since the cache was last made: what an offload would interrupt."""


def default_length(request: GenerationRequest) -> int:
    """Lengths 1..max_tokens spread by the seed, so that responses of a group end in different steps."""
    return 1 + _hash(request.prompt_token_ids.tolist(), request.seed, -1) % request.sampling.max_tokens


def _scores(sequence: tuple[int, ...], version: int) -> tuple[float, ...]:
    """Differs between versions, equal on all engines of one version."""
    return tuple(-1.0 - (_hash(sequence, version, position) % 1000) / 1000 for position in range(1, len(sequence)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMemory:
    """Device memory of a fake engine, and what moving it costs in virtual time."""

    sizes_bytes: Mapping[StateKind, int] = field(default_factory=lambda: {StateKind.PARAMS: 1000, StateKind.KV_CACHE: 4000})
    """Of weights and cache, both."""
    offload_s: float = 0.02
    load_s: float = 0.02
    copies_weights: bool = False
    """Offloaded weights come back as they were, instead of undefined."""

    def switch_s(self, direction: str) -> float:
        """Of an ``offload`` or a ``load``."""
        return self.offload_s if direction == "offload" else self.load_s


DEFAULT_MEMORY = FakeMemory()


class FakeEngine:
    """An ``Engine`` whose every step the test controls."""

    def __init__(
        self,
        *,
        vocab_size: int = 100,
        max_num_seqs: int = 256,
        step_s: float = 0.01,
        automatic: bool = True,
        length_of: LengthRule = default_length,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        memory: FakeMemory = DEFAULT_MEMORY,
    ) -> None:
        """Make an engine that serves version 0.

        Args:
            vocab_size: sampled tokens are below it.
            max_num_seqs: requests that sample a token in one step; the rest waits.
            step_s: virtual seconds of a step; large values make the engine slow.
            automatic: False leaves every step to ``advance`` and ``end``, ``collect`` then only takes what ended.
            length_of: tokens of each response; ``max_tokens`` is the upper limit.
            expected: parameters an update must bring, by name with shape; None takes any manifest.
            memory: what it can offload.
        """
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.step_s = step_s
        self.automatic = automatic
        self.now_s = 0.0
        """Virtual clock: grows by ``step_s`` per step and by the waits of ``collect``."""
        self.versions: list[int] = [0]
        """Every version ever served, in order."""
        self.received: list[tuple[Bucket, ByteArray]] = []
        """Buckets of the last update, with their bytes."""
        self.submitted: list[str] = []
        """Every request id ever given, in order."""
        self._length_of = length_of
        self._expected = expected
        self._running: dict[str, _Running] = {}
        self._finished: list[Completion] = []
        self._receiver: Receiver = PackedReceiver()
        self._incoming: IncomingUpdate | None = None
        self._coming: list[tuple[Bucket, ByteArray]] = []
        self._lost_tensor: str | None = None
        self._memory = memory
        self._residence = EngineResidence()
        self._peak_bytes = 0
        self._weights_undefined: str | None = None
        self._switch_failure: str | None = None
        self._death: str | None = None
        self._counts: Counter[str] = Counter()
        """Steps, and tokens of prompts and responses."""

    # -- Engine -------------------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; see ``Engine.submit``."""
        self._raise_if_dead()
        ids = [request.request_id for request in requests]
        used = {completion.request_id for completion in self._finished} | self._running.keys()
        if len(set(ids)) != len(ids) or not used.isdisjoint(ids):
            raise DataError(f"submit: request ids are in use: {sorted(used & set(ids)) or ids}; give every request an id of its own")
        if any(request.sampling.stop_strings for request in requests):
            raise DataError("submit: stop strings need texts, and this engine's tokens have none; use stop tokens")
        for request in requests:
            length = min(self._length_of(request), request.sampling.max_tokens)
            self._running[request.request_id] = _Running(request=request, length=length)
        self.submitted += ids

    def collect(self, max_wait_s: float) -> CompletionBatch:
        """Run steps until something ended or the virtual wait is over; see ``Engine.collect``."""
        self._raise_if_dead()
        until_s = self.now_s + max_wait_s
        while self.automatic and not self._finished and self._running and self._computes() and self.now_s + self.step_s <= until_s:
            self.advance()
            self._raise_if_dead()
        if not self._finished:
            if self._weights_undefined is not None and not self._residence.away():
                raise WeightSyncError(f"nothing is generated because {self._weights_undefined}; send a full update")
            self.now_s = until_s
        finished, self._finished = self._finished, []
        return pack(finished)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; see ``Engine.abort``."""
        self._raise_if_dead()
        for request_id in request_ids:
            if request_id in self._running:
                self._end(request_id, "abort")

    def clear(self, timeout_s: float) -> None:
        """End everything; see ``Engine.clear``."""
        self._raise_if_dead()
        self.abort(tuple(self._running))
        self._finished = []

    def salvage(self) -> CompletionBatch:
        """What was not collected, and the rest as it stands; see ``Engine.salvage``."""
        for request_id in list(self._running):
            self._end(request_id, "abort")
        finished, self._finished = self._finished, []
        return pack(finished)

    def score(self, sequences: Sequence[tuple[int, ...]], timeout_s: float) -> list[tuple[float, ...]]:
        """Answer by rule, in one step; see ``Engine.score``."""
        self._raise_if_dead()
        if (refusal := self._residence.refusal("score")) is not None:
            raise EngineResidenceError(refusal)
        if self._weights_undefined is not None:
            raise WeightSyncError(f"score: {self._weights_undefined}; send a full update")
        self._spend(timeout_s, f"scoring {len(sequences)} sequences")
        return [_scores(sequence, self.versions[-1]) for sequence in sequences]

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        """Make the engine's end of a transport; see ``Engine.prepare_receiver``."""
        self._raise_if_dead()
        self._receiver.close()
        made: Receiver = make_end(receiver, **settings)
        self._receiver = made
        for test in made.tests:
            view(test)

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        """Open an update; see ``Engine.begin_update``."""
        self._raise_if_dead()
        self._coming = []
        self._incoming = self._receiver.begin(manifest, version, self._expected)

    def load_bucket(self, bucket_index: int, data: ByteArray) -> None:
        """Take one bucket; see ``Engine.load_bucket``."""
        incoming = self._open_update("load_bucket")
        incoming.take(bucket_index, data)
        if incoming.streams:
            self._load(incoming, math.inf)

    def finish_update(self, timeout_s: float, on_running: OnRunning = "recompute") -> int:
        """Serve the new version from the next step on; see ``Engine.finish_update``.

        There are no keys and values here, so both values of ``on_running`` end in the same state.
        """
        incoming = self._open_update("finish_update")
        incoming.check()
        self._residence.check_update(incoming.version)
        self._spend(timeout_s, f"the update to version {incoming.version}")
        self._load(incoming, time.monotonic() + timeout_s)
        self.received, self._coming = self._coming, []
        if self._lost_tensor is not None:
            name, self._lost_tensor = self._lost_tensor, None
            self._weights_undefined = f"the update to version {incoming.version} broke off"
            raise WeightSyncError(f"update to version {incoming.version}: the model's loader got no data for {name}; send a full update")
        self.versions.append(incoming.version)
        self._counts["update_bytes"] = incoming.received_bytes
        self._weights_undefined = None
        self._incoming = None
        return incoming.version

    def update(self, manifest: WeightManifest, version: int, timeout_s: float, on_running: OnRunning, *parts: ByteArray) -> int:
        """A whole update; see ``Engine.update``."""
        self.begin_update(manifest, version)
        for index, data in enumerate(parts):
            self.load_bucket(index, data)
        return self.finish_update(timeout_s, on_running)

    def offload(self, kinds: Collection[StateKind], timeout_s: float, on_running: OnOffload = "refuse") -> SwitchReport:
        """Give memory back; see ``Engine.offload``."""
        self._raise_if_dead()
        wanted = self._residence.to_offload(kinds)
        if wanted and on_running == "refuse":
            check_running(sum(running.holds_cache for running in self._running.values()))
        self._check_switch("offload", wanted, timeout_s)
        if wanted and on_running == "abort":
            self.abort(list(self._running))
        for running in self._running.values() if wanted else ():
            running.holds_cache = False
        if StateKind.PARAMS in wanted and not self._memory.copies_weights:
            self._weights_undefined = self._weights_undefined or DISCARDED
        return self._switch("offload", wanted)

    def load(self, kinds: Collection[StateKind], timeout_s: float) -> SwitchReport:
        """Take memory again; see ``Engine.load``."""
        self._raise_if_dead()
        wanted = self._residence.to_load(kinds)
        self._check_switch("load", wanted, timeout_s)
        return self._switch("load", wanted)

    def residence(self) -> Mapping[StateKind, Residence]:
        """Where weights and cache are."""
        self._raise_if_dead()
        return self._residence.states()

    def memory(self) -> MemorySnapshot:
        """What the declared sizes make of the current residence."""
        self._raise_if_dead()
        away = self._residence.away()
        allocated = sum(size for kind, size in self._memory.sizes_bytes.items() if kind not in away)
        copied = self._memory.sizes_bytes[StateKind.PARAMS] if self._memory.copies_weights and StateKind.PARAMS in away else 0
        peak, self._peak_bytes = max(self._peak_bytes, allocated), allocated
        return MemorySnapshot(
            allocated_bytes=allocated, reserved_bytes=allocated, peak_bytes=peak, host_rss_bytes=copied, pinned_bytes=copied
        )

    def version(self) -> int:
        """The version being served."""
        self._raise_if_dead()
        return self.versions[-1]

    def stats(self) -> Mapping[str, float]:
        """Counters; see ``Engine.stats``."""
        self._raise_if_dead()
        running = min(len(self._running), self.max_num_seqs)
        return {
            "running": float(running),
            "waiting": float(len(self._running) - running),
            "generated_tokens": float(self._counts["generated_tokens"]),
            "prompt_tokens": float(self._counts["prompt_tokens"]),
            "cached_tokens": 0.0,
            "busy_s": self._counts["steps"] * self.step_s,
            "steps": float(self._counts["steps"]),
            "updates": float(len(self.versions) - 1),
            "update_s": self.step_s if len(self.versions) > 1 else 0.0,
            "update_bytes": float(self._counts["update_bytes"]),
        }

    def shutdown(self) -> None:
        """End the engine; later calls raise."""
        self._receiver.close()
        self.die("the engine was shut down; start a new engine")

    # -- the test's controls ------------------------------------------------------------------------------------------------------

    def advance(self, steps: int = 1) -> None:
        """Let the oldest ``max_num_seqs`` requests sample one token per step; those that reach their length end.

        Does nothing while weights or cache are away, or the weights undefined.
        """
        for _ in range(steps if self._computes() else 0):
            for request_id in list(self._running)[: self.max_num_seqs]:
                running = self._running[request_id]
                self._draw(running)
                if len(running.token_ids) >= running.length:
                    self._end(request_id, "length" if running.length == running.request.sampling.max_tokens else "stop")
            self.now_s += self.step_s
            self._counts["steps"] += 1

    def end(self, request_ids: Sequence[str]) -> None:
        """End these responses now, in this order, at their full length and under the version being served."""
        for request_id in request_ids:
            running = self._running[request_id]
            while len(running.token_ids) < running.length:
                self._draw(running)
            self._end(request_id, "length" if running.length == running.request.sampling.max_tokens else "stop")

    def running_ids(self) -> list[str]:
        """Requests not ended yet, in order of submission."""
        return list(self._running)

    def die(self, reason: str = "die() was called on the fake engine") -> None:
        """Every later call raises ``EngineDiedError`` with the (first) reason."""
        self._death = self._death or reason

    def lose_tensor(self, name: str) -> None:
        """The next ``finish_update`` behaves as if this parameter never reached the model."""
        self._lost_tensor = name

    def fail_next_switch(self, reason: str) -> None:
        """The next offload or load that moves something breaks off half-way, which ends the engine."""
        self._switch_failure = reason

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _computes(self) -> bool:
        """Whether a step would do something."""
        return self._weights_undefined is None and not self._residence.away()

    def _check_switch(self, direction: str, wanted: frozenset[StateKind], timeout_s: float) -> None:
        """Refuse a switch that would not end in time, before it begins."""
        if wanted and self._memory.switch_s(direction) > timeout_s:
            raise DeadlineError(f"engine: the {direction} of {names(wanted)} took longer than {timeout_s:.1f} s; allow more time")

    def _switch(self, direction: str, wanted: frozenset[StateKind]) -> SwitchReport:
        """Move ``wanted`` in virtual time."""
        before = self.memory()
        elapsed_s = self._memory.switch_s(direction) if wanted else 0.0
        self.now_s += elapsed_s
        if wanted:
            with self._residence.moving(wanted, Residence.OFFLOADED if direction == "offload" else Residence.ON_DEVICE):
                if self._switch_failure is not None:
                    self.die(f"{direction} of {names(wanted)} broke off half-way: {self._switch_failure}; start a new engine")
                self._raise_if_dead()
        moved = {kind: self._memory.sizes_bytes[kind] for kind in sorted(wanted)}
        undefined = direction == "load" and self._weights_undefined is not None
        return SwitchReport(
            direction=direction,
            copied_bytes={kind: size for kind, size in moved.items() if kind is StateKind.PARAMS and self._memory.copies_weights},
            freed_bytes=moved,
            elapsed_s=elapsed_s,
            before=before,
            after=self.memory(),
            undefined=wanted & {StateKind.PARAMS} if undefined else frozenset(),
        )

    def _draw(self, running: _Running) -> None:
        """One token of one response."""
        running.holds_cache = True
        request, position = running.request, len(running.token_ids)
        self._counts["prompt_tokens"] += 0 if position else len(request.prompt_token_ids)
        running.token_ids.append(_hash(request.prompt_token_ids.tolist(), request.seed, position) % self.vocab_size)
        running.versions.append(self.versions[-1])
        self._counts["generated_tokens"] += 1

    def _end(self, request_id: str, finish_reason: str) -> None:
        """Move a response to the finished ones."""
        running = self._running.pop(request_id)
        versions = running.versions
        starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
        ends = [*starts[1:], len(versions)]
        self._finished.append(
            Completion(
                request_id=request_id,
                segment=Segment(
                    token_ids=np.array(running.token_ids, dtype=np.int32),
                    sampled=True,
                    logprobs=np.array([-0.5 - token / self.vocab_size for token in running.token_ids], dtype=np.float32),
                    version_spans=tuple(VersionSpan(start=s, end=e, version=versions[s]) for s, e in zip(starts, ends, strict=False)),
                    sampling_mask=self._mask(running) if running.request.sampling.returns_mask else None,
                ),
                finish_reason=finish_reason,
            )
        )

    def _mask(self, running: _Running) -> SamplingMask:
        """As if each token had been sampled from itself and the next one."""
        pairs = np.array([(token, (token + 1) % self.vocab_size) for token in running.token_ids], dtype=np.int32)
        return SamplingMask(token_ids=pairs.reshape(-1), counts=np.full(len(pairs), 2, dtype=np.int32))

    def _spend(self, timeout_s: float, what: str) -> None:
        """Take one step's virtual time, or raise when that is more than allowed."""
        if self.step_s > timeout_s:
            raise DeadlineError(f"engine: {what} took longer than {timeout_s:.1f} s; allow more time or look at the engine's log")
        self.now_s += self.step_s

    def _load(self, incoming: IncomingUpdate, deadline: float) -> None:
        """Keep what has come, in memory of its own."""
        self._coming += [(bucket, view(payload).copy()) for bucket, payload in incoming.receive(deadline)]

    def _open_update(self, method: str) -> IncomingUpdate:
        """The update in progress."""
        self._raise_if_dead()
        if self._incoming is None:
            raise WeightSyncError(f"{method}: no update is open; call begin_update first")
        return self._incoming

    def _raise_if_dead(self) -> None:
        """Raise after :meth:`die`."""
        if self._death is not None:
            raise EngineDiedError(self._death)


def _hash(tokens: Sequence[int], seed: int, position: int) -> int:
    """A stable number; Python's own hash may change between versions."""
    text = f"{','.join(map(str, tokens))}|{seed}|{position}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
