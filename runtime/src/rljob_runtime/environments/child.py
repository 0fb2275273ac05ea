"""The process of a user's environments: ``python -m rljob_runtime.environments.child FD``, started by :mod:`.crew` only.

It confines itself, imports and constructs the class, and answers one call after the other. Frames over the inherited socket ``FD``
(:mod:`rljob_runtime.sandbox.frames`):

* parent to child: first one pickled ``Setup``, then pickled pairs of a nonce and a call (``Begin``, ``Step``, ``Release``).
* child to parent: first ``READY`` or ``FAILED`` plus text, then for each ``Begin`` and ``Step`` the nonce and JSON. Nothing that a user's
  class returns is ever unpickled by the parent, and without the nonce nothing that it writes to the socket is an answer.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rljob_runtime.environments.calls import Begin, Release, Setup, Step
from rljob_runtime.environments.plugin import PluginTask
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.sandbox import Limits
from rljob_runtime.sandbox.child import RefusedError, bound_log, confined, constructed, main, say_ready
from rljob_runtime.sandbox.faults import one_line
from rljob_runtime.sandbox.frames import read_frame, send_frame

_TEXTS = ("observation", "instruction", "suffix", "role", "state_key")
MAX_ANSWER_BYTES = 4 << 20
MAX_LOG_BYTES, MAX_FLOOD_BYTES = 8 << 20, 64 << 20
"""The log is emptied between two calls when it is longer than the first; within one call it never grows beyond the second."""


class _Tasks:
    """The environments of this process: those in use by episode, and those that are free."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._used: dict[str, PluginTask] = {}
        self._free = [self._make()]

    def answer(self, call: Begin | Step) -> Turn:
        if isinstance(call, Step):
            return self._used[call.key].step(call.action)
        task = self._used[call.key] = self._free.pop() if self._free else self._make()
        turn = task.reset(call.seed)
        for action in call.actions:
            turn = task.step(action)
        return turn

    def release(self, key: str) -> None:
        if key in self._used:
            self._free.append(self._used.pop(key))

    def discard(self, key: str) -> None:
        """Give up an environment that raised: what it is in is unknown."""
        task = self._used.pop(key, None)
        if task is None:
            return
        try:
            task.close()
        except Exception:  # noqa: BLE001 - it has failed already, and the log has both
            traceback.print_exc()

    def _make(self) -> PluginTask:
        folder = None if self._setup.folder is None else Path(self._setup.folder)
        return PluginTask(self._setup.reference, folder, self._setup.parameters)


def _serve(connection: socket.socket, setup: Setup) -> int:
    """Serve until the parent closes the socket; returns the exit status.

    Raises:
        RefusedError: the class is of no use.
    """
    active = confined(
        connection,
        Limits(
            job_folder=setup.folder,
            read_paths=setup.read_paths,
            write_paths=(os.getcwd(),),
            network=setup.network,
            processes=setup.processes,
            memory_bytes=setup.memory_bytes,
            file_bytes=MAX_FLOOD_BYTES,
        ),
    )
    try:
        tasks = _Tasks(setup)
    except RuntimeFault as error:
        raise RefusedError(str(error)) from error
    except BaseException as error:  # process border: whatever a user's class raises while it is constructed
        raise constructed(setup.reference, error, os.path.dirname(__file__)) from error
    say_ready(connection, active)
    while (frame := read_frame(connection)) is not None:
        nonce, call = pickle.loads(frame)
        if isinstance(call, Release):
            tasks.release(call.key)
        else:
            send_frame(connection, nonce + _answer(tasks, call))
            bound_log(MAX_LOG_BYTES)
    return 0


def _answer(tasks: _Tasks, call: Begin | Step) -> bytes:
    started = time.perf_counter()
    try:
        turn = tasks.answer(call)
        body = json.dumps({"turn": _plain(turn), "elapsed_s": time.perf_counter() - started}).encode()
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(
                f"its observation has {len(turn.observation)} characters, {len(body)} bytes as sent; {MAX_ANSWER_BYTES} are allowed"
            )
    except BaseException as error:  # noqa: BLE001 - process border: whatever user code raises, sys.exit too, fails this episode only
        bound_log(MAX_LOG_BYTES)  # what it printed may have filled it
        traceback.print_exc()
        tasks.discard(call.key)
        body = json.dumps({"error": one_line(error, os.path.dirname(__file__)), "elapsed_s": time.perf_counter() - started}).encode()
    return body


def _plain(turn: Turn) -> dict[str, Any]:
    """The fields as JSON has them; numbers may be numpy's."""
    numbers = {str(name): float(value) for name, value in turn.info.items()}
    plain = {name: getattr(turn, name) for name in _TEXTS}
    return plain | {
        "reward": float(turn.reward),
        "done": bool(turn.done),
        "action_valid": bool(turn.action_valid),
        "info": numbers,
        "aggregation": dict(turn.aggregation),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _serve))
