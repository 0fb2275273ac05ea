"""Runs the conversations of one environment: their state here, what their tools, user and score do in processes (:mod:`.tool_pool`)."""

from __future__ import annotations

import json
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_api.v1alpha1.conversations import SCRIPT, ChatParameters, ConversationParameters, Scoring, ToolUseParameters
from rljob_api.vocabulary import RewardType, ToolType
from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.config import EnvironmentConfig
from rljob_runtime.environments.conversation import Conversation, ConversationError, Request, Rules
from rljob_runtime.environments.conversation_tasks import Tasks
from rljob_runtime.environments.outcome import Counters, Failure, Outcome
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.tool_pool import ToolPool
from rljob_runtime.environments.tool_work import Answer, RunProgram, ScoreAnswer, Setup, Work
from rljob_runtime.environments.toolbox import Toolbox, tools_of
from rljob_runtime.errors import EnvironmentSetupError
from rljob_runtime.rewards.config import RewardConfig

_MODELS: dict[str, type[ConversationParameters]] = {"ToolUse": ToolUseParameters, "Chat": ChatParameters}


def _parameters(config: EnvironmentConfig) -> ConversationParameters:
    """Raises EnvironmentSetupError where a parameter is of no use; validation of the manifest lets none through."""
    try:
        return _MODELS[config.type].model_validate_json(json.dumps(dict(config.parameters)))
    except ValueError as error:
        raise EnvironmentSetupError(f"environment {config.name!r}: parameters of {config.type}: {error}") from error


def conversation_prompt(config: EnvironmentConfig) -> PromptSettings:
    """What the policy reads: the entry's settings, and its tools."""
    parameters = _parameters(config)
    if not isinstance(parameters, ToolUseParameters):
        return config.prompt
    return replace(config.prompt, tools=tools_of(parameters), call_format=parameters.call_format)


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """An episode."""

    key: str
    conversation: Conversation
    asked_s: float = 0.0
    """When its turn began."""
    waits: bool = False
    """Whether there is work of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ticket:
    member: _Member
    request: Request


class ConversationHost:
    """Conversations by episode; driven by one thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        folder: Path | None,
        log_file: Path,
        startup_timeout_s: float,
        selector: selectors.BaseSelector,
        deliver: Callable[[Outcome], None],
    ) -> None:
        """Read tasks and corpora, and start a process of each kind that is needed.

        Raises:
            EnvironmentSetupError: something cannot be read, imported or constructed.
        """
        self.counters = Counters()
        self.max_episodes = None  # processes are taken call by call
        self._config, self._deliver = config, deliver
        parameters = _parameters(config)
        self._tasks = Tasks(config.name, parameters)
        self._rules = _rules(config, parameters)
        self._members: dict[str, _Member] = {}
        self._code: ToolPool | None = None
        self._own: ToolPool | None = None

        def start(setup: Setup) -> ToolPool:
            return ToolPool(
                setup,
                name=config.name,
                log_file=log_file,
                max_processes=config.isolation.max_processes,
                startup_timeout_s=startup_timeout_s,
                selector=selector,
                deliver=self._answered,
            )

        code, own = _setups(config, parameters, None if folder is None else str(folder.resolve()))
        self._scores_in_code = code is not None and code.reward is not None
        try:
            self._code = None if code is None else start(code)
            self._own = None if own is None else start(own)
        except BaseException:
            self.close()
            raise

    @property
    def sandbox(self) -> str:
        """What keeps the processes in, as they say."""
        return next((pool.sandbox for pool in self._pools()), "")

    def begin(self, key: str, seed: int) -> None:
        """Begin an episode; its first turn is delivered, or what went wrong."""
        asked_s = time.perf_counter()
        try:
            member = _Member(key=key, conversation=Conversation(self._tasks.of(seed), self._rules), asked_s=asked_s)
            turn = member.conversation.begin()
        except Exception as error:  # noqa: BLE001 - a task that cannot be made must not end the others' episodes
            self._failed(key, f"the task of seed {seed}: {type(error).__name__}: {error}", counts=True)
            return
        self._members[key] = member
        self._over(member, turn, is_reset=True)

    def step(self, key: str, action: str) -> None:
        """Act in an episode; the turn is delivered."""
        member = self._members[key]
        member.asked_s = time.perf_counter()
        self._advance(member, lambda: member.conversation.said(action))

    def release(self, key: str) -> None:
        """An episode is over or given up: nothing more of it is delivered."""
        member = self._members.pop(key, None)
        if member is not None and member.waits:
            for pool in self._pools():
                pool.withdraw(lambda ticket: isinstance(ticket, _Ticket) and ticket.member is member)

    def next_deadline(self) -> float | None:
        """When ``check_deadlines`` has something to do, on the monotonic clock."""
        return min((deadline for pool in self._pools() if (deadline := pool.next_deadline()) is not None), default=None)

    def check_deadlines(self, now: float) -> None:
        """End work that takes too long."""
        for pool in self._pools():
            pool.check_deadlines(now)

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools():
            pool.close()

    def _pools(self) -> list[ToolPool]:
        return [pool for pool in (self._own, self._code) if pool is not None]

    def _pool_of(self, work: Work) -> ToolPool:
        in_code = isinstance(work, RunProgram) or (isinstance(work, ScoreAnswer) and self._scores_in_code)
        pool = self._code if in_code else self._own
        assert pool is not None
        return pool

    def _advance(self, member: _Member, advance: Callable[[], Turn | list[Request]]) -> None:
        try:
            next_step = advance()
        except ConversationError as error:
            # Processes that hung or died are counted where that happens.
            self._failed(member.key, str(error), counts=error.failure is Failure.RAISED)
            return
        except Exception as error:  # noqa: BLE001 - what one response leads to must not end the others' episodes
            self._failed(member.key, f"{type(error).__name__}: {error}", counts=True)
            return
        if isinstance(next_step, Turn):
            self._over(member, next_step, is_reset=False)
            return
        member.waits = True
        for request in next_step:
            self._pool_of(request.work).submit(_Ticket(member=member, request=request), request.work, request.limit_s)

    def _failed(self, key: str, why: str, *, counts: bool) -> None:
        self.counters.failures[Failure.RAISED] += counts
        self._deliver(Outcome(key=key, error=f"environment {self._config.name!r}: {why}"))

    def _answered(self, ticket: object, answer: Answer) -> None:
        assert isinstance(ticket, _Ticket)
        member, request = ticket.member, ticket.request
        if answer.failure is Failure.TIMEOUT or answer.failure is Failure.DIED:
            self.counters.failures[answer.failure] += 1
        self.counters.restarts = sum(pool.restarts for pool in self._pools())
        if self._members.get(member.key) is not member:  # given up
            return
        self._advance(member, lambda: member.conversation.answered(request.place, answer, request.work))

    def _over(self, member: _Member, turn: Turn, *, is_reset: bool) -> None:
        member.waits = False
        self.counters.took(time.perf_counter() - member.asked_s, is_reset=is_reset)
        self._deliver(Outcome(key=member.key, turn=turn))


