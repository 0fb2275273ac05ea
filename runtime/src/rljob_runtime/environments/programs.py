"""The agent programs of one environment of type Harness: a process group an episode, which calls the endpoint.

::

    begin ──> line ──> launcher, confined ──> program ── OPENAI_BASE_URL ──> Endpoint ── Call ──> worker's loop ──> driver
                            |                    ^                              |                                     |
                            |                    └────────── response ──────────┘ <──────────── respond <─────────────┘
                            └── its end: exit code, reward file ──> Outcome

| wait                                            | bounded by               | then                          |
|-------------------------------------------------|--------------------------|-------------------------------|
| the launcher confines itself                    | ``startup_timeout_s``    | the episode fails             |
| the program between a response and its next call| ``step_timeout_s``       | killed, the episode fails     |
| the whole episode                               | ``episode_timeout_s``    | killed by the worker's loop   |
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_runtime.environments.config import EnvironmentConfig, HarnessConfig
from rljob_runtime.environments.endpoint.chat import Chat
from rljob_runtime.environments.endpoint.server import Endpoint
from rljob_runtime.environments.endpoint.session import Model, Session
from rljob_runtime.environments.messages import EpisodeAction
from rljob_runtime.environments.outcome import Call, Counters, Failure, Outcome, Read
from rljob_runtime.environments.processes import Processes
from rljob_runtime.environments.program import Run, Setup
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.reward_file import parse_reward
from rljob_runtime.environments.task_file import TaskFile
from rljob_runtime.sandbox.process import BrokenProtocolError, SandboxProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

MODEL_NAME = "policy"
MAX_SHOWN_CHARACTERS = 300


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    key: str
    seed: int
    session: Session
    process: _Process | None = None
    asks: bool = False
    """Whether a call of it is with the driver."""
    read: Read | None = None
    """What it was given of the last action."""
    ending: Outcome | None = None
    """Its end, where the driver is still sampling for it."""
    since_s: float = 0.0
    """When the program had something to do last, on the monotonic clock."""


class _Process(SandboxProcess):
    """A launcher, and the program below it."""

    def __init__(self, setup: Setup, log_file: Path, startup_timeout_s: float) -> None:
        super().__init__(
            "rljob_runtime.environments.program",
            pickle.dumps(setup),
            purpose="program",
            log_file=log_file,
            startup_timeout_s=startup_timeout_s,
            disk_bytes=setup.disk_bytes,
        )
        self.episode: _Episode | None = None
        self.asks = setup.reward is not None
        """Whether it is still to ask for what was said."""


class Programs:
    """All programs of one environment; driven by the worker's thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        harness: HarnessConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path | None,
        log_file: Path,
        startup_timeout_s: float,
        selector: selectors.BaseSelector,
        deliver: Callable[[Outcome], None],
        wake: Callable[[], None],
    ) -> None:
        """Start the endpoint, and the launcher of the first program.

        Raises:
            EnvironmentSetupError: the endpoint cannot be served, the tasks cannot be read, or a program cannot be confined.
        """
        self.counters = Counters()
        self._config, self._harness, self._log_file = config, harness, log_file
        self._deliver, self._wake = deliver, wake
        self._tasks = TaskFile(harness.tasks)
        self._working_folder = harness.working_folder or folder
        own = copy.deepcopy(tokenizer)  # tokenizers are used by one thread at a time
        chat = Chat(own)
        self.close_token_id = own.eos_token_id if chat.close is None else chat.close.token_id
        model = Model(
            name=MODEL_NAME,
            tokenizer=own,
            chat=chat,
            max_calls=config.max_turns,
            max_tokens_per_call=config.max_tokens_per_turn,
            max_sample_tokens=config.max_episode_tokens,
        )
        self._posted: deque[Call | Read] = deque()
        self._endpoint = Endpoint(model, harness.sampling, self._post)
        self._setup = self._make_setup(folder)
        self._episodes: dict[str, _Episode] = {}
        self._waiting: deque[_Episode] = deque()
        """Episodes without a process, oldest first."""
        self._processes = Processes(
            self,
            lambda: _Process(self._setup, log_file, startup_timeout_s),
            name=config.name,
            loads="a program was confined",
            log_file=log_file,
            selector=selector,
        )
        self._said_samples = False
        self._spare: _Process | None = None
        """A launcher without an episode."""
        try:
            self.counters.resets += 1
            self._spare = self._processes.start_first(self.read)
        except BaseException:
            self.close()
            raise

    def begin(self, key: str, seed: int) -> None:
        """Begin an episode; the first call of its program is delivered."""
        session = self._endpoint.open(key, time.monotonic() + self._config.episode_timeout_s)
        self._episodes[key] = episode = _Episode(key=key, seed=seed, session=session)
        self._waiting.append(episode)
        self._place()

    def respond(self, action: EpisodeAction) -> None:
        """Answer the call of an episode; its next one, or its end, is delivered."""
        episode = self._episodes[action.episode_id]
        episode.asks, episode.read, episode.since_s = False, None, time.monotonic()
        if episode.ending is not None:
            self._deliver(episode.ending)
        else:
            self._endpoint.answer(episode.key, action)

    def release(self, key: str) -> None:
        """An episode is over or given up: its program is ended."""
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        self._endpoint.end(key)
        if episode in self._waiting:
            self._waiting.remove(episode)
        if episode.process is not None:
            self._end(episode.process)
        self._place()

    def read(self, process: object) -> None:
        """Take in what a launcher sent.

        Raises:
            EnvironmentSetupError: programs cannot be confined.
        """
        self.take_posted()
        if not isinstance(process, _Process) or process not in self._processes.running:
            return
        try:
            was_ready = process.ready
            frames, closed = self._processes.receive(process)
            if process.ready and not was_ready and process.episode is not None:
                self._run(process, process.episode)
            for frame in frames:
                self._take(process, frame)
        except BrokenProtocolError as error:
            self._gone(process, Failure.DIED, str(error))
        else:
            if closed and process in self._processes.running:
                self._gone(process, Failure.DIED, f"died ({self._end(process, grace_s=1.0)})")
        self._place()

    def take_posted(self) -> None:
        """What the endpoint has for the worker: calls, and what programs were given."""
        while self._posted:
            posted = self._posted.popleft()
            episode = self._episodes.get(posted.key)
            if episode is None or episode.ending is not None:
                continue
            if isinstance(posted, Read):
                episode.read = posted
                continue
            self.counters.took(time.monotonic() - episode.since_s, is_reset=False)
            episode.asks = True
            self._deliver(Outcome(key=posted.key, call=posted, read=episode.read))

    def next_deadline(self) -> float | None:
        """When ``check_deadlines`` has something to do, on the monotonic clock."""
        return min((deadline for process in self._processes.running if (deadline := self._limit(process)) is not None), default=None)

    def check_deadlines(self, now: float) -> None:
        """Kill programs that take too long."""
        self.take_posted()
        for process in list(self._processes.running):
            limit = self._limit(process)
            if limit is not None and limit <= now:
                why = f"took longer than {self._config.step_timeout_s:g} s (stepTimeoutSeconds) until its next call, or its end"
                self._gone(process, Failure.TIMEOUT, why if process.ready else "was not confined in time")
        self._place()

    def close(self) -> None:
        """End all programs and the endpoint; may be called twice."""
        self._processes.close()
        self._endpoint.close()

    @property
    def sandbox(self) -> str:
        """What keeps the programs in, as their launchers say."""
        return self._processes.sandbox

    @property
    def max_episodes(self) -> int:
        """Each has a program of its own."""
        return self._config.isolation.max_processes

    def _post(self, event: Call | Read) -> None:
        """Called by the endpoint's thread."""
        self._posted.append(event)
        self._wake()

    def _make_setup(self, folder: Path | None) -> Setup:
        isolation = self._config.isolation
        own = None if folder is None else folder.resolve()
        works_in = None if self._working_folder is None else self._working_folder.resolve()
        return Setup(
            read_paths=(*(() if works_in in (None, own) else (str(works_in),)), *isolation.read_paths),
            network=isolation.network,
            port=self._endpoint.port,
            memory_bytes=isolation.memory_bytes,
            disk_bytes=isolation.disk_bytes,
            reward=self._harness.reward,
            folder=None if own is None else str(own),
        )

    def _limit(self, process: _Process) -> float | None:
        """When it is too late for what a process is to do next; None where it waits for others."""
        if not process.ready:
            return process.deadline
        episode = process.episode
        return None if episode is None or episode.asks else episode.since_s + self._config.step_timeout_s

    def _place(self) -> None:
        """Give waiting episodes a process."""
        while self._waiting and sum(p.episode is not None for p in self._processes.running) < self._config.isolation.max_processes:
            process, self._spare = self._spare or self._start(), None
            episode = self._waiting.popleft()
            episode.process, process.episode = process, episode
            if process.ready:
                self._run(process, episode)

    def _run(self, process: _Process, episode: _Episode) -> None:
        episode.since_s = time.monotonic()
        variables = {
            **self._harness.variables,
            "OPENAI_BASE_URL": self._endpoint.url,
            "OPENAI_API_KEY": episode.session.token,
            "RLJOB_MODEL": MODEL_NAME,
            "RLJOB_SEED": str(episode.seed),
        }
        run = Run(
            command=self._harness.command,
            working_folder=None if self._working_folder is None else str(self._working_folder),
            variables=variables,
            task=json.dumps(self._tasks.task(self._config.name, episode.seed)),
        )
        if not process.send(pickle.dumps(run)):
            self._gone(process, Failure.DIED, "died before it began")

    def _take(self, process: _Process, frame: bytes) -> None:
        episode = process.episode
        if episode is None:
            raise BrokenProtocolError("it wrote an answer that no one asked for")
        try:
            ended = json.loads(frame)
            if "asks" in ended and process.asks:
                self._score(process, episode)
                return
            self._end(process)
            turn, error = self._ending(ended, episode)
        except (ValueError, TypeError, AttributeError) as broken:
            raise BrokenProtocolError("it wrote something that is not an answer") from broken
        if error:
            self.counters.failures[Failure.RAISED] += 1
            self._keep_output(str(ended.get("tail", "")), episode.key)
        self._over(episode, turn, error)

    def _score(self, process: _Process, episode: _Episode) -> None:
        """The program has ended: its reward function is given what was said."""
        process.asks, episode.since_s = False, time.monotonic()
        self._endpoint.end(episode.key)
        if not process.send(json.dumps(episode.session.said).encode()):
            self._gone(process, Failure.DIED, "died before it was scored")

    def _ending(self, ended: dict[str, Any], episode: _Episode) -> tuple[Turn | None, str]:
        """The last turn of an episode, or why it has none."""
        tail = " ".join(str(ended.get("tail", "")).split())[-MAX_SHOWN_CHARACTERS:]
        said = f"; it said last: {tail}" if tail else ""
        if "error" in ended:
            return None, str(ended["error"])
        code = int(ended["code"])
        if code != 0:
            return None, f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{said}"
        if ended.get("reward") is None:
            return None, f"wrote no reward to RLJOB_REWARD_FILE{said}"
        try:
            reward, metrics = parse_reward(ended["reward"])
        except ValueError as error:
            return None, f"has a reward that is none: {error}"
        session = episode.session
        if len(session.conversation) > 1 and not self._said_samples:
            self._said_samples = True
            _log.warning(
                "environment %s: episode %s made %d calls that are %d samples, because prompts did not begin with what was said before",
                *(self._config.name, episode.key, session.num_calls, len(session.conversation)),
            )
        counts = {"calls": session.num_calls, "refused_calls": session.num_refused, "samples": len(session.conversation)}
        numbers = {name: float(value) for name, value in counts.items()}
        return Turn(observation="", reward=reward, done=True, info=metrics | numbers), ""

    def _over(self, episode: _Episode, turn: Turn | None, why: str) -> None:
        """Deliver an episode's end, now or when the driver has sampled what nobody will read."""
        self.take_posted()
        self._endpoint.end(episode.key)
        episode.process = None
        error = f"environment {self._config.name!r}: its program {why}; output: {self._log_file}" if why else ""
        outcome = Outcome(key=episode.key, turn=turn, read=episode.read, error=error)
        if episode.asks:
            episode.ending = Outcome(key=episode.key, turn=turn, error=error)
        else:
            self._deliver(outcome)

    def _gone(self, process: _Process, failure: Failure, why: str) -> None:
        """A process has ended without an answer, or is to end."""
        episode = process.episode
        if process in self._processes.running:
            self._end(process)
        self.counters.failures[failure] += 1
        _log.warning("environment %s: a program %s", self._config.name, why)
        if episode is not None:
            self._over(episode, None, why)

    def _keep_output(self, tail: str, key: str) -> None:
        """The end of a failed program's output."""
        with self._log_file.open("a", encoding="utf-8", errors="replace") as log:
            log.write(f"--- episode {key}\n{tail}\n")

    def _start(self) -> _Process:
        self.counters.resets += 1
        return self._processes.start()

    def _end(self, process: _Process, *, grace_s: float = 0.0) -> str:
        if process is self._spare:
            self._spare = None
        return self._processes.end(process, grace_s=grace_s)
