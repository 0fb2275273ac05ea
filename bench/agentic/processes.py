"""An object in a process of its own behind the interface that the driver's parts know workers by; no Ray."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import multiprocessing
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

STOP_TIMEOUT_S = 30.0


class ProcessWorker:
    """Calls may overlap: each runs in a thread of the process."""

    log_file = ""

    def __init__(self, name: str, factory: str, *arguments: Any) -> None:
        """Start the process; it makes its object by ``module:function``. The first call waits for that."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        threading.Thread(target=self._receive, name=name, daemon=True).start()

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The value of a method; raises what it raised, TimeoutError after ``timeout_s``."""
        number, answer = next(self._numbers), Future[Any]()
        self._pending[number] = answer
        self._connection.send((number, method, arguments))
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(answer)

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(STOP_TIMEOUT_S)

    def _receive(self) -> None:
        try:
            while True:
                number, value, error = self._connection.recv()
                answer = self._pending.pop(number)
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error) if error is not None else answer.set_result(value)
        except (EOFError, OSError):
            for answer in self._pending.values():
                answer.cancel()


def _serve(connection: Connection, factory: str, arguments: tuple[Any, ...]) -> None:
    module, _, name = factory.partition(":")
    target = getattr(importlib.import_module(module), name)(*arguments)
    sending = threading.Lock()

    def answer(number: int, done: Future[Any]) -> None:
        error = done.exception()
        with sending:
            connection.send((number, None if error else done.result(), error))

    with ThreadPoolExecutor(8) as threads:
        while True:
            try:
                number, method, given = connection.recv()
            except EOFError:
                return
            threads.submit(getattr(target, method), *given).add_done_callback(partial(answer, number))
