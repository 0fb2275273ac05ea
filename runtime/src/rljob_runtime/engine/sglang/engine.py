"""SGLang as an ``Engine``: any thread may call, one event loop in a thread of its own talks to the server.

::

    submit, abort, score, finish_update -> event loop: SglangSession -> HTTP -> SGLang's server (processes of its own)
    collect <- finished responses <- event loop

What a transport brings early is kept by the calling threads and loaded in ``finish_update``, so generation goes on while weights travel.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from rljob_runtime.engine.clearing import clear
from rljob_runtime.engine.expected_parameters import expected_parameters, with_tied_head
from rljob_runtime.engine.protocol import ByteArray, EngineConfig, OnOffload
from rljob_runtime.engine.request_checks import RequestLimits
from rljob_runtime.engine.residence import names
from rljob_runtime.engine.sglang.arguments import command_line, server_arguments
from rljob_runtime.engine.sglang.client import SglangClient
from rljob_runtime.engine.sglang.interpreter import sglang_python
from rljob_runtime.engine.sglang.memory import LedgerMemory, ReportedMemory, ServerMemory
from rljob_runtime.engine.sglang.models import unused_models
from rljob_runtime.engine.sglang.server import SglangServer, server_environment
from rljob_runtime.engine.sglang.session import SWITCH_GRACE_S, SglangSession
from rljob_runtime.engine.stop_strings import decoder
from rljob_runtime.engine.tokenizer import load_tokenizer
from rljob_runtime.errors import DataError, DeadlineError, EngineDiedError, RuntimeFault, WeightSyncError
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.packed import CompletionBatch, pack
from rljob_runtime.records import Completion, GenerationRequest, OnRunning, WeightManifest
from rljob_runtime.weightsync.transport import IncomingUpdate, Receiver, make_end
from rljob_runtime.weightsync.transports.object_store import PackedReceiver

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

SHUTDOWN_TIMEOUT_S = 30.0
GRACE_S = 1.0
"""The event loop's own deadline of an update comes first, with its better message."""


