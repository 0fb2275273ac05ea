"""Workers inside this process, for tests: the same calls, errors and hand-over as on Ray, no processes.

Calls of one worker run in threads, at most ``concurrency`` at a time, in the order they were started.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rljob_api.plan import Plan
from rljob_runtime.cluster.protocol import Worker, WorkerSpec
from rljob_runtime.errors import DeadlineError, RuntimeFault, WorkerFailedError, WorkerLostError


class LocalCluster:
    """Implements the Cluster protocol with threads; ``factories`` may replace classes by name for tests."""

    def __init__(self, factories: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """``factories`` maps ``module:Class`` to what is constructed instead."""
        self._factories = dict(factories or {})
        self.workers: dict[str, LocalWorker] = {}

    async def start(self, plan: Plan, timeout_s: float) -> None:
        """Nothing to bring up."""

    async def start_workers(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Worker]:
        """Construct the workers one after another."""
        created: list[Worker] = []
        for spec in specs:
            factory = self._factories.get(spec.factory) or _imported(spec.factory)
            worker = LocalWorker(spec, factory(**spec.kwargs))
            self.workers[spec.name] = worker
            created.append(worker)
        return created

    async def stop(self) -> None:
        """End the threads."""
        for worker in self.workers.values():
            worker.close()


class LocalWorker:
    """Implements the Worker protocol over an object of this process."""

    def __init__(self, spec: WorkerSpec, target: Any) -> None:
        """Wrap ``target``."""
        self.name = spec.name
        self.log_file = f"{spec.name}.log"
        self.target = target
        self.lost: str | None = None
        self._gone = asyncio.Event()
        self._threads = ThreadPoolExecutor(max_workers=spec.concurrency, thread_name_prefix=spec.name)

    def start(self, method: str, *args: Any) -> LocalPending:
        """See the protocol."""
        return LocalPending(self, method, self._threads.submit(self._run, method, args))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See the protocol."""
        return await self.start(method, *args).result(timeout_s)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """Loopback; no port is needed inside one process."""
        return "127.0.0.1", 0

    async def watch(self) -> None:
        """Waits until a test calls :meth:`lose`."""
        await self._gone.wait()
        raise WorkerLostError(self.name, self.lost or "", self.log_file)

    def lose(self, exit_detail: str) -> None:
        """Look dead from now on."""
        self.lost = exit_detail
        self._gone.set()

    def close(self) -> None:
        """End its threads without waiting for calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        values = [a.future.result() if isinstance(a, LocalPending) else a for a in args]
        if self.lost is not None:
            raise WorkerLostError(self.name, self.lost, self.log_file)
        return getattr(self.target, method)(*values)


class LocalPending:
    """Implements the Pending protocol over a thread's future."""

    def __init__(self, worker: LocalWorker, method: str, future: Future[Any]) -> None:
        """Remember whose call it is."""
        self._worker = worker
        self._method = method
        self.future = future

    async def result(self, timeout_s: float) -> Any:
        """See the protocol."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.future), timeout_s)
        except RuntimeFault:
            raise
        except TimeoutError as error:
            raise DeadlineError(f"worker {self._worker.name} did not finish {self._method} within {timeout_s:.0f} s") from error
        except Exception as error:
            raise WorkerFailedError(self._worker.name, self._method, f"{type(error).__name__}: {error}", self._worker.log_file) from error


def _imported(factory: str) -> Callable[..., Any]:
    module_name, _, class_name = factory.partition(":")
    target: Callable[..., Any] = getattr(importlib.import_module(module_name), class_name)
    return target
