"""The router of episodes: places at workers, and its end when it is cancelled, whatever happens to a worker at that moment."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rljob_runtime.environments.messages import EpisodeReply, EpisodeStart
from rljob_runtime.errors import WorkerLostError
from rljob_runtime.loop.environment_replacer import EnvironmentReplacer
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.overlap.environment_router import EnvironmentRouter


class Worker:
    """Plays nothing, until its process dies."""

    name = "games-0"
    log_file = "games.log"

    def __init__(self) -> None:
        self.dead = asyncio.Event()
        self.starts = 0

    async def call(self, method: str, *args: Any, timeout_s: float) -> object:
        if method == "collect":
            await self.dead.wait()
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        return None

    async def start(self, index: int, timeout_s: float) -> None:
        self.starts += 1
        self.dead = asyncio.Event()

    async def end(self, index: int) -> None:
        pass


class Player:
    def on_replies(self, replies: object) -> None:
        pass

    def on_lost(self, episode_ids: object) -> None:
        pass


@pytest.mark.parametrize("passes", range(12))
async def test_a_worker_lost_while_the_run_ends_is_not_replaced_for_long(passes: int) -> None:
    """The end comes some passes of the event loop after the loss: before, while and after the router deals with it."""
    worker = Worker()
    limits = ReplacementLimits(max_restarts=3, start_timeout_s=5)
    replacer = EnvironmentReplacer(["games-0"], start=worker.start, end=worker.end, limits=limits, notify=lambda text: None)
    router = EnvironmentRouter([worker], timeouts_s={"lake": 60.0}, replace=replacer.replace)  # type: ignore[list-item]
    running = asyncio.ensure_future(router.run())
    router.start(EpisodeStart(episode_id="e", environment="lake", seed=1), Player())  # type: ignore[arg-type]
    for _ in range(20):
        await asyncio.sleep(0)
    worker.dead.set()
    for _ in range(passes):
        await asyncio.sleep(0)
    running.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert running.done()
    with pytest.raises(asyncio.CancelledError):
        await running


class Games:
    """Ends episodes when asked to."""

    log_file = "games.log"

    def __init__(self, name: str) -> None:
        self.name = name
        self.started: list[str] = []
        self.replies: asyncio.Queue[EpisodeReply] = asyncio.Queue()

    async def call(self, method: str, *args: Any, timeout_s: float) -> object:
        if method == "collect":
            return [await self.replies.get()]
        self.started += [message.episode_id for message in args[0] if isinstance(message, EpisodeStart)]
        return None

    def end(self, episode_id: str) -> None:
        self.replies.put_nowait(EpisodeReply(episode_id=episode_id, token_ids=np.zeros(0, dtype=np.int32), done=True))


async def test_episodes_without_a_place_wait_in_line_and_begin_when_one_ends_or_is_given_up() -> None:
    """Two workers with one place for an agent each, and any number for a lake."""
    workers, player = [Games("games-0"), Games("games-1")], Player()
    router = EnvironmentRouter(workers, timeouts_s={"agent": 60.0, "lake": 60.0}, places={"agent": 1})  # type: ignore[arg-type]
    running = asyncio.ensure_future(router.run())

    async def started() -> list[list[str]]:
        for _ in range(20):
            await asyncio.sleep(0)
        return [worker.started for worker in workers]

    for number in range(5):
        router.start(EpisodeStart(episode_id=f"a{number}", environment="agent", seed=1), player)
    router.start(EpisodeStart(episode_id="l", environment="lake", seed=1), player)
    assert await started() == [["a0", "l"], ["a1"]]
    router.end("a2")  # in line
    workers[1].end("a1")
    assert await started() == [["a0", "l"], ["a1", "a3"]]
    router.end("a0")
    assert await started() == [["a0", "l", "a4"], ["a1", "a3"]]
    running.cancel()