class SglangEngine:
    """A running SGLang server; see ``protocol.Engine`` for what each method promises."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the server and wait until it can serve.

        Args:
            config: how to start; with ``threads`` CPU cores compute.

        Raises:
            SetupError: SGLang is not installed here.
            ModelError: the model's folder is unfit, or the server ended while it started; with the end of its log.
            DeadlineError: not ready after ``config.start_timeout_s``.
        """
        from transformers import AutoConfig

        python = sglang_python()
        self._config = config
        self._expected = expected_parameters(config.model_path, config.trust_remote_code)
        found = AutoConfig.from_pretrained(config.model_path, trust_remote_code=config.trust_remote_code, local_files_only=True)
        model_config = found.get_text_config()
        tokenizer = load_tokenizer(config)
        self._limits = RequestLimits(
            max_model_len=config.max_model_len, vocab_size=int(model_config.vocab_size), finds_texts=config.finds_texts
        )
        self._changed = threading.Condition()
        """Guards everything below."""
        self._finished: list[Completion] = []
        self._known_ids: set[str] = set()
        self._pending: set[Future] = set()
        self._failure: str | None = None
        self._version = 0
        self._weights_undefined: str | None = None
        self._stats: Mapping[str, float] = {}
        self._receiver: Receiver = PackedReceiver()
        self._incoming: IncomingUpdate | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="rljob-sglang-"))
        ledger = self._folder / "ledger.json" if config.release != "never" and config.threads is not None else None
        arguments = command_line(server_arguments(config, model_config))
        environment = server_environment(config.threads, ledger, config.tensor_parallel_size)
        environment |= unused_models(python, found.architectures or (), config.extra_args)
        self._server = SglangServer(python, arguments, environment, self._fail)
        self._server.wait_until_healthy(config.start_timeout_s)
        self._memory: ServerMemory | None = None
        """Where it can be given back."""
        if config.release != "never":
            self._memory = LedgerMemory(ledger) if ledger is not None else ReportedMemory(self._server.info())
        self._last_bytes = 0
        self.session = SglangSession(
            client=SglangClient(self._server.url),
            config=config,
            vocab_size=self._limits.vocab_size,
            extra_eos=None if tokenizer is None else tokenizer.eos_token_id,
            decode=decoder(tokenizer) if config.finds_texts and tokenizer is not None else None,
            publish=self._publish,
            fail=self._fail,
        )
        self._stats = self.session.stats()
        self._residence = self.session.residence.states()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rljob-sglang", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests and return at once; see ``Engine.submit``."""
        self._limits.check(requests)
        ids = {request.request_id for request in requests}
        with self._changed:
            self._raise_if_dead()
            if len(ids) != len(requests) or not ids.isdisjoint(self._known_ids):
                used = sorted(ids & self._known_ids) or "repeated in one call"
                raise DataError(f"submit: request ids are in use: {used}; give every request an id of its own")
            self._known_ids |= ids
        self._loop.call_soon_threadsafe(self.session.watched, self.session.add, tuple(requests))

    def collect(self, max_wait_s: float) -> CompletionBatch:
        """Finished responses, waiting for the first; see ``Engine.collect``."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._failure or self._weights_undefined, max_wait_s)
            self._raise_if_dead()
            finished, self._finished = self._finished, []
            if not finished and self._weights_undefined is not None:
                raise WeightSyncError(f"nothing is generated because {self._weights_undefined}; send a full update")
            self._known_ids.difference_update(completion.request_id for completion in finished)
        return pack(finished)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; see ``Engine.abort``."""
        with self._changed:
            self._raise_if_dead()
        self._loop.call_soon_threadsafe(self.session.watched, self.session.abort, tuple(request_ids))

    def clear(self, timeout_s: float) -> None:
        """End all requests and forget them; see ``Engine.clear``."""
        clear(self, self._uncollected, timeout_s)

    def salvage(self) -> CompletionBatch:
        """What is left of a lost engine; see ``Engine.salvage``."""
        with self._changed:
            self._failure = self._failure or "the engine was given up; start a new engine"
            finished, self._finished = self._finished, []
            self._changed.notify_all()
        return pack(finished + self.session.salvage())

    def score(self, sequences: Sequence[tuple[int, ...]], timeout_s: float) -> list[tuple[float, ...]]:
        """Log-probs of given sequences; see ``Engine.score``."""
        self._limits.check_scored(sequences)
        if not sequences:
            return []
        batch = tuple(sequences)
        return self._call(lambda: self.session.score(batch), timeout_s, f"scoring {len(batch)} sequences")

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        """Make the engine's end of a transport; see ``Engine.prepare_receiver``.

        Raises:
            WeightSyncError: the transport loads buckets before the update is whole.
        """
        with self._changed:
            self._raise_if_dead()
        if settings.get("streams"):
            raise WeightSyncError("SGLang takes a whole update, and this transport hands it over bucket by bucket; write ObjectStore")
        self._receiver.close()
        self._receiver = make_end(receiver, **settings)

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        """Open an update; see ``Engine.begin_update``."""
        incoming = self._receiver.begin(manifest, version, with_tied_head(self._expected, manifest))
        with self._changed:
            self._raise_if_dead()
            self._incoming = incoming

    def load_bucket(self, bucket_index: int, data: ByteArray) -> None:
        """Take one bucket; see ``Engine.load_bucket``."""
        self._open_update("load_bucket").take(bucket_index, data)

    def finish_update(self, timeout_s: float, on_running: OnRunning = "recompute") -> int:
        """Put the received weights in place; see ``Engine.finish_update``."""
        incoming = self._open_update("finish_update")
        incoming.check()
        deadline = time.monotonic() + timeout_s
        what = f"the update to version {incoming.version}"
        version = self._call(lambda: self.session.apply_update(incoming, on_running, deadline), timeout_s + GRACE_S, what)
        with self._changed:
            self._incoming = None
        return version

    def update(self, manifest: WeightManifest, version: int, timeout_s: float, on_running: OnRunning, *parts: ByteArray) -> int:
        """A whole update; see ``Engine.update``."""
        self.begin_update(manifest, version)
        for index, data in enumerate(parts):
            self.load_bucket(index, data)
        return self.finish_update(timeout_s, on_running)

    def offload(self, kinds: Collection[StateKind], timeout_s: float, on_running: OnOffload = "refuse") -> SwitchReport:
        """Give memory back; see ``Engine.offload``."""
        wanted, deadline = frozenset(kinds), time.monotonic() + timeout_s
        return self._switch("offload", lambda: self.session.offload(wanted, on_running, deadline), timeout_s, wanted)

    def load(self, kinds: Collection[StateKind], timeout_s: float) -> SwitchReport:
        """Take memory again; see ``Engine.load``."""
        wanted, deadline = frozenset(kinds), time.monotonic() + timeout_s
        return self._switch("load", lambda: self.session.load(wanted, deadline), timeout_s, wanted)

    def residence(self) -> Mapping[StateKind, Residence]:
        """Where weights and cache are."""
        with self._changed:
            self._raise_if_dead()
            return dict(self._residence)

    def memory(self) -> MemorySnapshot:
        """Weights and cache of an engine that gives them back, as its server counts them.

        For another one, the resident memory of the server's processes; on an accelerator what they hold there is not known then, and 0.
        """
        resident = self._server.resident_bytes()
        if self._memory is not None:
            return self._snapshot(self._held())
        with self._changed:
            self._raise_if_dead()
        on_device = resident if self._config.threads is not None else 0
        return MemorySnapshot(
            allocated_bytes=on_device, reserved_bytes=on_device, peak_bytes=on_device, host_rss_bytes=resident, pinned_bytes=0
        )

    def version(self) -> int:
        """The version being served."""
        with self._changed:
            self._raise_if_dead()
            return self._version

    def stats(self) -> Mapping[str, float]:
        """Counters; see ``Engine.stats``."""
        with self._changed:
            self._raise_if_dead()
            return dict(self._stats)

    def server_pids(self) -> list[int]:
        """The server's processes, for whoever watches them; the first one ends all others with itself."""
        return self._server.pids()

    def shutdown(self) -> None:
        """End the engine; see ``Engine.shutdown``."""
        self._fail("the engine was shut down; start a new engine")
        self._receiver.close()
        self._server.close()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.session.client.close(), self._loop).result(SHUTDOWN_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._thread.is_alive():
            raise DeadlineError(f"the SGLang thread did not end within {SHUTDOWN_TIMEOUT_S:.0f} s; end the process")

    def _switch(
        self, direction: str, move: Callable[[], Coroutine[Any, Any, frozenset[StateKind]]], timeout_s: float, kinds: frozenset[StateKind]
    ) -> SwitchReport:
        """Have the session move memory, measured. One that has begun gets the session's own grace."""
        before_held = self._held()
        before = self._snapshot(before_held)
        begin = time.perf_counter()
        moved = self._call(move, max(timeout_s, 0.0) + 3 * SWITCH_GRACE_S, f"the {direction} of {names(kinds)}")
        elapsed_s = time.perf_counter() - begin
        after_held = self._held()
        freed = {kind: abs(before_held[kind] - after_held[kind]) for kind in sorted(moved)} if self._memory is not None else {}
        with self._changed:
            undefined = moved & {StateKind.PARAMS} if direction == "load" and self.session.weights_undefined is not None else frozenset()
        return SwitchReport(
            direction=direction,
            copied_bytes={kind: size for kind, size in freed.items() if kind is StateKind.PARAMS and self._config.release == "copy"},
            freed_bytes=freed,
            elapsed_s=elapsed_s,
            before=before,
            after=self._snapshot(after_held),
            undefined=undefined,
        )

    def _held(self) -> dict[StateKind, int]:
        """Bytes on the device by kind; nothing where that is not known."""
        with self._changed:
            self._raise_if_dead()
            away = [kind for kind, state in self._residence.items() if state is not Residence.ON_DEVICE]
        return {} if self._memory is None else self._memory.held(away)

    def _snapshot(self, held: Mapping[StateKind, int]) -> MemorySnapshot:
        """Memory with so much on the device."""
        on_device = sum(held.values())
        peak, self._last_bytes = max(self._last_bytes, on_device), on_device
        return MemorySnapshot(
            allocated_bytes=on_device,
            reserved_bytes=on_device,
            peak_bytes=peak,
            host_rss_bytes=self._server.resident_bytes(),
            pinned_bytes=0,
        )

    def _publish(self, finished: Sequence[Completion]) -> None:
        """Hand finished responses and the session's state to the other threads; on the event loop."""
        stats = self.session.stats()
        with self._changed:
            self._finished += finished
            self._stats = stats
            self._version = self.session.version
            self._residence = self.session.residence.states()
            # With something offloaded the engine is merely at rest.
            self._weights_undefined = None if self.session.residence.away() else self.session.weights_undefined
            if finished or self._weights_undefined is not None:
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        """Wake everyone who waits, with the reason."""
        with self._changed:
            self._failure = self._failure or reason  # the first is the cause
            for future in self._pending:
                if not future.done():
                    future.set_exception(EngineDiedError(self._failure))
            self._changed.notify_all()

    def _call(self, make: Callable[[], Coroutine[Any, Any, ResultT]], timeout_s: float, what: str) -> ResultT:
        """Have the event loop do something and wait for it."""
        result: Future[ResultT] = Future()
        with self._changed:
            self._raise_if_dead()
            self._pending.add(result)
        self._loop.call_soon_threadsafe(self._begin, make, result)
        try:
            return result.result(timeout_s)
        except DeadlineError:
            raise
        except TimeoutError as exc:
            raise DeadlineError(f"engine: {what} took longer than {timeout_s:.1f} s; allow more time or look at the engine's log") from exc
        finally:
            with self._changed:
                self._pending.discard(result)

    def _begin(self, make: Callable[[], Coroutine[Any, Any, ResultT]], result: Future[ResultT]) -> None:
        """On the event loop."""

        async def run() -> None:
            try:
                value = await make()
            except (RuntimeFault, aiohttp.ClientError, OSError) as exc:
                error = exc if isinstance(exc, RuntimeFault) else EngineDiedError(f"SGLang's server is lost: {type(exc).__name__}: {exc}")
                with self._changed:
                    if not result.done():
                        result.set_exception(error)
                return
            with self._changed:
                if not result.done():
                    result.set_result(value)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:  # a defect: whoever waits must not wait until the deadline
                logger.error("the SGLang engine failed", exc_info=error)
                self._fail(f"the SGLang engine failed: {type(error).__name__}: {error}; see its log, and start a new engine")

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _uncollected(self) -> frozenset[str]:
        """Ids of requests whose responses nobody has collected."""
        with self._changed:
            return frozenset(self._known_ids)

    def _raise_if_dead(self) -> None:
        """Raise when the engine ended; call with the condition held."""
        if self._failure is not None:
            raise EngineDiedError(self._failure)

    def _open_update(self, method: str) -> IncomingUpdate:
        """The update in progress."""
        with self._changed:
            self._raise_if_dead()
            if self._incoming is None:
                raise WeightSyncError(f"{method}: no update is open; call begin_update first")
            return self._incoming
