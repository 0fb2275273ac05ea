"""One episode of ToolUse or Chat: from a response to the next turn, or to what has to be done for it first. Pure: no clock, no I/O.

::

    said(response) ──calls──> Request for each, or a result at once ──all answered──> Turn(role tool)
                   ──no call─> Chat: Turn(the user's next message), or a Request to the user
                   ──the end──> Request for the score ──answered──> Turn(done)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_runtime.environments.outcome import Failure
from rljob_runtime.environments.protocol import Aggregation, Turn
from rljob_runtime.environments.tool_calls import BadCall, ToolCall
from rljob_runtime.environments.tool_work import Answer, AskUser, Message, ScoreAnswer, Work
from rljob_runtime.environments.toolbox import RefusedCallError, Toolbox

_COUNTS: Mapping[str, Aggregation] = {"tool_calls": "sum", "tool_errors": "sum", "tool_timeouts": "sum", "score": "last"}
_PASS_SCORE = 1.0
_NONE_LEFT = "no tool calls are left; answer now"


class ConversationError(Exception):
    """Raised where an episode cannot go on through no fault of the policy's; the message is one line, ``failure`` why."""

    def __init__(self, message: str, failure: Failure | None) -> None:
        """Keep both."""
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a seed stands for."""

    prompt: str
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    script: tuple[str, ...] = ()
    """What a scripted user says after the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What all episodes of an environment have in common."""

    max_turns: int
    toolbox: Toolbox | None = None
    max_calls: int = 0
    has_user: bool = False
    """Whether a user of the user's own speaks; else the script."""
    is_scored: bool = True
    step_limit_s: float = 60.0
    score_limit_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Work that a turn waits for."""

    place: int
    """Among the requests of this turn."""
    work: Work
    limit_s: float


class Conversation:
    """The state of one."""

    def __init__(self, task: Task, rules: Rules) -> None:
        """Nothing is said yet."""
        self._task, self._rules = task, rules
        self._messages: list[Message] = [{"role": "user", "content": task.prompt}]
        self._turn = self._num_calls = 0
        self._results: list[str | None] = []
        """Of the calls of this turn, None while it is waited for."""
        self._names: list[str] = []
        self._counts = dict.fromkeys(("tool_calls", "tool_errors", "tool_timeouts"), 0)
        self._valid = True
        self._reward = 0.0
        """Of the user's own, for this turn."""
        self._ends = False
        """Whether the end was reached, not only the last turn."""

    def begin(self) -> Turn:
        """The first turn."""
        return Turn(observation=self._task.prompt, state_key=self._state())

    def said(self, response: str) -> Turn | list[Request]:
        """The next turn, or what it waits for."""
        self._turn += 1
        self._reward, self._ends, self._valid = 0.0, False, True
        self._counts = dict.fromkeys(self._counts, 0)
        self._messages.append({"role": "assistant", "content": response})
        is_last = self._turn >= self._rules.max_turns
        toolbox = self._rules.toolbox
        calls = toolbox.parse(response).calls if toolbox is not None else ()
        if toolbox is not None and calls and not is_last:
            return self._call(toolbox, calls)
        if self._rules.has_user:
            task = {"prompt": self._task.prompt, "answer": self._task.answer, "metadata": dict(self._task.metadata)}
            return [Request(place=0, work=AskUser(task=task, messages=tuple(self._messages)), limit_s=self._rules.step_limit_s)]
        if self._turn <= len(self._task.script) and not is_last:
            return self._goes_on(self._task.script[self._turn - 1])
        self._ends = not calls and self._turn > len(self._task.script)
        return self._score()

    def answered(self, place: int, answer: Answer, work: Work) -> Turn | list[Request]:
        """Take what came of a request; an empty list while others are waited for.

        Raises:
            ConversationError: the user, or what scores, failed.
        """
        match work:
            case AskUser():
                return self._user_said(answer)
            case ScoreAnswer():
                return self._scored(answer)
        text, failed = self._result(place, answer)
        self._results[place] = text
        self._counts["tool_errors"] += failed
        self._counts["tool_timeouts"] += answer.failure is Failure.TIMEOUT
        return [] if None in self._results else self._tools_said()

    def _call(self, toolbox: Toolbox, calls: Sequence[ToolCall | BadCall]) -> Turn | list[Request]:
        requests: list[Request] = []
        self._results, self._names = [None] * len(calls), [call.name if isinstance(call, ToolCall) else "" for call in calls]
        for place, call in enumerate(calls):
            if self._num_calls >= self._rules.max_calls:
                self._results[place] = f"Error: {_NONE_LEFT}"
                continue
            self._num_calls += 1
            self._counts["tool_calls"] += 1
            try:
                prepared = toolbox.prepare(call)
            except RefusedCallError as error:
                self._results[place], self._valid = f"Error: {error}", False
                self._counts["tool_errors"] += 1
                continue
            if isinstance(prepared, str):
                self._results[place] = prepared
            elif isinstance(call, ToolCall):
                requests.append(Request(place=place, work=prepared, limit_s=toolbox.limit_s(call)))
        return requests or self._tools_said()

    def _result(self, place: int, answer: Answer) -> tuple[str, bool]:
        """A tool's result, and whether it is an error: the policy's to make something of."""
        if answer.error:
            return f"Error: {self._names[place]}: {answer.error}", True
        return str(answer.value["text"]), bool(answer.value["failed"])

    def _tools_said(self) -> Turn:
        assert self._rules.toolbox is not None
        results = tuple(self._rules.toolbox.shortened(result) for result in self._results if result is not None)
        self._messages += [{"role": "tool", "content": result} for result in results]
        return self._made(observation="\n".join(results), role="tool", results=results)

    def _user_said(self, answer: Answer) -> Turn | list[Request]:
        if answer.error:
            raise ConversationError(f"its user: {answer.error}", answer.failure)
        said = answer.value
        self._reward, self._ends = float(said["reward"]), bool(said["done"])
        if self._ends or self._turn >= self._rules.max_turns:
            return self._score() if self._rules.is_scored else self._made(reward=self._reward, done=self._ends)
        return self._goes_on(str(said["observation"]))

    def _goes_on(self, message: str) -> Turn:
        self._messages.append({"role": "user", "content": message})
        return self._made(observation=message, reward=self._reward)

    def _score(self) -> list[Request]:
        metadata = {**self._task.metadata, "messages": [dict(message) for message in self._messages]}
        response = self._messages[-1]["content"]
        work = ScoreAnswer(prompt=self._task.prompt, response=response, answer=self._task.answer, metadata=metadata)
        return [Request(place=0, work=work, limit_s=self._rules.score_limit_s)]

    def _scored(self, answer: Answer) -> Turn:
        if answer.failure is Failure.TIMEOUT:  # such an answer is no right one
            numbers = {"score": 0.0, "score_timeout": 1.0}
        elif answer.error:
            raise ConversationError(f"its reward: {answer.error}", answer.failure)
        else:
            numbers = {str(name): float(value) for name, value in answer.value.items()}
        numbers["success"] = float(numbers["score"] >= _PASS_SCORE)
        return self._made(reward=self._reward + numbers["score"], done=self._ends, numbers=numbers)

    def _made(self, *, numbers: Mapping[str, float] | None = None, **fields: Any) -> Turn:
        counts = {name: float(count) for name, count in self._counts.items()} if self._rules.toolbox is not None else {}
        info = counts | dict(numbers or {})
        aggregation = {name: mode for name, mode in _COUNTS.items() if name in info}
        turn = {"observation": "", **fields, "info": info, "aggregation": aggregation}
        return Turn(**turn, action_valid=self._valid, state_key=self._state())

    def _state(self) -> str:
        return "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in self._messages)
