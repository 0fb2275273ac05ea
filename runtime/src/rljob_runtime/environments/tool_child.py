"""A process of a conversation's tools: ``python -m rljob_runtime.environments.tool_child FD``, started by :mod:`.tool_pool` only.

It confines itself, imports what is named, and does one piece of work after the other. Frames over the inherited socket ``FD``:

* parent to child: first one pickled ``Setup``, then pickled pairs of a nonce and a ``Work``.
* child to parent: first ``READY`` or ``FAILED`` plus text, then for each work the nonce and JSON; nothing is ever unpickled by the parent.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.tool_work import AskUser, CallFunction, RunProgram, ScoreAnswer, Setup, Work
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.plugins import check_signature, load_class, load_function
from rljob_runtime.rewards.code_runner import CodeRunner, Run
from rljob_runtime.rewards.functions import RewardFunction, extract, load, to_scores
from rljob_runtime.sandbox import Limits
from rljob_runtime.sandbox.child import RefusedError, bound_log, confined, constructed, main, say_ready
from rljob_runtime.sandbox.faults import one_line
from rljob_runtime.sandbox.frames import read_frame, send_frame

MAX_ANSWER_BYTES = 4 << 20
_MAX_LOG_BYTES, _MAX_FILE_BYTES = 8 << 20, 64 << 20
_NO_OUTPUT = "(no output; print what you want to see)"


class _Workshop:
    """Whatever the setup names, imported."""

    def __init__(self, setup: Setup, runner: CodeRunner | None) -> None:
        self._setup, self._runner = setup, runner
        self._functions: dict[str, Callable[..., Any]] = {
            name: _function(reference, arguments, setup.folder) for name, (reference, arguments) in setup.functions.items()
        }
        self._user: Any = None
        if setup.user is not None:
            self._user = load_class(setup.user, setup.folder, ("reply",), setup.user_parameters)(**setup.user_parameters)
            if inspect.iscoroutinefunction(self._user.reply):
                raise RuntimeFault(f"{setup.user}.reply is an async function; it has a process of its own, so make it a plain one")
        self._reward: RewardFunction | None = None if setup.reward is None else load(setup.reward, setup.folder, runner)

    def do(self, work: Work) -> Any:
        match work:
            case RunProgram():
                return self._run(work)
            case CallFunction():
                result = self._functions[work.name](**work.arguments)
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
                return {"text": text, "failed": False}
            case AskUser():
                return _reply(self._user.reply(dict(work.task), [dict(message) for message in work.messages]), str(self._setup.user))
            case ScoreAnswer():
                return self._score(work)

    def _run(self, work: RunProgram) -> Mapping[str, Any]:
        assert self._runner is not None
        outcome = self._runner.run(Run(code=work.code, timeout_s=work.timeout_s, memory_bytes=work.memory_bytes))
        output = outcome.output.rstrip()
        text = output or _NO_OUTPUT if outcome.ok else f"{output}\nError: {outcome.detail or outcome.problem}".strip()
        return {"text": text, "failed": not outcome.ok}

    def _score(self, work: ScoreAnswer) -> Mapping[str, float]:
        config = self._setup.reward
        assert config is not None
        assert self._reward is not None
        part = extract(work.response, config)
        score, extra = (0.0, {}) if part is None else to_scores(self._reward(work.prompt, part, work.answer, work.metadata))
        return {**extra, "score": score}


def _function(reference: str, arguments: tuple[str, ...], folder: str | None) -> Callable[..., Any]:
    function = load_function(reference, folder)
    takes = f"the arguments of its schema, {', '.join(arguments) or 'none'}"
    check_signature(function, reference, (), dict.fromkeys(arguments), takes)
    return function


def _reply(reply: Any, reference: str) -> Mapping[str, Any]:
    """A text, None (the conversation is over), or a ``Turn``, as JSON."""
    turn = Turn(observation="", done=True) if reply is None else Turn(observation=reply) if isinstance(reply, str) else reply
    if not isinstance(turn, Turn):
        raise TypeError(f"{reference}.reply returned {type(reply).__name__}; it must return a text, None at the end, or a Turn")
    reward = float(turn.reward)
    if not math.isfinite(reward):
        raise ValueError(f"{reference}.reply gave the reward {reward}; it must be finite")
    return {"observation": turn.observation, "reward": reward, "done": bool(turn.done)}


def _serve(connection: socket.socket, setup: Setup) -> int:
    """Serve until the parent closes the socket; returns the exit status.

    Raises:
        RefusedError: something that the setup names is of no use.
    """
    limits = Limits(
        job_folder=setup.folder,
        read_paths=setup.read_paths,
        write_paths=(os.getcwd(),),
        network=setup.network,
        processes=setup.processes or setup.runs_code,
        memory_bytes=setup.memory_bytes,
        file_bytes=_MAX_FILE_BYTES,
    )
    # Where programs run, this process stays single-threaded to fork; it looks at the connection while it waits.
    active = confined(connection, limits, watches=not setup.runs_code)
    try:
        workshop = _Workshop(setup, CodeRunner(connection.fileno()) if setup.runs_code else None)
    except RuntimeFault as error:
        raise RefusedError(str(error)) from error
    except BaseException as error:  # process border: whatever a user's class raises while it is constructed
        raise constructed(str(setup.user), error, os.path.dirname(__file__)) from error
    say_ready(connection, active)
    while (frame := read_frame(connection)) is not None:
        nonce, work = pickle.loads(frame)
        send_frame(connection, nonce + _answer(workshop, work))
        bound_log(_MAX_LOG_BYTES)
    return 0


def _answer(workshop: _Workshop, work: Work) -> bytes:
    started = time.perf_counter()
    try:
        body = json.dumps({"value": workshop.do(work), "elapsed_s": time.perf_counter() - started}).encode()
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"the result has {len(body)} bytes; {MAX_ANSWER_BYTES} are allowed")
    except BaseException as error:  # noqa: BLE001 - process border: whatever user code raises, sys.exit too, is the result of this work only
        traceback.print_exc()
        body = json.dumps({"error": one_line(error, os.path.dirname(__file__)), "elapsed_s": time.perf_counter() - started}).encode()
    return body


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _serve))