def _rules(config: EnvironmentConfig, parameters: ConversationParameters) -> Rules:
    tools = parameters if isinstance(parameters, ToolUseParameters) else None
    return Rules(
        max_turns=config.max_turns,
        toolbox=None if tools is None else Toolbox(tools),
        max_calls=0 if tools is None else tools.max_calls,
        has_user=isinstance(parameters, ChatParameters) and parameters.user != SCRIPT,
        is_scored=parameters.reward is not None,
        step_limit_s=config.step_timeout_s,
        score_limit_s=config.step_timeout_s if parameters.reward is None else parameters.reward.timeout_s,
    )


def _setups(config: EnvironmentConfig, parameters: ConversationParameters, folder: str | None) -> tuple[Setup | None, Setup | None]:
    """Of the processes that start programs of the policy's, and of those with code of the user's or of ours; None where not needed."""
    isolation = config.isolation
    reward = None if parameters.reward is None else _reward(config.name, parameters.reward)
    tools = parameters.tools if isinstance(parameters, ToolUseParameters) else ()
    talks = isinstance(parameters, ChatParameters) and parameters.user != SCRIPT
    scores_code = reward is not None and reward.type is RewardType.CODE
    code = own = None
    if scores_code or any(tool.type is ToolType.PYTHON for tool in tools):
        code = Setup(
            folder=None,
            runs_code=True,
            reward=reward if scores_code else None,
            memory_bytes=isolation.memory_bytes,
            disk_bytes=isolation.disk_bytes,
        )
    if parameters.has_own_code or (reward is not None and not scores_code):
        own = Setup(
            folder=folder,
            functions={
                tool.called: (tool.function, tuple((tool.parameters or {}).get("properties", {})))
                for tool in tools
                if tool.function is not None
            },
            user=parameters.user if isinstance(parameters, ChatParameters) and talks else None,
            user_parameters=parameters.user_parameters if isinstance(parameters, ChatParameters) else {},
            reward=None if scores_code else reward,
            network=isolation.network,
            processes=isolation.processes,
            read_paths=isolation.read_paths,
            memory_bytes=isolation.memory_bytes,
            disk_bytes=isolation.disk_bytes,
        )
    return code, own


def _reward(name: str, given: Scoring) -> RewardConfig:
    return RewardConfig(
        name=name,
        type=given.type,
        extraction=given.extraction,
        tag=given.tag,
        function=given.function,
        params=given.parameters,
        timeout_s=given.timeout_s,
    )
