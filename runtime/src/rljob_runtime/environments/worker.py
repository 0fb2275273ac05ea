"""The worker of the role Environment: many episodes at once, one thread, no Ray.

::

    submit ──> inbox ──> loop thread ──> built-in game: at once
      ^                     |    ├─────> ConversationHost: what its tools do is answered later, by processes
      |                     |    ├─────> Crew of a user's class: processes, answered later
      |                     |    └─────> Programs of a user's: they call the endpoint when they like
      |                     v
    driver <── collect <── outbox <── Episode: limits, token ids (codec)

What fails in one environment ends its episode and nothing else. What fails in the loop is raised by the next call.
"""

from __future__ import annotations

import faulthandler
import heapq
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rljob_runtime.data.tokenizer import load_tokenizer
from rljob_runtime.environments.builtin import CONVERSATIONS, SANDBOXED, SHARED, is_built_in
from rljob_runtime.environments.codec import Codec
from rljob_runtime.environments.config import EnvironmentConfig, WorkerConfig
from rljob_runtime.environments.conversation_host import ConversationHost, conversation_prompt
from rljob_runtime.environments.crew import Crew
from rljob_runtime.environments.episode import Episode
from rljob_runtime.environments.harness_episode import HarnessEpisode
from rljob_runtime.environments.local import LocalHost
from rljob_runtime.environments.messages import EpisodeAction, EpisodeEnd, EpisodeReply, EpisodeStart, StopReason
from rljob_runtime.environments.outcome import Counters, Failure, Outcome
from rljob_runtime.environments.programs import Programs
from rljob_runtime.environments.templates import TemplateClass
from rljob_runtime.errors import EnvironmentSetupError, WorkerFailedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Message = EpisodeStart | EpisodeAction | EpisodeEnd
_CLOSE_WAIT_S = 30.0


