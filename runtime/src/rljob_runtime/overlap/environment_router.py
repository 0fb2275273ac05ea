"""Spreads episodes over the environment workers and brings the replies back.

::

    EpisodePlayer ── start ──> the worker with the fewest episodes: submit ... collect ──> EpisodePlayer.on_replies
                               (or a line, while no worker has a place for another episode of this environment)
                  ── act, end ──> the worker that has the episode

| wait        | for                          | bounded by                               | then                           |
|-------------|------------------------------|------------------------------------------|--------------------------------|
| submit      | a worker takes messages      | CALL_TIMEOUT_S                           | it is lost, as stuck           |
| collection  | a reply to each message      | the episode's own limit, REPLY_SPARE_S   | it is lost, as stuck           |
| stacks      | what a stuck one does        | STACKS_TIMEOUT_S                         | nothing waits longer           |
| replacement | another process              | what replaces it                         | the others go on, or the error |
| line        | a place at a worker          | the limits of the episodes there         | the first in line begins       |

A worker replies to every message by its episode's limit of time at the latest, whatever the environment does: one that does not is stuck.
A lost worker gives its episodes back (``on_lost``): they begin again at the others, or wait for the one that replaces it where no other is
left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.environments.messages import EpisodeAction, EpisodeEnd, EpisodeReply, EpisodeStart
from rljob_runtime.errors import DeadlineError, RuntimeFault, WorkerLostError, WorkerStuckError
from rljob_runtime.overlap.fleet_engine import CALL_TIMEOUT_S, COLLECT_WAIT_S, now_s
from rljob_runtime.overlap.occupancy import BusySpans
from rljob_runtime.overlap.until_lost import until_lost

REPLY_SPARE_S = 120.0
"""Beyond the limit of time of an episode until its worker is stuck."""
CHECK_EVERY_S = 1.0
"""How often overdue replies are looked for."""
STACKS_TIMEOUT_S = 10.0
"""Deadline of the last call to a stuck worker, which may answer."""

Message = EpisodeStart | EpisodeAction | EpisodeEnd
Replacement = Awaitable[RuntimeFault | None]
"""Done when another process has taken a lost worker's place, or with the error for which it is given up; what was left has ended then."""
Replace = Callable[[int, WorkerLostError], Replacement]
"""Replaces a worker, by its index, that was lost in this way."""


