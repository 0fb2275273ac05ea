"""Runs code that a model wrote: one process per run, forked from a small one that has never seen a test.

::

    scoring process (holds the tests, compares)  == socket ==>  zygote (imports only)  -- fork -->  run: limits, then the code
                     ^                                             |  clock, output limit, kill
                     └── Outcome: how it ended, what it printed ───┘

The run has what it is given and nothing else: its input, an empty folder, the standard library. Expected outputs stay in the scoring
process. Assertions run beside the code they test, as they must; code that searches the interpreter for them can find them.

In the zygote and the scoring process there is one thread, so that forking is safe.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob_runtime.sandbox import Limits, confine
from rljob_runtime.sandbox import kernel as sandbox_kernel
from rljob_runtime.sandbox.disk import used_bytes
from rljob_runtime.sandbox.frames import end_group, read_exactly

MAX_OUTPUT_BYTES = 1 << 20
MAX_DETAIL_CHARACTERS = 500
MAX_DISK_BYTES, MAX_FILE_BYTES, MAX_OPEN_FILES = 64 << 20, 16 << 20, 64
"""Of all files of a run, of one of them; open ones at a time, whose names may be gone."""
_LOOK_EVERY_S = 0.05
_LENGTH = struct.Struct("<I")
_RESULT_FD = 3
_STACK_DEPTH = 100_000
SOLUTION_MODULES = (
    "sys", "re", "json", "math", "random", "string", "time", "copy", "heapq", "bisect", "itertools", "functools", "collections", "operator",
    "datetime", "statistics", "decimal", "fractions", "io",
)  # fmt: skip
SOLUTION_STARS = ("typing", "collections", "functools", "itertools", "heapq", "bisect", "math", "string")
"""What solutions may use without importing it, as the datasets' own checkers have it: modules, and all names of modules, the later ones'
before the earlier ones' (``collections.Counter``, not ``typing.Counter``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution."""

    code: str
    timeout_s: float
    memory_bytes: int
    stdin: str = ""
    function: str | None = None
    """Called with ``arguments`` after the code, as a method of ``Solution`` where the code has that class."""
    arguments: tuple[object, ...] = ()
    asserts: str | None = None
    """Run after the code, in its names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an execution ended."""

    ok: bool
    """Ran to its end without an exception."""
    output: str = ""
    """What it printed."""
    value: object = None
    """What the function returned, through JSON."""
    problem: str = ""
    """Where not ok, in a few words."""
    detail: str = ""
    """Where it raised: the exception and its line, as the code's author would want to read it."""


class CodeRunner:
    """The zygote, from the scoring process."""

    def __init__(self, parent_fd: int) -> None:
        """Start it; ``parent_fd`` is watched while a run is waited for: when it closes, this process and all runs end."""
        self._parent_fd = parent_fd
        self._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                self._socket.close()
                os.close(parent_fd)
                _serve(theirs.fileno())
            finally:
                os._exit(0)
        theirs.close()

    def run(self, run: Run) -> Outcome:
        """Execute code and wait for it."""
        _send(self._socket.fileno(), json.dumps(asdict(run)).encode())
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        poller.register(self._parent_fd, 0)
        for fd, _ in poller.poll():
            if fd == self._parent_fd:
                end_group()
        head = read_exactly(self._socket.fileno(), _LENGTH.size)
        body = None if head is None else read_exactly(self._socket.fileno(), _LENGTH.unpack(head)[0])
        if body is None:
            raise RuntimeError("the process that starts runs is gone")
        return Outcome(**json.loads(body))


def _send(fd: int, body: bytes) -> None:
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(fd, view) :]


