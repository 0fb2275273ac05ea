"""Workers of this process whose calls cost the driver the serialization that Ray makes, and nothing else."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class Elsewhere:
    """Seconds that the event loop's thread spent on what other processes do in a real job."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __enter__(self) -> None:
        """Begin; not reentrant."""
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def __exit__(self, *failure: object) -> None:
        """Count."""
        self.wall_s += time.perf_counter() - self._wall_s
        self.cpu_s += time.thread_time() - self._cpu_s

    _wall_s: float = 0.0
    _cpu_s: float = 0.0


ELSEWHERE = Elsewhere()
_SHARED_MEMORY = np.ones(64 << 20, dtype=np.uint8)
"""Where out-of-band buffers of arguments are copied to, over and over: in a job that is Ray's object store."""


def send(value: object) -> None:
    """What it costs to hand a value to Ray: the pickle, and a copy of its buffers, which lets other threads in as Ray's does."""
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    for buffer in buffers:
        with buffer.raw() as raw:
            source = np.frombuffer(raw, dtype=np.uint8)
            for start in range(0, source.size, _SHARED_MEMORY.size):
                part = source[start : start + _SHARED_MEMORY.size]
                _SHARED_MEMORY[: part.size] = part
            del source, part


def packed(value: object) -> tuple[bytes, list[bytes]]:
    """A value as it travels to the driver."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return body, [bytes(buffer.raw()) for buffer in buffers]


@dataclass(frozen=True, slots=True)
class Shared:
    """Stands for a value that was sent before."""

    value: Any


class Call:
    """A call under way: the target runs when its answer is asked for."""

    def __init__(self, target: Any, method: str, args: tuple[Any, ...]) -> None:
        """Made by the worker."""
        self._target = target
        self._method = method
        self._args = args

    async def result(self, timeout_s: float) -> Any:
        """The answer, made elsewhere, read here."""
        await asyncio.sleep(0)
        answer = getattr(self._target, self._method)(*(arg.value if isinstance(arg, Shared) else arg for arg in self._args))
        if asyncio.iscoroutine(answer):
            answer = await answer
        with ELSEWHERE:
            body, buffers = packed(answer)
            del answer  # a megabyte goes back to the system in the process that made it, not in the driver
        return pickle.loads(body, buffers=buffers)


class Worker:
    """A scripted worker; its methods count their own time as spent elsewhere."""

    log_file = ""

    def __init__(self, name: str) -> None:
        """Remember the name."""
        self.name = name

    def start(self, method: str, *args: Any) -> Call:
        """Begin a call; another call, and what was shared, travel as references."""
        for arg in args:
            if not isinstance(arg, Call | Shared):
                send(arg)
        return Call(self, method, args)

    def share(self, value: Any) -> Any:
        """Sent once; what stands for it is small."""
        send(value)
        return Shared(value)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``start`` and ``result`` in one."""
        return await self.start(method, *args).result(timeout_s)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """No network is used."""
        return "127.0.0.1", 0

    async def watch(self) -> None:
        """It lives as long as this process."""
        await asyncio.Event().wait()

    async def drained(self) -> None:
        """It is in no pod."""
        await asyncio.Event().wait()
