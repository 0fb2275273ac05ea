"""An object of this process as a worker: for loops on one device, notebooks and tests; nothing is started or pickled."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rljob_runtime.cluster.ports import held_port
from rljob_runtime.errors import CallDeadlineError, EngineDiedError, EngineLostError, RuntimeFault, WorkerFailedError, WorkerLostError


class InProcessWorker:
    """Methods of an object, run in one thread of their own, one after the other."""

    def __init__(self, name: str, target: object, *, log_file: str = "") -> None:
        """``target`` must not be used elsewhere from now on; ``log_file`` is for messages."""
        self.name = name
        self.log_file = log_file
        self.target = target
        """What calls go to; another one takes its place as a new process takes that of a lost one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._stopped = False

    def start(self, method: str, *args: Any) -> InProcessCall:
        """Begin a call once those before it are done; arguments that are calls of this class are replaced by their values.

        Raises:
            WorkerLostError: after :meth:`stop`.
        """
        if self._stopped:
            raise self.lost()
        return InProcessCall(self, method, self._thread.submit(self._run, method, args))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``start`` and ``result`` in one."""
        return await self.start(method, *args).result(timeout_s)

    def share(self, value: Any) -> Any:
        """The value itself: nothing is sent."""
        return value

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """This machine and a port that is held."""
        return "127.0.0.1", held_port("127.0.0.1")

    async def watch(self) -> None:
        """It lives as long as this process."""
        await asyncio.Event().wait()

    async def drained(self) -> None:
        """It is in no pod."""
        await asyncio.Event().wait()

    def stop(self) -> None:
        """End the thread after the call under way; others are given up. May be called twice."""
        self._stopped = True
        self._thread.shutdown(cancel_futures=True)

    def lost(self) -> WorkerLostError:
        """What a call gets that comes too late."""
        return WorkerLostError(self.name, "stopped", self.log_file)

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.target, method)(*(a.future.result() if isinstance(a, InProcessCall) else a for a in args))


class InProcessCall:
    """A call under way."""

    def __init__(self, worker: InProcessWorker, method: str, future: Future[Any]) -> None:
        """Made by the worker."""
        self.future = future
        self._worker = worker
        self._method = method

    async def result(self, timeout_s: float) -> Any:
        """Wait for the value; the call itself goes on when the wait ends early.

        Raises:
            CallDeadlineError: after ``timeout_s``.
            WorkerFailedError: it raised something that is not of the runtime's own tree, which comes as it is.
            WorkerLostError: the worker was stopped before it began.
        """
        worker, done = self._worker, asyncio.wrap_future(self.future)
        done.add_done_callback(lambda over: over.cancelled() or over.exception())  # seen, also where no one waits any more
        finished, _ = await asyncio.wait([done], timeout=timeout_s)
        if done.cancelled():
            raise worker.lost()
        if not finished:
            raise CallDeadlineError(worker.name, self._method, f"{timeout_s:g} s", worker.log_file)
        error = done.exception()
        if isinstance(error, EngineDiedError):
            raise EngineLostError(worker.name, str(error), worker.log_file) from error
        if error is None or isinstance(error, RuntimeFault):
            return done.result()
        raise WorkerFailedError(worker.name, self._method, f"{type(error).__name__}: {error}", worker.log_file) from error