def _serve(fd: int) -> None:
    """The zygote's loop."""
    sandbox_kernel.prctl(sandbox_kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    names = solution_names()
    while (head := read_exactly(fd, _LENGTH.size)) is not None:
        body = read_exactly(fd, _LENGTH.unpack(head)[0])
        if body is None:
            return
        given = json.loads(body)
        run = Run(**(given | {"arguments": tuple(given["arguments"])}))
        folder = tempfile.mkdtemp(dir=os.getcwd())
        try:
            outcome = _execute(run, folder, names)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _send(fd, json.dumps(asdict(outcome)).encode())


def solution_names() -> dict[str, Any]:
    """Names that a solution finds, by name: as ``import`` and ``from ... import *`` would have put them there."""
    names: dict[str, Any] = {name: importlib.import_module(name) for name in SOLUTION_MODULES}
    for star in map(importlib.import_module, SOLUTION_STARS):
        public = getattr(star, "__all__", None) or [name for name in vars(star) if not name.startswith("_")]
        names |= {name: getattr(star, name) for name in public}
    return names | {"deepcopy": copy.deepcopy}


def _execute(run: Run, folder: str, names: Mapping[str, object]) -> Outcome:
    """Fork, wait at most ``run.timeout_s``, kill."""
    (Path(folder) / "stdin").write_text(run.stdin, encoding="utf-8", errors="surrogatepass")
    token = secrets.token_hex(16)
    output_read, output_write = os.pipe()
    result_read, result_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become(run, folder, output_write, result_write)
            _run(run, names, token)
        finally:
            os._exit(1)
    os.close(output_write)
    os.close(result_write)
    received: dict[int, bytearray] = {output_read: bytearray(), result_read: bytearray()}
    try:
        problem = _collect(received, folder, time.monotonic() + run.timeout_s)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(output_read)
        os.close(result_read)
    output = received[output_read].decode(errors="replace")
    return _outcome(bytes(received[result_read]), token, output, problem or _ending(status))


def _collect(received: Mapping[int, bytearray], folder: str, deadline: float) -> str:
    """Read both pipes until they close, and look at what is written into ``folder``; returns what went wrong, empty when nothing did."""
    poller = select.poll()
    for fd in received:
        poller.register(fd, select.POLLIN)
    waiting, look_at = len(received), time.monotonic() + _LOOK_EVERY_S
    while waiting:
        now = time.monotonic()
        if now >= deadline:
            return "ran past its time limit"
        if now >= look_at:
            if used_bytes(folder, MAX_DISK_BYTES) > MAX_DISK_BYTES:
                return f"wrote more than {MAX_DISK_BYTES} bytes"
            look_at = time.monotonic() + _LOOK_EVERY_S
        for fd, _ in poller.poll(max(0.0, min(deadline, look_at) - now) * 1000):
            piece = os.read(fd, 1 << 16)
            received[fd].extend(piece)
            if not piece:
                poller.unregister(fd)
                waiting -= 1
            elif len(received[fd]) > MAX_OUTPUT_BYTES:
                return f"printed more than {MAX_OUTPUT_BYTES} bytes"
    return ""


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "" if number == signal.SIGKILL else f"died of {signal.Signals(number).name}"
    return ""


def _outcome(result: bytes, token: str, output: str, problem: str) -> Outcome:
    """The run's own last words count only with the token, which was never printed."""
    try:
        said = json.loads(result)
        known = isinstance(said, dict) and said.get("token") == token
    except ValueError:
        known = False
    if not known or problem:
        return Outcome(ok=False, output=output, problem=problem or "ended before its end")
    if said["problem"]:
        return Outcome(ok=False, output=output, problem=str(said["problem"]), detail=str(said["detail"])[:MAX_DETAIL_CHARACTERS])
    return Outcome(ok=True, output=output, value=said["value"])


def _become(run: Run, folder: str, output_fd: int, result_fd: int) -> None:
    """Turn this fork into a process that can only compute, and write into its folder and the two pipes."""
    sandbox_kernel.prctl(sandbox_kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(folder)
    result = os.dup(result_fd) if result_fd == _RESULT_FD else result_fd
    output = os.dup(output_fd) if output_fd == _RESULT_FD else output_fd
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(result, _RESULT_FD)
    os.closerange(_RESULT_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.environ.clear()
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)
    confine(
        Limits(
            write_paths=(folder,),
            memory_bytes=run.memory_bytes,
            file_bytes=MAX_FILE_BYTES,
            open_files=MAX_OPEN_FILES,
            cpu_s=run.timeout_s + 1,
        )
    )


def _run(run: Run, prelude: Mapping[str, Any], token: str) -> None:
    """The code, then what is asked of it, then the last words."""
    said: dict[str, object] = {"token": token, "problem": "", "detail": "", "value": None}
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(_STACK_DEPTH)
    # Tests import what they test from a module of this name (KodCode).
    sys.modules["solution"] = module = ModuleType("solution")
    module.__dict__.update(prelude)
    names = module.__dict__
    names["__name__"] = "__main__"
    try:
        try:
            exec(compile(run.code, "solution.py", "exec"), names)  # noqa: S102 - what this process is for
        except SystemExit as stop:
            if run.function is not None or run.asserts is not None or stop.code not in (None, 0):
                raise
        if run.function is not None:
            said["value"] = json.loads(json.dumps(_called(run, names)))
        if run.asserts is not None:
            exec(compile(run.asserts, "tests.py", "exec"), names)  # noqa: S102 - what this process is for
    except BaseException as error:  # noqa: BLE001 - process border: whatever the code raises, SystemExit too, is its result
        said["problem"], said["detail"] = type(error).__name__, _detail(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.write(_RESULT_FD, json.dumps(said).encode())
    os._exit(0)


def _detail(error: BaseException) -> str:
    """The exception and the line of the code, as texts of the code's own may have it; never raises."""
    try:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "solution.py"]
        text = traceback.format_exception_only(error)[-1].strip()
    except BaseException:  # noqa: BLE001 - the exception is the code's own class
        return type(error).__name__
    return f"{text} (line {lines[-1]})" if lines else text


def _called(run: Run, names: Mapping[str, Any]) -> object:
    owner = names["Solution"]() if "Solution" in names else None
    name = str(run.function)
    function = getattr(owner, name) if owner is not None and hasattr(owner, name) else names[name]
    return function(*run.arguments)
