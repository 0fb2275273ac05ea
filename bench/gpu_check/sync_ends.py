"""The two processes of ``transports``: a trainer rank, and an engine that keeps the weights it gets, each serving calls from a pipe."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu_check import ranks
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.copies import Kept
from rljob_runtime.weightsync.packing import as_byte_tensor, unpack
from rljob_runtime.weightsync.parcel import Payload, Remote, checksum, view
from rljob_runtime.weightsync.patching import Places, Region, write_changes
from rljob_runtime.weightsync.shared_memory import SharedBytes
from rljob_runtime.weightsync.staging import Staging, staging_for
from rljob_runtime.weightsync.transport import IncomingUpdate, make_end


class Trainer:
    """The trainer's own worker, and what the check asks besides."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Set the worker up, alone in its group."""
        from rljob_api.vocabulary import LayerCompilation
        from rljob_runtime.training.config import PolicyConfig
        from rljob_runtime.training.worker import PolicyWorker

        self._plan = settings
        config = PolicyConfig(**settings["policy"], layer_compilation=LayerCompilation.DISABLED)  # for two steps it would not pay
        self.worker = PolicyWorker(config, 0, 1)
        self.worker.setup("127.0.0.1", settings["port"], settings["wait_s"])

    def __getattr__(self, name: str) -> Any:
        """Calls of a transport go to the worker."""
        return getattr(self.worker, name)

    def step(self) -> float:
        """Change the weights; the gradient norm."""
        return self.worker.train_step([ranks.sequences(self._plan, False, slice(None))], 0)["train/grad_norm"]

    def sums(self, manifest: Any) -> dict[str, int]:
        """Of the bytes of every parameter as engines should have it."""
        found: dict[str, int] = {}
        for bucket in manifest.buckets:
            found |= {name: total(tensor) for name, tensor in unpack(bucket, self.worker.pack_buckets({0: bucket}))}
        return found


class Receiver(FakeEngine):
    """An engine without a model: real receivers, and tensors on a device in place of a model's."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Nothing has come yet."""
        super().__init__()
        self._devices = settings["devices"]
        self._device = torch.device("cpu")
        self._staging: Staging | None = None
        self._held: dict[str, torch.Tensor] = {}

    def use(self, index: int | None) -> None:
        """What the engine computes on."""
        self._device = torch.device("cpu") if index is None else torch.device("cuda", index % self._devices)
        if self._staging is not None:
            self._staging.close()
        self._staging = staging_for(self._device)
        self._held.clear()

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        """As the engine's processes, which fetch the tests by themselves."""
        self._receiver.close()
        made = make_end(receiver, **settings)
        for test in made.tests:
            self._bytes_of(test)
        self._receiver = made

    def sums(self, manifest: Any) -> dict[str, int]:
        """Of the bytes of every parameter that has come."""
        del manifest
        return {name: total(tensor) for name, tensor in self._held.items()}

    def _bytes_of(self, payload: Payload) -> torch.Tensor:
        if isinstance(payload, Remote):
            return payload.fetch(0, self._device)
        if self._staging is not None and isinstance(payload, SharedBytes):
            return self._staging.onto(payload)
        return as_byte_tensor(view(payload))

    def _places(self, bucket: Bucket) -> Places:
        """Each tensor as a parameter of its own."""
        found = {}
        for slot in bucket.slots:
            tensor = self._held[slot.name]
            region = Region.of(tensor.shape, 0, tensor.stride(), 0, tensor.stride())
            assert region is not None
            found[slot.name] = [(tensor, region)]
        return found

    def _load(self, incoming: IncomingUpdate, deadline: float) -> None:
        """Of buckets that come to a device every other one is written as by workers of vLLM; the others are loaded from their copies."""
        for bucket, payload in incoming.receive(deadline):
            if isinstance(payload, Kept) and bucket.index % 2 == 0:
                if payload.base is not None:
                    write_changes(self._places(bucket), bucket, self._bytes_of(payload.arriving))
                    continue
                payload = payload.arriving
            data = self._bytes_of(payload).to(self._device)
            for name, tensor in unpack(bucket, data):
                if name in self._held:
                    self._held[name].copy_(tensor)
                else:
                    self._held[name] = tensor.clone()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was lent may be written again


def total(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return checksum(np.ascontiguousarray(flat.view(torch.uint8).numpy()))


def serve(rank: int, kind: str, settings: Mapping[str, Any], calls: Any) -> None:
    """In a process of its own: see :func:`answer_calls`."""
    torch.set_num_threads(1)
    ranks.environment(rank, settings["devices"])
    answer_calls(lambda: Trainer(settings) if kind == "trainer" else Receiver(settings), calls)


def answer_calls(make: Callable[[], object], calls: Any) -> None:
    """Make an object, and answer ``(method, arguments)`` with ``(value, None)`` or ``(None, error)``, until the other end is closed."""
    try:
        target = make()
    except Exception as error:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        calls.send((None, _sendable(error)))
        return
    calls.send((None, None))
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        try:
            calls.send((getattr(target, method)(*arguments), None))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            traceback.print_exc()
            calls.send((None, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    """Of the runtime's own errors the class, which transports look at."""
    from rljob_runtime.errors import DeadlineError, WeightSyncError

    known = isinstance(error, WeightSyncError | DeadlineError)
    return type(error)(str(error)) if known else RuntimeError(f"{type(error).__name__}: {error}")


class EndedError(RuntimeError):
    """The process of an object has ended; its error stands above."""


class Proxy:
    """An object of another process, by its pipe; one call at a time."""

    def __init__(self, calls: Any, wait_s: float) -> None:
        """Once the process has made the object."""
        self._calls, self._wait_s = calls, wait_s
        self._answer("start")

    def __getattr__(self, name: str) -> Any:
        """Any method."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            self._calls.send((method, arguments))
        except OSError as error:
            raise EndedError(f"{method} could not be called: {error}") from error
        return self._answer(method)

    def _answer(self, method: str) -> Any:
        if not self._calls.poll(self._wait_s):
            raise TimeoutError(f"{method} did not return in {self._wait_s:.0f} s")
        try:
            value, error = self._calls.recv()
        except (EOFError, OSError) as ended:
            raise EndedError(f"{method} was not answered: the process ended") from ended
        if error is not None:
            raise error
        return value
