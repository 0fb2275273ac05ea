"""New weights on their way into vLLM's model, between two steps; only the engine's own thread calls it.

An update opens with its first ``load`` and closes with ``finish``. One that streams loads each bucket as it comes, others load all at once.
One that broke off leaves weights that are neither the old nor the new ones, until a full update succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.engine.exceptions import EngineDeadError

from rljob_runtime.engine.residence import DISCARDED
from rljob_runtime.engine.vllm.patched_updates import Call, PatchedUpdates
from rljob_runtime.engine.vllm.weight_receiver import (
    attempted,
    fetch_tests,
    leave_transport,
    plan_of,
    start_proven,
    start_recorded,
    start_update,
    write_constants,
)
from rljob_runtime.errors import CorruptedWeightsError, DeadlineError, RuntimeFault, SyncBrokenError, WeightSyncError, WholeNeededError
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.parcel import CHANGED, NOT_OPENED, SEND_WHOLE, Remote
from rljob_runtime.weightsync.transport import IncomingUpdate
from rljob_runtime.weightsync.transports.tested import TEST_VERSION

DEVICE_ERRORS = ("CUDA error", "HIP error", "NCCL error")
"""Parts of torch's error texts; the last one is about communication, not about the device itself."""
OF_TRANSPORT = "of the group of trainer rank"
"""In errors of a transport's own group, where what NCCL says of a lost peer is no end: the next group may be whole."""

OWN_ERRORS = tuple(f"{kind.__name__}:" for kind in (WeightSyncError, SyncBrokenError, DeadlineError))
"""How errors of this project begin in the text of :func:`~rljob_runtime.engine.vllm.weight_receiver.attempted`."""


