"""vLLM as an ``Engine``: any thread may call, one thread of its own does the work.

::

    submit, abort, score, finish_update,
    offload, load, memory -> inbox (queue of calls) -> engine thread: drain inbox, step, repeat -> VllmLoop -> vLLM
    collect <- finished responses <- engine thread

The engine thread blocks on the inbox while there is nothing to compute. What a transport brings early is kept by the calling threads and
loaded between two steps in ``finish_update``, so generation goes on while weights travel; the rest it receives then.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from rljob_runtime.cluster.host import imports
from rljob_runtime.engine.clearing import clear
from rljob_runtime.engine.expected_parameters import expected_parameters, with_tied_head
from rljob_runtime.engine.protocol import ByteArray, EngineConfig, EngineResidenceError, OnOffload
from rljob_runtime.engine.request_checks import RequestLimits
from rljob_runtime.engine.residence import names
from rljob_runtime.engine.vllm import arguments, model_infos
from rljob_runtime.engine.vllm.environment import environment_problems
from rljob_runtime.errors import DataError, DeadlineError, EngineDiedError, ModelError, SetupError, WeightSyncError
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.packed import CompletionBatch, pack
from rljob_runtime.records import Completion, GenerationRequest, OnRunning, WeightManifest
from rljob_runtime.weightsync.adapters import fitting
from rljob_runtime.weightsync.transport import IncomingUpdate, Receiver, make_end
from rljob_runtime.weightsync.transports.object_store import PackedReceiver

if TYPE_CHECKING:
    from rljob_runtime.engine.vllm.loop import VllmLoop

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

SHUTDOWN_TIMEOUT_S = 60.0
MEMORY_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 3600.0
"""Of one bucket; whoever sends it has the deadline of the sync."""
PROCESS_ENDED = "a process of vLLM's ended: a rank of tensorParallelSize or pipelineParallelSize; start a new engine"


class VllmEngine:
    """A running vLLM engine; see ``protocol.Engine`` for what each method promises."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine and wait until it can serve.

        Args:
            config: how to start.

        Raises:
            ModelError: the environment is unfit, or vLLM cannot load the model; says why.
            SetupError: vLLM does not take an argument of ``config.extra_args``.
            DeadlineError: not ready after ``config.start_timeout_s``.
        """
        if problems := environment_problems(config):
            raise ModelError(f"engine environment: {'; '.join(problems)}; call apply_environment(config) before importing vLLM")
        model_infos.seed()
        try:  # here and not in the thread: importing in two threads at once can hand out half-made modules
            with imports():
                from rljob_runtime.engine.vllm.loop import VllmLoop
        except ImportError as exc:
            raise ModelError(f"vLLM cannot be imported: {exc}; install rljob-runtime[cpu] or rljob-runtime[gpu]") from exc
        self._config = config = _with_parsed_arguments(config)
        self._expected = expected_parameters(config.model_path, config.trust_remote_code)
        self._inbox: queue.SimpleQueue[Callable[[VllmLoop], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        """Guards everything below."""
        self._finished: list[Completion] = []
        self._known_ids: set[str] = set()
        self._pending: set[Future] = set()
        self._failure: str | None = None
        self._stopping = False
        self._weights_undefined: str | None = None
        self._residence: Mapping[StateKind, Residence] = {}
        self._stats: dict[str, float] = {}
        self._version = 0
        self._vocab_size = 0
        self._receiver: Receiver = PackedReceiver()
        self._incoming: IncomingUpdate | None = None
        self.loop: VllmLoop | None = None
        """Other threads only look at it: whether its processes live, and what it has once it is lost."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(VllmLoop, started), name="rljob-vllm", daemon=True)
        self._thread.start()
        try:
            started.result(config.start_timeout_s)
        except TimeoutError as exc:
            raise DeadlineError(
                f"vLLM with {config.model_path} was not ready after {config.start_timeout_s:.0f} s; raise start_timeout_s"
            ) from exc

    @classmethod
    def prepare(cls, config: EngineConfig) -> None:
        """All of the start that needs no device: later an engine of this config starts in this process in a part of the time.

        Raises:
            ModelError: the environment is unfit, or vLLM cannot be imported.
            SetupError: vLLM does not take an argument of ``config.extra_args``.
        """
        if problems := environment_problems(config):
            raise ModelError(f"engine environment: {'; '.join(problems)}")
        model_infos.seed()
        try:
            with imports():
                from rljob_runtime.engine.vllm.preparing import prepare
        except ImportError as exc:
            raise ModelError(f"vLLM cannot be imported: {exc}; install rljob-runtime[cpu] or rljob-runtime[gpu]") from exc
        prepare(_with_parsed_arguments(config))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests and return at once; see ``Engine.submit``."""
        self._limits().check(requests)
        ids = {request.request_id for request in requests}
        with self._changed:
            self._raise_if_dead()
            if len(ids) != len(requests) or not ids.isdisjoint(self._known_ids):
                used = sorted(ids & self._known_ids) or "repeated in one call"
                raise DataError(f"submit: request ids are in use: {used}; give every request an id of its own")
            self._known_ids |= ids
            batch = tuple(requests)
            self._inbox.put(lambda loop: loop.add(batch))

    def collect(self, max_wait_s: float) -> CompletionBatch:
        """Finished responses, waiting for the first; see ``Engine.collect``."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._failure or self._needs_update(), max_wait_s)
            self._raise_if_dead()
            finished, self._finished = self._finished, []
            if not finished and self._needs_update():
                raise WeightSyncError(f"nothing is generated because {self._weights_undefined}; send a full update")
            self._known_ids.difference_update(completion.request_id for completion in finished)
        return pack(finished)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; see ``Engine.abort``."""
        ids = tuple(request_ids)
        with self._changed:
            self._raise_if_dead()
            self._inbox.put(lambda loop: loop.abort(ids))

    def clear(self, timeout_s: float) -> None:
        """End all requests and forget them; see ``Engine.clear``."""
        clear(self, self._uncollected, timeout_s)

    def salvage(self) -> CompletionBatch:
        """What is left of a lost engine; see ``Engine.salvage``. The engine's thread is not asked: it ended, or hangs."""
        with self._changed:
            self._failure = self._failure or "the engine was given up; start a new engine"
            finished, self._finished = self._finished, []
            self._changed.notify_all()
        return pack(finished if self.loop is None else finished + self.loop.salvage())

    def score(self, sequences: Sequence[tuple[int, ...]], timeout_s: float) -> list[tuple[float, ...]]:
        """Log-probs of given sequences; see ``Engine.score``."""
        self._limits().check_scored(sequences)
        if not sequences:
            return []
        batch = tuple(sequences)
        result: Future[list[tuple[float, ...]]] = Future()
        try:
            return self._call(result, lambda loop: loop.score(batch, result), timeout_s, f"scoring {len(batch)} sequences")
        except DeadlineError:
            self._inbox.put(lambda loop: loop.cancel_score(result))
            raise

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        """Make the engine's end of a transport; see ``Engine.prepare_receiver``."""
        with self._changed:
            self._raise_if_dead()
        self._leave_receiver()
        made: Receiver = make_end(receiver, **settings)  # may wait for the other side, so not under the lock
        self._receiver = made  # before its test, so that what a failed one leaves in workers is freed with it
        if tests := tuple(made.tests):
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            tested: Future[None] = Future()
            fetch = self._updating(tested, lambda loop: loop.check_transport(tests, deadline))
            self._call(tested, fetch, LOAD_TIMEOUT_S, "the test of a weight transport")

    def _leave_receiver(self) -> None:
        """Have this process and those of vLLM free what they hold for the present end of a transport."""
        left, self._receiver = self._receiver, PackedReceiver()
        left.close()
        if (holdings := left.holdings) is not None:
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            freed: Future[None] = Future()
            free = self._updating(freed, lambda loop: loop.leave_transport(holdings, deadline))
            self._call(freed, free, LOAD_TIMEOUT_S, "freeing what a weight transport held")

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        """Open an update; see ``Engine.begin_update``."""
        adapters = self._config.adapters
        expected = with_tied_head(self._expected, manifest) if adapters is None else fitting(manifest, self._expected, adapters.rank)
        incoming = self._receiver.begin(manifest, version, expected)
        with self._changed:
            self._raise_if_dead()
            self._incoming = incoming

    def load_bucket(self, bucket_index: int, data: ByteArray) -> None:
        """Take one bucket; see ``Engine.load_bucket``."""
        incoming = self._open_update("load_bucket")
        incoming.take(bucket_index, data)
        if incoming.streams:
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            loaded: Future[None] = Future()
            self._call(loaded, self._updating(loaded, lambda loop: loop.load_update(incoming, deadline)), LOAD_TIMEOUT_S, "loading weights")

    def finish_update(self, timeout_s: float, on_running: OnRunning = "recompute") -> int:
        """Put the received weights in place; see ``Engine.finish_update``."""
        incoming = self._open_update("finish_update")
        incoming.check()
        deadline = time.monotonic() + timeout_s
        result: Future[int] = Future()

        apply = self._updating(result, lambda loop: loop.apply_update(incoming, on_running, deadline))
        version = self._call(result, apply, timeout_s, f"the update to version {incoming.version}")
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
        deadline, wanted = time.monotonic() + timeout_s, frozenset(kinds)
        return self._switch(lambda loop: loop.offload(wanted, on_running, deadline), timeout_s, f"the offload of {names(wanted)}")

    def load(self, kinds: Collection[StateKind], timeout_s: float) -> SwitchReport:
        """Take memory again; see ``Engine.load``."""
        deadline, wanted = time.monotonic() + timeout_s, frozenset(kinds)
        return self._switch(lambda loop: loop.load(wanted, deadline), timeout_s, f"the load of {names(wanted)}")

    def residence(self) -> Mapping[StateKind, Residence]:
        """Where weights and cache are."""
        with self._changed:
            self._raise_if_dead()
            return dict(self._residence)

    def memory(self) -> MemorySnapshot:
        """Memory of the workers; see ``Engine.memory``."""
        result: Future[MemorySnapshot] = Future()
        return self._call(result, lambda loop: result.set_result(loop.memory()), MEMORY_TIMEOUT_S, "reading the memory")

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

    def shutdown(self) -> None:
        """End the engine; see ``Engine.shutdown``."""
        self._receiver.close()
        with self._changed:
            self._stopping = True
        self._inbox.put(None)
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the vLLM thread did not end within {SHUTDOWN_TIMEOUT_S:.0f} s; end the process")

    # -- the engine thread --------------------------------------------------------------------------------------------------------

    def _run(self, make_loop: type[VllmLoop], started: Future[None]) -> None:
        """Build the loop, then serve until shutdown. No exception leaves the thread: callers get it."""
        loop: VllmLoop | None = None
        try:
            loop = self.loop = make_loop(self._config)
            loop.on_process_end(lambda: self._fail(PROCESS_ENDED))
            self._vocab_size = loop.vocab_size
            self._publish(loop)
        except Exception as exc:
            logger.exception("vLLM cannot start")
            started.set_exception(ModelError(f"vLLM cannot start with {self._config.model_path}: {type(exc).__name__}: {exc}"))
            return
        started.set_result(None)
        try:
            self._serve(loop)
        except Exception as exc:
            logger.exception("the vLLM thread ended")
            if loop.process_ended():
                self._fail(PROCESS_ENDED)
            where = traceback.extract_tb(exc.__traceback__)[-1]
            self._fail(f"the vLLM thread ended: {type(exc).__name__}: {exc} (in {where.name}, line {where.lineno}); start a new engine")
        else:
            self._fail("the engine was shut down; start a new engine")
        finally:
            loop.close()

    def _serve(self, loop: VllmLoop) -> None:
        """Alternate between the inbox and steps; block on the inbox while there is nothing to compute."""
        while True:
            busy = loop.has_work()
            while not busy or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return
                command(loop)
                busy = loop.has_work()
                if not busy:
                    self._publish(loop)
            loop.step()
            self._publish(loop)

    def _publish(self, loop: VllmLoop) -> None:
        """Hand finished responses and the loop's state to the other threads, at once so that they agree."""
        counters, finished = loop.counters(), loop.take_finished()
        with self._changed:
            self._finished += finished
            self._stats = counters
            self._version = loop.version
            self._weights_undefined = loop.weights_undefined
            self._residence = loop.residence.states()
            if finished or self._needs_update():
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        """Wake everyone who waits, with the reason."""
        with self._changed:
            self._failure = self._failure or reason  # the first is the cause
            for future in self._pending:
                if not future.done():
                    future.set_exception(EngineDiedError(self._failure))
            self._changed.notify_all()

    # -- shared by the calling threads --------------------------------------------------------------------------------------------

    def _call(self, result: Future[ResultT], command: Callable[[VllmLoop], None], timeout_s: float, what: str) -> ResultT:
        """Have the engine thread run ``command`` and wait for ``result``."""
        with self._changed:
            self._raise_if_dead()
            self._pending.add(result)
            self._inbox.put(command)
        try:
            return result.result(timeout_s)
        except DeadlineError:
            raise
        except TimeoutError as exc:
            raise DeadlineError(f"engine: {what} took longer than {timeout_s:.1f} s; allow more time or look at the engine's log") from exc
        finally:
            with self._changed:
                self._pending.discard(result)

    def _updating(self, result: Future[ResultT], change: Callable[[VllmLoop], ResultT]) -> Callable[[VllmLoop], None]:
        """What the engine thread does to change weights. Callers go on once others can see the state that it left."""

        def run(loop: VllmLoop) -> None:
            try:
                changed = change(loop)
            except (WeightSyncError, DeadlineError) as exc:
                self._publish(loop)
                result.set_exception(exc)
            else:
                self._publish(loop)
                result.set_result(changed)

        return run

    def _switch(self, move: Callable[[VllmLoop], SwitchReport], timeout_s: float, what: str) -> SwitchReport:
        """Have the engine thread move memory. What breaks off half-way ends the thread, and with it every call."""
        result: Future[SwitchReport] = Future()

        def run(loop: VllmLoop) -> None:
            try:
                report = move(loop)
            except (EngineResidenceError, DeadlineError) as exc:
                result.set_exception(exc)
            else:
                self._publish(loop)  # before the caller goes on, so that it sees where everything is now
                result.set_result(report)

        return self._call(result, run, timeout_s, what)

    def _limits(self) -> RequestLimits:
        """What requests may ask."""
        config = self._config
        return RequestLimits(
            max_model_len=config.max_model_len,
            vocab_size=self._vocab_size,
            finds_texts=config.finds_texts,
            returns_routes=config.returns_routes,
        )

    def _needs_update(self) -> bool:
        """Whether only an update can bring responses; with something offloaded the engine is merely at rest."""
        return self._weights_undefined is not None and all(state is Residence.ON_DEVICE for state in self._residence.values())

    def _uncollected(self) -> frozenset[str]:
        """Ids of requests whose responses nobody has collected."""
        with self._changed:
            return frozenset(self._known_ids)

    def _raise_if_dead(self) -> None:
        """Raise when the engine ended; call with the condition held."""
        if self._failure is None and self.loop is not None and self.loop.process_ended():
            self._failure = PROCESS_ENDED
        if self._failure is not None:
            raise EngineDiedError(self._failure)
        if self._stopping:
            raise EngineDiedError("the engine is shutting down; start a new engine")

    def _open_update(self, method: str) -> IncomingUpdate:
        """The update in progress."""
        with self._changed:
            self._raise_if_dead()
            if self._incoming is None:
                raise WeightSyncError(f"{method}: no update is open; call begin_update first")
            return self._incoming


def _with_parsed_arguments(config: EngineConfig) -> EngineConfig:
    """The config with ``extra_args`` as vLLM holds them.

    Raises:
        SetupError: vLLM does not take one.
    """
    if not config.extra_args:
        return config
    values, unfit = arguments.parse(config.extra_args_path, config.extra_args)
    if unfit:
        raise SetupError("\n".join(str(problem) for problem in unfit))
    return dataclasses.replace(config, extra_args=values)
