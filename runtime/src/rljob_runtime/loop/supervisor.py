"""Replaces lost engines in place, one task per loss, beside the loop.

::

    fleet.lose ── lost ──> Replacements: a wait ──> what it still had is salvaged ──> new process ──> weights, probe ──> fleet.rejoin
                    │                                        devices of its own: in a task, beside everything else
                    └ no more                               devices it shares: when the driver calls `restore`, between two phases

| wait               | for                                       | bounded by              | then                          |
|--------------------|-------------------------------------------|-------------------------|-------------------------------|
| new process        | the model loaded                          | start_timeout_s         | tried again, or given up      |
| weights            | a trainer that holds them, else a sync    | weights_timeout_s       | tried again, or given up      |
| a process' end     | the end                                   | the whole run           | fleet.lose                    |
| an engine's answer | its counters, which are asked for at times| twice answer_timeout_s  | fleet.lose                    |

An engine whose process lives and answers nothing (it is stopped, or its machine swaps) is otherwise found out by those who need it
next: by a weight sync after the whole of its deadline.

An engine that is given up is what a lost one is without replacement: the others go on, or the run ends with the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import DeadlineError, RuntimeFault, WorkerLostError, WorkerStuckError
from rljob_runtime.loop.replacement import ReplacementLimits, Replacements
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.weightsync.publisher import WeightPublisher

StartEngine = Callable[[int, float], Awaitable[None]]
"""Starts an engine, by its index, whose process was ended, within so many seconds."""
EndEngine = Callable[[int], Awaitable[None]]
"""Ends what is left of an engine."""
Sending = Callable[[], AbstractAsyncContextManager[None]]
"""The trainer can send weights inside the block."""


@asynccontextmanager
async def at_once() -> AsyncIterator[None]:
    """Nothing has to happen around it."""
    yield


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDevices:
    """What has to happen around the start of an engine whose devices other components use, too."""

    engines: frozenset[int]
    """By index."""
    forget: Callable[[WorkerLostError], None]
    """The process of an engine that was lost is gone, and with it all it had there; called while nobody leases the devices."""
    clear: Callable[[int], Awaitable[None]]
    """Take what others have there off the devices of such an engine."""
    settle: Callable[[int], None]
    """The new process has its weights and cache there: it leases the devices as the old one did."""


class EngineSupervisor:
    """One per attempt of a job; ``connect`` before anything runs."""

    def __init__(
        self,
        engines: Sequence[Worker],
        *,
        start: StartEngine,
        end: EndEngine,
        limits: ReplacementLimits,
        notify: Callable[[str], None],
        shared: SharedDevices | None = None,
        sending: Sending = at_once,
        beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
    ) -> None:
        """Wire the parts.

        Args:
            engines: by index; each stands for whatever process replaces it.
            start: starts one again.
            end: ends the process of a lost one.
            limits: how often and how long.
            notify: takes a line for users.
            shared: engines on shared devices, which are replaced in :meth:`restore`.
            sending: around a transfer to a single engine.
            beside: run as long as :meth:`run`, such as those that keep processes ready for ``start``.
        """
        self._engines = engines
        self._start = start
        self._end = end
        self._limits = limits
        names = [engine.name for engine in engines]
        self._replacements = Replacements(names, limits, notify=notify, meanwhile="its responses go on with the tokens they have")
        self._shared = shared
        self._sending = sending
        self._beside = beside
        self._endings: dict[int, asyncio.Task[None]] = {}
        """Ends of processes of lost engines, done or under way."""
        self._watches: dict[int, tuple[asyncio.Task[None], ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self.wanted = asyncio.Event()
        """Set while an engine waits for :meth:`restore`."""

    def connect(self, fleet: EngineFleet, publisher: WeightPublisher | None) -> None:
        """Who hands out requests and who brings weights; without a publisher engines load their weights themselves."""
        self._fleet = fleet
        self._publisher = publisher

    def lost(self, index: int, error: WorkerLostError) -> bool:
        """An engine is lost; whether it is going to be replaced. The fleet calls it once for each loss."""
        if self._publisher is not None:
            self._publisher.leave_out(index, error)
        self._endings[index] = self._spawn(self._end_process(index))
        if not self._replacements.begin(index, error):
            return False
        if self._is_shared(index):
            self.wanted.set()
        elif self._running:  # else `run` begins it
            self._spawn(self._bring_back(index))
        return True

    def replaces(self, error: WorkerLostError) -> bool:
        """Whether this lost worker is an engine that is being replaced; where its loss is news the fleet learns of it.

        Raises:
            WorkerLostError: it is an engine that the run cannot do without.
        """
        found = next((index for index, engine in enumerate(self._engines) if engine.name == error.worker), None)
        if found is None:
            return False
        self._fleet.lose(found, error)
        return found in self._replacements.lost

    async def run(self) -> None:
        """Watch engines and replace what is lost until cancelled.

        Raises:
            RuntimeFault: an engine is lost that the run cannot do without.
        """
        self._running = True
        try:
            for keep in self._beside:
                self._spawn(keep())
            for index in range(len(self._engines)):
                self._watch(index)
            for index in [index for index in self._replacements.lost if not self._is_shared(index)]:
                self._spawn(self._bring_back(index))
            await self._failed.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            self._running = False
            for task in self._tasks:
                task.cancel()

    async def free_devices(self) -> None:
        """Lost engines no longer have anything on devices that they share. Call while nobody leases these, before others take them."""
        if self._shared is None:
            return
        for index, loss in list(self._replacements.lost.items()):
            if index in self._shared.engines:
                await asyncio.wait([self._endings[index]])
                self._shared.forget(loss.error)

    async def restore(self) -> bool:
        """Replace lost engines on shared devices; whether there were any, so that all weights have to be published again.

        Call while nobody uses these devices.

        Raises:
            RuntimeFault: one cannot be replaced, and the run cannot do without it.
        """
        if not self.wanted.is_set():
            return False
        await self.free_devices()
        while waiting := [index for index in sorted(self._replacements.lost) if self._is_shared(index)]:
            await self._bring_back(waiting[0])
        self.wanted.clear()
        return True

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call; none where nothing was replaced."""
        replaced, longest_s = self._replacements.take()
        return {"engine/replaced": float(replaced), "engine/replacement_s": longest_s} if replaced else {}

    def _is_shared(self, index: int) -> bool:
        return self._shared is not None and index in self._shared.engines

    async def _bring_back(self, index: int) -> None:
        """Replace an engine, as often as may be tried.

        Raises:
            RuntimeFault: it cannot be replaced, and the run cannot do without it.
        """
        failure = await self._replacements.bring_back(index, self._replace, self._end_again)
        if failure is not None:
            self._fleet.give_up(index, failure)
        else:
            self._fleet.rejoin(index)

    def _end_again(self, index: int) -> None:
        self._endings[index] = self._spawn(self._end_process(index))

    async def _end_process(self, index: int) -> None:
        """End what is left of a lost engine once nothing more is wanted of it; whoever still waits for an answer of it learns it then."""
        await self._fleet.released(index)
        for watch in self._watches.pop(index, ()):
            watch.cancel()
        await self._end(index)

    async def _replace(self, index: int) -> None:
        """A new process that serves what the others serve; on shared devices its weights come with the next sync of all."""
        await asyncio.wait([self._endings[index]])
        shared = self._shared if self._is_shared(index) else None
        if shared is not None:
            await shared.clear(index)
        await self._start(index, self._limits.start_timeout_s)
        self._watch(index)
        if shared is not None:
            shared.settle(index)
            if self._publisher is not None:
                self._publisher.join(index)
        elif self._publisher is not None:
            async with self._sending():
                served = await self._publisher.catch_up(index)
            if not served:
                await self._publisher.arrival(index, self._limits.weights_timeout_s)

    def _watch(self, index: int) -> None:
        self._watches[index] = (self._spawn(self._until_end(index)), self._spawn(self._until_silent(index)))

    async def _until_end(self, index: int) -> None:
        """Learn of the end of an engine's process.

        Raises:
            WorkerLostError: the run cannot do without it.
        """
        try:
            await self._engines[index].watch()
        except WorkerLostError as error:
            self._learned(index, error)

    async def _until_silent(self, index: int) -> None:
        """Learn of an engine that does not answer although its process lives.

        It is asked twice: after a pause of the driver's own process the first deadline is over before the answer is looked at.

        Raises:
            WorkerLostError: the run cannot do without it.
        """
        engine, silent = self._engines[index], 0
        while silent < 2:
            if not silent:
                await asyncio.sleep(self._limits.ask_every_s)
            try:
                await engine.call("stats", timeout_s=self._limits.answer_timeout_s)
                silent = 0
            except DeadlineError:
                silent += 1
            except RuntimeFault:  # its end, or that of its thread: others learn of it with its cause
                return
        silence = f"its process lives, but has not answered for {2 * self._limits.answer_timeout_s:g} s"
        self._learned(index, WorkerStuckError(engine.name, silence, engine.log_file))

    def _learned(self, index: int, error: WorkerLostError) -> None:
        if index not in self._replacements.lost:
            self._fleet.lose(index, error)
        elif self._publisher is not None:  # it waits for weights
            self._publisher.leave_out(index, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            self._failed.set()