class WeightUpdates:
    """Brings one update after the other into the model. Not thread-safe."""

    def __init__(
        self, core: Any, process_ended: Callable[[], bool], patched: PatchedUpdates, then: Callable[[Any], None] | None = None
    ) -> None:
        """Wire the parts.

        Args:
            core: vLLM's engine core.
            process_ended: whether a process that computes a shard of the model has ended.
            patched: what writes updates into the parameters.
            then: what every worker does at the end of an update.
        """
        self.patched = patched
        self._writes = False
        """Whether the open update is written into the parameters, not loaded."""
        self._records = False
        self._proves = False
        """Whether it is loaded, and compared with what would have been written."""
        self._then = then
        self._core = core
        self._process_ended = process_ended
        self._open: IncomingUpdate | None = None
        self._opened_s = 0.0
        self._loaded = 0
        """Buckets of the open one; several senders' come in any order."""
        self.undefined: str | None = None
        """Why nothing may be generated until a full update succeeds; None in normal times."""
        self.finished = 0
        self.last_bytes = 0
        """Of the last one, as they traveled."""
        self.last_s = 0.0
        """Of the last one, from its first bucket to its end: the engine stood still."""

    def is_open(self, incoming: IncomingUpdate | None = None) -> bool:
        """Whether an update, or this one, has begun to change the model."""
        return self._open is not None and (incoming is None or self._open is incoming)

    @property
    def _may_write(self) -> bool:
        """An update that broke off may have left vLLM's layers without parameters; those that were discarded are there."""
        return self.undefined is None or (self.undefined == DISCARDED and self.patched.fills_all)

    def discard(self) -> None:
        """The parameters have lost their numbers, and keep their places."""
        self.undefined = self.undefined or DISCARDED
        self.patched.broke_off()

    def test(self, tests: Sequence[Remote], deadline: float) -> None:
        """Have every worker fetch what is not loaded; errors are those of :meth:`load`."""
        self._rpc(fetch_tests, (tuple(tests),), TEST_VERSION, deadline)

    def leave_transport(self, holdings: Holdings, deadline: float) -> None:
        """Have every worker free what it holds of a transport; errors are those of :meth:`load`."""
        self._rpc(leave_transport, (holdings,), TEST_VERSION, deadline)
        self.patched.forget_copies()

    def load(self, incoming: IncomingUpdate, deadline: float) -> None:
        """Load what has come.

        Raises:
            WeightSyncError: vLLM refused, so that a full update may go better; of the kind WholeNeededError where changes came of weights
                that are not here.
            DeadlineError: the deadline passed.
            RuntimeFault: a process or a device is lost, and with it the engine.
        """
        try:
            if not self.is_open(incoming):
                if self._open is not None and not self._writes:  # nobody sends the rest; vLLM begins none before it has ended this one
                    self._rpc("finish_weight_update", (), self._open.version, deadline)
                self._open, self._opened_s, self._loaded = incoming, time.perf_counter(), 0
                self._writes = self._may_write and self.patched.writes(incoming)
                self._records = not self._writes and self.patched.records(incoming)
                self._proves = not self._writes and self.patched.proves(incoming)
                was_discarded, self.undefined = self.undefined == DISCARDED, f"the update to version {incoming.version} broke off"
                if self._writes and was_discarded:
                    self._rpc(write_constants, (), incoming.version, deadline)
                if not self._writes:
                    self.patched.broke_off()
                    start = start_recorded if self._records else start_proven if self._proves else start_update
                    self._rpc(start, (), incoming.version, deadline)
            for bucket, payload in incoming.receive(deadline):
                self._loaded += 1
                if self._writes:
                    self.patched.write(bucket, payload, incoming.version, self._calling(incoming, deadline))
                    continue
                whole, last = self.patched.whole_of(bucket, payload), self._loaded == len(incoming.manifest.buckets)
                self._rpc("update_weights", ({"bucket": bucket, "payload": whole, "last": last},), incoming.version, deadline)
                self.patched.loaded(bucket.index, incoming.version)
        except BaseException:
            self._open = None
            self.patched.broke_off()
            raise

    def finish(self, incoming: IncomingUpdate, deadline: float) -> None:
        """Put what was loaded in place; errors are those of :meth:`load`."""
        try:
            if self._writes:
                self.patched.finish(incoming, self._calling(incoming, deadline))
            else:
                self._rpc("finish_weight_update", (), incoming.version, deadline)
                if self._records:
                    self.patched.recorded(self._ask(plan_of, (), plan_of.__name__, incoming.version, deadline))
                if self._proves:
                    self.patched.compare(self._calling(incoming, deadline))
            if self._then is not None:
                self._rpc(self._then, (), incoming.version, deadline)
        except BaseException:
            self.patched.broke_off()
            raise
        finally:
            self._open = None
        self._core.set_weight_version(str(incoming.version))
        self.last_bytes = incoming.received_bytes

    def closed(self) -> None:
        """The engine can serve the new weights."""
        self.undefined = None
        self.finished += 1
        self.last_s = time.perf_counter() - self._opened_s

    def _calling(self, incoming: IncomingUpdate, deadline: float) -> Call:
        """What calls every worker for an update."""
        return lambda method, arguments: self._rpc(method, arguments, incoming.version, deadline)

    def _rpc(self, method: str | Callable[..., None], arguments: tuple[object, ...], version: int, deadline: float) -> None:
        """Call a method of every worker, or a function with it; vLLM's errors become ours here."""
        name = method if isinstance(method, str) else method.__name__
        answers = self._ask(attempted, (method, arguments), name, version, deadline)
        if said := list(dict.fromkeys(answer for answer in answers if answer is not None)):
            raise self._error(version, name, said)

    def _ask(self, function: Callable[..., Any], arguments: tuple[object, ...], name: str, version: int, deadline: float) -> list[Any]:
        """What every worker answers; vLLM's own errors become ours here."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"update to version {version}: the deadline passed before {name}; allow more time and send it again")
        try:
            answers: list[Any] = self._core.collective_rpc(function, left_s, arguments)
        except TimeoutError as exc:
            # Of several processes: the late answers would be taken for answers to later calls, so the engine is of no use any more.
            raise RuntimeFault(f"update to version {version}: {name} was not done in {left_s:.0f} s: {exc}") from exc
        except Exception as exc:
            is_over = isinstance(exc, torch.AcceleratorError | EngineDeadError)
            raise self._error(version, name, [f"{type(exc).__name__}: {exc}"], is_over=is_over) from exc
        return answers

    def _error(self, version: int, name: str, said: Sequence[str], *, is_over: bool = False) -> RuntimeFault:
        """What ranks, or the executor, said of a call, to the engine's callers."""
        text = "; ".join(said)
        if is_over or self._process_ended() or any(map(_is_fatal, said)):
            return RuntimeFault(f"update to version {version}: {name} failed: {text}")
        if CHANGED in text:
            kind: type[WeightSyncError] = CorruptedWeightsError
        elif SEND_WHOLE in text:
            kind = WholeNeededError
        elif version != TEST_VERSION and (self._records or self._proves) and not text.startswith(OWN_ERRORS):
            # It may be the watching that failed, and not the load: it is left out when the update comes again.
            self.patched.refuse(text)
            kind = WholeNeededError
        else:
            kind = WeightSyncError
        return kind(f"update to version {version}: {name} failed in a worker of vLLM: {text}; send a full update")


def _is_fatal(text: str) -> bool:
    """Whether no later call can succeed in the process that says so: an error of the device stays until the process ends.

    Not so where a handle of another process's memory was refused, as between containers that share no IPC namespace: weights go another way
    then. If the device is broken already, the next call fails and reports it.
    """
    errors = () if NOT_OPENED in text else DEVICE_ERRORS[:-1] if OF_TRANSPORT in text else DEVICE_ERRORS
    return any(known in text for known in errors)
