"""A worker that says where it runs: the stand-in for engines and trainers in the tests of placement."""

import os
import sys
import threading
from typing import Any

import ray


class Probe:
    """Answers what only the process itself and Ray know, holds a call open, and remembers the order of calls."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._released = threading.Event()

    def where(self) -> tuple[str, str, dict[str, str]]:
        """Ray's id of the node, the interpreter, the environment."""
        node: str = ray.get_runtime_context().get_node_id()
        return node, sys.executable, dict(os.environ)

    def hold(self) -> None:
        """Return after :meth:`release`."""
        self._released.wait()

    def release(self) -> None:
        """Let :meth:`hold` return."""
        self._released.set()

    def note(self, note: str, after: Any = None) -> list[str]:
        """All notes so far, this one included; ``after`` is only waited for."""
        self._notes.append(note)
        return self._notes