class Player(Protocol):
    """Whose episodes are played."""

    def on_replies(self, replies: list[EpisodeReply]) -> None:
        """Take replies to its episodes; must not wait."""

    def on_lost(self, episode_ids: list[str]) -> None:
        """These are gone with their worker; must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Playing:
    """An episode at a worker."""

    player: Player
    environment: str
    timeout_s: float
    began_s: float

    def due_s(self, sent_s: float) -> float:
        """When the reply to a message sent then is overdue."""
        return max(self.began_s + self.timeout_s, sent_s) + REPLY_SPARE_S


@dataclass(slots=True, eq=False)
class _Host:
    worker: Worker
    episodes: dict[str, _Playing] = field(default_factory=dict)
    playing: Counter[str] = field(default_factory=Counter)
    """Their number by environment."""
    due: dict[str, float] = field(default_factory=dict)
    """Of episodes with a message that has no reply yet: when it is overdue."""
    check_s: float = 0.0
    """When to look for overdue ones next."""
    spans: BusySpans = field(default_factory=BusySpans)
    """When it had messages to answer."""
    lost: bool = False
    comes_back: bool = False
    """Whether another process is about to take its place."""
    outbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    busy: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: EpisodeStart | EpisodeAction) -> None:
        self.due[message.episode_id] = self.episodes[message.episode_id].due_s(now_s())
        self.outbox.put_nowait(message)
        self.busy.set()
        self.spans.change(True, now_s())

    def forget(self, episode_id: str) -> None:
        self.due.pop(episode_id, None)
        self.playing[self.episodes.pop(episode_id).environment] -= 1
        self.spans.change(bool(self.due), now_s())

    async def call(self, method: str, *args: Any) -> Any:
        """A call that only hands something over.

        Raises:
            WorkerStuckError: it is not answered.
        """
        try:
            return await self.worker.call(method, *args, timeout_s=CALL_TIMEOUT_S)
        except DeadlineError as error:
            why = (
                f"no answer to {method} within {CALL_TIMEOUT_S:.0f} s while {len(self.episodes)} episodes were there; its process is "
                "stopped, or its node has no time for it: look at the node"
            )
            raise WorkerStuckError(self.worker.name, why, self.worker.log_file) from error


class EnvironmentRouter:
    """One per job. ``run`` ends only by cancellation or failure."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        timeouts_s: Mapping[str, float],
        places: Mapping[str, int] | None = None,
        replace: Replace | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            workers: of all environment components, at least one.
            timeouts_s: by environment, how long an episode may take; the workers keep to it, and one that does not is stuck.
            places: by environment, how many episodes a worker can hold at once; any number of those that are not there. The others wait
                here, where their time does not run.
            replace: called for every worker that is lost; without it none is replaced.
        """
        self._hosts = [_Host(worker) for worker in workers]
        self._where: dict[str, _Host] = {}
        self._timeouts_s = timeouts_s
        self._places = places or {}
        self._replace = replace or _not_replaced
        self._lines: dict[str, dict[str, tuple[EpisodeStart, Player]]] = {name: {} for name in timeouts_s}
        """By environment, episodes that begin once a worker has a place for them, or is back; the oldest first."""

    def take_busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """By worker, from when to when it had messages to answer since the last call; readings of the event loop's clock."""
        return {host.worker.name: host.spans.take(now_s()) for host in self._hosts}

    def start(self, message: EpisodeStart, player: Player) -> None:
        """Begin an episode at the worker that has the fewest, or as soon as one has a place for it."""
        self._lines[message.environment][message.episode_id] = message, player
        self._fill(message.environment)

    def _fill(self, environment: str) -> None:
        """Begin episodes of an environment while a worker has a place."""
        line, places = self._lines[environment], self._places.get(environment)
        while line:
            open_hosts = (h for h in self._hosts if not h.lost and (places is None or h.playing[environment] < places))
            host = min(open_hosts, key=lambda h: len(h.episodes), default=None)
            if host is None:
                return
            message, player = line.pop(next(iter(line)))
            timeout_s = self._timeouts_s[environment]
            host.episodes[message.episode_id] = _Playing(player=player, environment=environment, timeout_s=timeout_s, began_s=now_s())
            host.playing[environment] += 1
            self._where[message.episode_id] = host
            host.send(message)

    def act(self, message: EpisodeAction) -> None:
        """Act in an episode that is not over."""
        self._where[message.episode_id].send(message)

    def end(self, episode_id: str) -> None:
        """Give an episode up; one that is over is passed by."""
        for line in self._lines.values():
            line.pop(episode_id, None)
        host = self._where.pop(episode_id, None)
        if host is not None:
            environment = host.episodes[episode_id].environment
            host.forget(episode_id)
            host.outbox.put_nowait(EpisodeEnd(episode_id=episode_id))
            self._fill(environment)

    async def run(self) -> None:
        """Exchange messages and replies until cancelled.

        Raises:
            WorkerLostError: the last worker is gone or stuck, and not replaced.
            RuntimeFault: what the environments' worker raised, or why the last worker could not be replaced.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for host in self._hosts:
                    tasks.create_task(self._serve(host))
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures

    async def _serve(self, host: _Host) -> None:
        """Exchange messages with a worker, and with each process that replaces it."""
        while True:
            error = await self._exchange(host)
            failure = await self._lose(host, error)
            host.comes_back = False
            if failure is not None:
                self._require_others(failure)
                return
            self._rejoin(host)

    async def _exchange(self, host: _Host) -> WorkerLostError:
        """Send and collect; returns how the worker was lost."""
        return await until_lost(self._send_forever(host), self._collect_forever(host))

    def _lose(self, host: _Host, error: WorkerLostError) -> Replacement:
        """A worker is gone; its episodes begin again elsewhere, wait, or fail. What replaces it."""
        host.lost = host.comes_back = True
        replacement = self._replace(self._hosts.index(host), error)
        episodes, host.episodes = host.episodes, {}
        host.due.clear()
        host.playing.clear()
        host.spans.change(False, now_s())
        host.outbox = asyncio.Queue()
        lost: dict[Player, list[str]] = {}
        for episode_id, playing in episodes.items():
            del self._where[episode_id]
            lost.setdefault(playing.player, []).append(episode_id)
        for player, episode_ids in lost.items():
            player.on_lost(episode_ids)
        return replacement

    def _require_others(self, error: RuntimeFault) -> None:
        """Raises ``error`` where no worker is left, and none comes back."""
        if all(host.lost and not host.comes_back for host in self._hosts):
            raise error

    def _rejoin(self, host: _Host) -> None:
        """Another process has taken its place; what waited for one begins there."""
        host.lost = False
        for environment in self._lines:
            self._fill(environment)

    async def _send_forever(self, host: _Host) -> None:
        while True:
            messages = [await host.outbox.get()]
            while not host.outbox.empty():  # all that came together travels together
                messages.append(host.outbox.get_nowait())
            await host.call("submit", messages)

    async def _collect_forever(self, host: _Host) -> None:
        while True:
            if not host.due:
                host.busy.clear()
                await host.busy.wait()
            replies: list[EpisodeReply] = await host.call("collect", COLLECT_WAIT_S)
            self._pass_on(host, replies)
            if now_s() >= host.check_s:
                host.check_s = now_s() + CHECK_EVERY_S
                await self._check(host)

    def _pass_on(self, host: _Host, replies: Sequence[EpisodeReply]) -> None:
        """To the players of the episodes; those given up have none."""
        sorted_out: dict[Player, list[EpisodeReply]] = {}
        ended: set[str] = set()
        for reply in replies:
            playing = host.episodes.get(reply.episode_id)
            if playing is None:
                continue
            del host.due[reply.episode_id]
            if reply.done:
                host.forget(reply.episode_id)
                del self._where[reply.episode_id]
                ended.add(playing.environment)
            sorted_out.setdefault(playing.player, []).append(reply)
        host.spans.change(bool(host.due), now_s())
        for environment in ended:
            self._fill(environment)
        for player, own in sorted_out.items():
            player.on_replies(own)

    async def _check(self, host: _Host) -> None:
        """Raises WorkerStuckError where a reply is overdue; what the worker's threads do is in its log then, if it answers."""
        episode_id = min(host.due, key=host.due.__getitem__, default=None)
        if episode_id is None or now_s() <= host.due[episode_id]:
            return
        playing = host.episodes[episode_id]
        why = (
            f"no reply to episode {episode_id} of environment {playing.environment} within {REPLY_SPARE_S:.0f} s beyond the "
            f"{playing.timeout_s:g} s of its episodeTimeoutSeconds, {len(host.due)} episodes wait there; correct what the stacks in its "
            "log hang in, or allow episodes more time"
        )
        with contextlib.suppress(RuntimeFault):
            await host.worker.call("print_stacks", timeout_s=STACKS_TIMEOUT_S)
        raise WorkerStuckError(host.worker.name, why, host.worker.log_file)


async def _not_replaced(index: int, error: WorkerLostError) -> RuntimeFault:
    return error


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, whatever it is nested in."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
