"""Imports the modules it is given, then forks Ray workers; see the package.

A fork is a process as the interpreter would have started it: argument list, import path, working folder, environment, signals and random
numbers are its own. What the imports themselves added to the environment is in it, as it would be in a process that imported them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.abc
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import launcher
import messages

PR_SET_PDEATHSIG = 1
ABOVE = 512
"""Numbers of open files that no process of tests is given by its parent."""
BLOCKED = "ray"
"""Reads its configuration from the environment and starts a thread when it is imported. vLLM, which only wants it for a way of running
workers that RLJob never asks for, does without."""
READ_BY_NO_IMPORT = {
    "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_V2_MODEL_RUNNER",
}  # fmt: skip
"""Variables that forks of one process may have other values of, which is verified while it imports."""
SCRIPT_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == BLOCKED:
            raise ImportError(f"{name} is imported by forks only")


@contextlib.contextmanager
def _variables_read() -> Iterator[set[str]]:
    """The names of variables of the environment that Python code looks up in the block."""
    kind, names = type(os.environ), set()
    get = kind.__getitem__

    def recorded(self: Any, name: str) -> str:
        names.add(name)
        return get(self, name)

    kind.__getitem__ = recorded
    try:
        yield names
    finally:
        kind.__getitem__ = get


@dataclass
class _Fork:
    """As its parent knows it."""

    pid: int
    pidfd: int
    launcher: socket.socket


def preload(modules: list[str]) -> dict[str, str]:
    """Import them; the variables that this set."""
    before = dict(os.environ)
    finder = _Without()
    sys.meta_path.insert(0, finder)
    with _variables_read() as read:
        for module in modules:
            importlib.import_module(module)
    sys.meta_path.remove(finder)
    if found := sorted(read & READ_BY_NO_IMPORT):
        raise SystemExit(f"imports of {modules} read {found}, of which forks may have other values")
    if "setproctitle" in sys.modules:  # finds what it writes to, which it does not once a fork has another environment
        sys.modules["setproctitle"].getproctitle()
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in threads]
        raise SystemExit(f"imports of {modules} started threads, which no fork has: {names}")
    if BLOCKED in sys.modules:
        raise SystemExit(f"{BLOCKED} was imported")
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork until ``control`` is closed: None then, and in each fork the request that it is to be."""
    forks: list[_Fork] = []
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file == control.fileno():
                request, files = messages.receive(control)
                if request is None:
                    return None
                made = _fork(request, files)
                if made is None:
                    control.close()
                    for fork in forks:
                        fork.launcher.close()
                        os.close(fork.pidfd)
                    _place(files[1:], request["files"])
                    return request
                forks.append(made)
                poll.register(made.pidfd, select.POLLIN)
                poll.register(made.launcher, select.POLLIN)
            else:
                for fork in [f for f in forks if file in (f.pidfd, f.launcher.fileno())]:
                    poll.unregister(fork.pidfd)
                    poll.unregister(fork.launcher)
                    forks.remove(fork)
                    _end(fork, killed=file == fork.launcher.fileno())


def _fork(request: dict[str, Any], files: list[int]) -> _Fork | None:
    """None in the fork."""
    launcher = socket.socket(fileno=files[0])
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # as the node does with what it starts: Ray kills the group of a worker that has ended
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        launcher.close()
        return None
    for file in files[1:]:
        os.close(file)
    with contextlib.suppress(OSError):  # the launcher is gone: poll sees that
        messages.send(launcher, {"pid": pid})
    return _Fork(pid, os.pidfd_open(pid), launcher)


def _place(files: list[int], numbers: list[int]) -> None:
    """The launcher's open files under the numbers that they have there; no other is open here."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _end(fork: _Fork, killed: bool) -> None:
    """It has ended, or ends because its launcher was killed."""
    if killed:
        signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
    with contextlib.suppress(OSError):  # it was killed
        messages.send(fork.launcher, {"status": status})
    fork.launcher.close()
    os.close(fork.pidfd)


def become(request: dict[str, Any], from_imports: dict[str, str]) -> None:
    """The worker's process, until it ends."""
    os.chdir(request["folder"])
    os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    os.environ.clear()
    os.environ.update(request["environment"] | from_imports)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    multiprocessing.spawn.get_command_line = launcher.spawning(request["worker"])
    for name, value in request["worker"].get("replaced", {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, tuple(value))
    argv = request["argv"]
    is_module = argv[0] == "-m"
    own = [place for place in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [request["folder"] if is_module else os.path.dirname(argv[0]), *own, *sys.path]
    sys.argv[:] = argv[1:] if is_module else argv
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own numbers are seeded by os.fork
    if is_module:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    """``preloaded.py CONTROL MODULE...``: ``CONTROL`` is the number of the open socket to the manager."""
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path.remove(SCRIPT_FOLDER)
    gc.disable()  # a sixth of what the imports compute
    from_imports = preload(sys.argv[2:])
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all that it looks at
    gc.enable()
    request = serve(control)
    if request is not None:
        become(request, from_imports)


if __name__ == "__main__":
    main()
