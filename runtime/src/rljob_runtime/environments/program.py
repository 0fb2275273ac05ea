"""The process around an agent program: ``python -m rljob_runtime.environments.program FD``, started by :mod:`.programs` only.

It confines itself, starts the program, waits for its end and says what became of it. Frames over the inherited socket ``FD``
(:mod:`rljob_runtime.sandbox.frames`):

* parent to child: one pickled ``Setup``, then one pickled ``Run``, then the calls as JSON where they are asked for.
* child to parent: ``READY`` or ``FAILED`` plus text, then JSON: the exit code, the reward, the end of the output; before it
  ``{"asks": true}`` where a reward function is to be given the calls.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_runtime.errors import PluginError
from rljob_runtime.plugins import Function, check_signature, load_function
from rljob_runtime.sandbox import Limits
from rljob_runtime.sandbox.child import RefusedError, confined, main, say_ready
from rljob_runtime.sandbox.faults import one_line
from rljob_runtime.sandbox.frames import read_frame, send_frame

OUTPUT, REWARD, TASK = "output.log", "reward.json", "task.json"
"""Files of the episode's own folder."""
MAX_REWARD_BYTES, MAX_TAIL_BYTES, MAX_FILE_BYTES = 64 << 10, 4096, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    read_paths: tuple[str, ...]
    network: bool
    port: int
    """Of the endpoint."""
    memory_bytes: int
    disk_bytes: int
    reward: str | None
    """Function that gives the reward, as ``module:function``; None: the program's file."""
    folder: str | None
    """Searched first for its module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The second one."""

    command: tuple[str, ...]
    working_folder: str | None
    variables: Mapping[str, str]
    task: str
    """JSON."""


def _serve(connection: socket.socket, setup: Setup) -> int:
    """Run one program; returns the exit status.

    Raises:
        RefusedError: the reward function is of no use.
    """
    active = confined(
        connection,
        Limits(
            job_folder=setup.folder,
            read_paths=setup.read_paths,
            write_paths=(os.getcwd(),),
            network=setup.network,
            connect_port=setup.port,
            processes=True,
            memory_bytes=setup.memory_bytes,
            file_bytes=MAX_FILE_BYTES,
        ),
    )
    try:
        score = _load(setup)
    except PluginError as error:
        raise RefusedError(f"reward: {error}") from error
    say_ready(connection, active)
    second = read_frame(connection)
    if second is None:
        return 0
    run: Run = pickle.loads(second)
    ended = _run(run)
    if score is not None and ended.get("code") == 0:
        send_frame(connection, json.dumps({"asks": True}).encode())
        calls = read_frame(connection)
        if calls is None:
            return 0
        ended |= _scored(score, run.task, calls)
    send_frame(connection, json.dumps(ended).encode())
    read_frame(connection)  # the parent ends this process, and what the program left behind
    return 0


def _load(setup: Setup) -> Function | None:
    if setup.reward is None:
        return None
    function = load_function(setup.reward, setup.folder)
    check_signature(function, setup.reward, ("task", "calls"), {}, "task and calls")
    return function


def _scored(score: Function, task: str, calls: bytes) -> dict[str, object]:
    """What the reward function makes of a task and the calls."""
    try:
        return {"reward": json.dumps(score(json.loads(task), json.loads(calls)))}
    except BaseException as error:  # noqa: BLE001 - process border: whatever user code raises, sys.exit too, fails this episode only
        traceback.print_exc()
        return {"error": f"was not scored: {one_line(error, os.path.dirname(__file__))}"}


def _run(run: Run) -> dict[str, object]:
    folder = Path.cwd()
    (folder / TASK).write_text(run.task, encoding="utf-8")
    # The interpreter of the workers first, so that python is the one that has their packages.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    variables = {**os.environ, "PATH": path, "RLJOB_TASK": str(folder / TASK), "RLJOB_REWARD_FILE": str(folder / REWARD), **run.variables}
    with (folder / OUTPUT).open("wb") as output:
        try:
            process = subprocess.Popen(
                run.command,
                cwd=run.working_folder or folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return {"error": f"{run.command[0]!r} could not be started in {run.working_folder or folder}: {error.strerror}"}
        code = process.wait()
    return {"code": code, "reward": _reward(folder / REWARD), "tail": _tail(folder / OUTPUT)}


def _reward(path: Path) -> str | None:
    """The reward file's text; None where there is none, or it is no plain file of moderate size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_REWARD_BYTES:
            return None
        return file.read().decode(errors="replace")


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_TAIL_BYTES))
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _serve))
