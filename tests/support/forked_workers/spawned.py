"""``spawned.py NAME=NUMBER... --multiprocessing-fork``: what multiprocessing spawns, as a script; the numbers are of open files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.spawn import spawn_main
from typing import Any

LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher.py")
WORKER = "RLJOB_TESTS_FORK_WORKER"
CONTEXT = "--serialized-runtime-env-context="
LAST = "--multiprocessing-fork"


def forking(worker: Mapping[str, Any]) -> Callable[..., list[str]]:
    """In the place of ``multiprocessing.spawn.get_command_line``: what is spawned is a fork of a process for ``worker``."""
    context = json.dumps({"env_vars": {WORKER: json.dumps(worker)}})

    def command_line(**numbers: int) -> list[str]:
        given = [f"{name}={number}" for name, number in numbers.items()]
        return [sys.executable, LAUNCHER, f"{CONTEXT}{context}", os.path.abspath(__file__), *given, LAST]

    return command_line


def main() -> None:
    """Does not return."""
    numbers = {name: int(number) for name, _, number in (argument.partition("=") for argument in sys.argv[1:-1])}
    del sys.argv[1:-1]  # multiprocessing looks for the last
    spawn_main(**numbers)


if __name__ == "__main__":
    main()