class Host(Protocol):
    """Where the environments of one entry run. Each begin and step is answered by one ``Outcome``, then or later."""

    counters: Counters

    @property
    def sandbox(self) -> str:
        """What keeps the user's code in; empty where there is none."""

    @property
    def max_episodes(self) -> int | None:
        """Episodes that have a place at once; None: any number."""

    def begin(self, key: str, seed: int) -> None:
        """Begin an episode."""

    def step(self, key: str, action: str) -> None:
        """Act in it."""

    def release(self, key: str) -> None:
        """It is over, or given up."""

    def next_deadline(self) -> float | None:
        """When ``check_deadlines`` has something to do, on the monotonic clock."""

    def check_deadlines(self, now: float) -> None:
        """End what took too long."""

    def close(self) -> None:
        """Give up everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDescription:
    """What the driver needs to know of an environment."""

    name: str
    template_class: TemplateClass | None
    """None for a program, whose prompts are compared with what was said one by one."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response besides the model's own."""
    sandbox: str
    """What keeps the user's code in; empty where there is none."""
    max_episodes: int | None = None
    """Episodes that a worker can hold at once, each in a place of a process; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """An environment that answers actions."""

    config: EnvironmentConfig
    codec: Codec
    host: Host

    def episode(self, key: str, deadline: float) -> Episode:
        return Episode(key=key, config=self.config, codec=self.codec, deadline=deadline)

    @property
    def close_token_id(self) -> int | None:
        return self.codec.close_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Harness:
    """An environment whose programs ask for actions."""

    config: EnvironmentConfig
    host: Programs

    def episode(self, key: str, deadline: float) -> HarnessEpisode:
        return HarnessEpisode(key=key, config=self.config, deadline=deadline)

    @property
    def close_token_id(self) -> int | None:
        return self.host.close_token_id


class EnvironmentWorker:
    """Runs episodes of every environment of a job. ``submit`` and ``collect`` may be called by different threads."""

    def __init__(self, config: WorkerConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Load the tokenizer, construct one environment of each entry, and start.

        Raises:
            EnvironmentSetupError: an environment or its prompt cannot be set up.
            ModelError: the tokenizer cannot be loaded.
        """
        if tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer_path, trust_remote_code=config.trust_remote_code)
        self._selector = selectors.DefaultSelector()
        self._entries: dict[str, _Played | _Harness] = {}
        self._episodes: dict[str, Episode | HarnessEpisode] = {}
        self._deadlines: list[tuple[float, str]] = []
        """A heap of each episode's deadline and id; those that are over are passed by."""
        self._inbox: deque[Message] = deque()
        self._outbox: list[EpisodeReply] = []
        self._made: list[EpisodeReply] = []
        """Replies of this round of the loop: handed over together, so that the driver is not woken for each."""
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._codec_s = 0.0
        self._stops: dict[StopReason, int] = dict.fromkeys(StopReason, 0)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            for entry in config.environments:
                self._add(entry, config, tokenizer)
        except BaseException:
            self._release_all()
            raise
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def describe(self) -> list[EnvironmentDescription]:
        """What the driver needs to know, in the order of the spec."""
        return [
            EnvironmentDescription(
                name=name,
                template_class=entry.codec.template_class if isinstance(entry, _Played) else None,
                stop_token_ids=() if entry.close_token_id is None else (entry.close_token_id,),
                sandbox=entry.host.sandbox,
                max_episodes=entry.host.max_episodes,
            )
            for name, entry in self._entries.items()
        ]

    def submit(self, messages: Sequence[Message]) -> None:
        """Take messages; each start and action is answered once through ``collect``.

        Raises:
            WorkerFailedError: the loop has ended.
        """
        self._raise_failure()
        self._inbox.extend(messages)
        self._wake.send(b"\0")

    def collect(self, wait_s: float) -> list[EpisodeReply]:
        """All replies there are; waits up to ``wait_s`` for the first.

        Raises:
            EnvironmentSetupError: a user's class could not be constructed again.
            WorkerFailedError: the loop has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._failure is not None or self._closing, wait_s)
            replies, self._outbox = self._outbox, []
        if not replies:
            self._raise_failure()
        return replies

    def print_stacks(self) -> None:
        """Write what every thread does at the moment to this process's log: the loop may hang."""
        faulthandler.dump_traceback()

    def metrics(self) -> Mapping[str, float]:
        """Counters since the start, and what runs now.

        Keys: ``running`` (episodes), ``steps``, ``resets``, ``step_s`` and ``reset_s`` (inside environments), ``codec_s``, ``raised``,
        ``timeout`` and ``died`` (calls), ``retries``, ``restarts`` (processes), ``ended/<reason>`` (episodes).
        """
        counters = [entry.host.counters for entry in self._entries.values()]
        summed = {
            name: float(sum(getattr(c, name) for c in counters)) for name in ("steps", "resets", "step_s", "reset_s", "retries", "restarts")
        }
        failures = {str(failure): float(sum(c.failures[failure] for c in counters)) for failure in Failure}
        ended = {f"ended/{stop}": float(count) for stop, count in self._stops.items() if stop is not StopReason.NOT_YET}
        return {"running": float(len(self._episodes)), "codec_s": self._codec_s} | summed | failures | ended

    def close(self) -> None:
        """End all environments and their processes; may be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake.send(b"\0")
        self._thread.join(_CLOSE_WAIT_S)
        self._release_all()

    def _add(self, config: EnvironmentConfig, shared: WorkerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if config.harness is not None:
            programs = Programs(
                config,
                config.harness,
                tokenizer=tokenizer,
                folder=shared.job_folder,
                log_file=_log_file(config, shared),
                startup_timeout_s=shared.startup_timeout_s,
                selector=self._selector,
                deliver=self._deliver,
                wake=self._wake_up,
            )
            self._entries[config.name] = _Harness(config=config, host=programs)
            return
        is_conversation = config.type in CONVERSATIONS
        codec = Codec(tokenizer, conversation_prompt(config) if is_conversation else config.prompt)
        keeps = config.prompt.memory is None and config.max_turns > 1
        if keeps and codec.template_class is TemplateClass.DROPS_HISTORY:
            other = "" if is_conversation else "prompt.history: Turn, "
            raise EnvironmentSetupError(
                f"environment {config.name!r}: the chat template leaves out what was said before, so that no prompt of several turns would "
                f"be one of its own; write prompt.chatTemplate: false, {other}maxTurns: 1, or use another model"
            )
        host: Host
        played = config
        if config.type in SANDBOXED:
            played = replace(config, type=SANDBOXED[config.type], isolation=SHARED)
        if not is_conversation and is_built_in(played.type):
            host = LocalHost(config, self._deliver)
        else:
            kind: type[ConversationHost] | type[Crew] = ConversationHost if is_conversation else Crew
            host = kind(
                played,
                folder=shared.job_folder,
                log_file=_log_file(config, shared),
                startup_timeout_s=shared.startup_timeout_s,
                selector=self._selector,
                deliver=self._deliver,
            )
        self._entries[config.name] = _Played(config=config, codec=codec, host=host)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - thread border: raised again by the next call of the driver
            _log.exception("the loop of the environments ended")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        hosts = [entry.host for entry in self._entries.values()]
        deadlines = [host.next_deadline() for host in hosts] + [self._deadlines[0][0] if self._deadlines else None]
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        for key, _ in self._selector.select(None if soonest is None else max(0.0, soonest - time.monotonic())):
            if key.data is None:
                self._woken.recv(1 << 16)
            else:
                owner, process = key.data
                owner.read(process)
        while self._inbox:
            self._take(self._inbox.popleft())
        now = time.monotonic()
        for host in hosts:
            host.check_deadlines(now)
        self._expire(now)
        if self._made:
            with self._changed:
                self._outbox += self._made
                self._changed.notify_all()
            self._made = []

    def _take(self, message: Message) -> None:
        if isinstance(message, EpisodeStart):
            self._start(message)
        elif isinstance(message, EpisodeEnd):
            if (given_up := self._episodes.pop(message.episode_id, None)) is not None and not given_up.expired:
                self._entries[given_up.config.name].host.release(given_up.key)
        elif (episode := self._episodes.get(message.episode_id)) is None:
            self._send(_refused(message.episode_id, "no such episode runs in this worker; start it first"))
        elif episode.acting:
            self._send(_refused(message.episode_id, "an action came before the reply to the one before it"))
        elif episode.expired:
            del self._episodes[episode.key]
            self._send(episode.timed_out())
        else:
            self._act(episode, message)

    def _act(self, episode: Episode | HarnessEpisode, message: EpisodeAction) -> None:
        entry = self._entries[episode.config.name]
        started = time.perf_counter()
        text = episode.take(message)
        self._codec_s += time.perf_counter() - started
        if isinstance(entry, _Harness):
            entry.host.respond(message)
        else:
            entry.host.step(episode.key, text or "")

    def _wake_up(self) -> None:
        self._wake.send(b"\0")

    def _start(self, message: EpisodeStart) -> None:
        entry = self._entries.get(message.environment)
        if entry is None:
            self._send(_refused(message.episode_id, f"no environment {message.environment!r}; there are {', '.join(self._entries)}"))
        elif message.episode_id in self._episodes:
            self._send(_refused(message.episode_id, "an episode of this id runs already"))
        else:
            deadline = time.monotonic() + entry.config.episode_timeout_s
            self._episodes[message.episode_id] = entry.episode(message.episode_id, deadline)
            heapq.heappush(self._deadlines, (deadline, message.episode_id))
            entry.host.begin(message.episode_id, message.seed)

    def _deliver(self, outcome: Outcome) -> None:
        """What a host answers."""
        episode = self._episodes.get(outcome.key)
        if episode is None:
            return
        started = time.perf_counter()
        reply = episode.answered(outcome)
        self._codec_s += time.perf_counter() - started
        if reply.done:
            del self._episodes[outcome.key]
            self._entries[episode.config.name].host.release(outcome.key)
        self._send(reply)

    def _expire(self, now: float) -> None:
        """Episodes whose time is over: those at work end, the others when their action comes."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            episode = self._episodes.get(key)
            if episode is None or episode.deadline != deadline:
                continue
            episode.expired = True
            self._entries[episode.config.name].host.release(key)
            if episode.acting:
                del self._episodes[key]
                self._send(episode.timed_out())

    def _send(self, reply: EpisodeReply) -> None:
        if reply.done:
            self._stops[reply.stop] += 1
        self._made.append(reply)

    def _release_all(self) -> None:
        for entry in self._entries.values():
            entry.host.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, EnvironmentSetupError):
            raise self._failure
        if self._failure is not None:
            raise WorkerFailedError("environments", "loop", f"{type(self._failure).__name__}: {self._failure}", "") from self._failure


def _log_file(config: EnvironmentConfig, shared: WorkerConfig) -> Path:
    """Where what an environment's processes print goes; its folder is made."""
    shared.log_dir.mkdir(parents=True, exist_ok=True)
    return shared.log_dir / f"environment-{config.name}.log"


def _refused(key: str, why: str) -> EpisodeReply:
    import numpy as np

    return EpisodeReply(
        episode_id=key, token_ids=np.zeros(0, dtype=np.int32), done=True, stop=StopReason.ERROR, error=f"episode {key}: {why}"
    )
