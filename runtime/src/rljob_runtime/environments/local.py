"""Runs built-in environments in the worker itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from rljob_runtime.environments.builtin import make_task
from rljob_runtime.environments.config import EnvironmentConfig
from rljob_runtime.environments.outcome import Counters, Failure, Outcome
from rljob_runtime.environments.protocol import Task, Turn


class LocalHost:
    """Tasks by episode; each call is answered before it returns."""

    def __init__(self, config: EnvironmentConfig, deliver: Callable[[Outcome], None]) -> None:
        """Raise EnvironmentSetupError when a parameter is unknown or of no use."""
        self.counters = Counters()
        self.sandbox = ""
        self.max_episodes = None
        self._config, self._deliver = config, deliver
        self._used: dict[str, Task] = {}
        self._free = [make_task(config.type, config.parameters)]

    def begin(self, key: str, seed: int) -> None:
        """Begin an episode."""
        self._used[key] = task = self._free.pop() if self._free else make_task(self._config.type, self._config.parameters)
        self._call(key, lambda: task.reset(seed), is_reset=True)

    def step(self, key: str, action: str) -> None:
        """Act in it."""
        task = self._used[key]
        self._call(key, lambda: task.step(action), is_reset=False)

    def release(self, key: str) -> None:
        """It is over: its task is free for another."""
        if (task := self._used.pop(key, None)) is not None:
            self._free.append(task)

    def next_deadline(self) -> float | None:
        """None: no call takes time."""
        return None

    def check_deadlines(self, now: float) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Give up all tasks."""
        for task in (*self._used.values(), *self._free):
            task.close()
        self._used.clear()
        self._free.clear()

    def _call(self, key: str, call: Callable[[], Turn], *, is_reset: bool) -> None:
        started = time.perf_counter()
        try:
            outcome = Outcome(key=key, turn=call())
        except Exception as error:  # noqa: BLE001 - what one seed or action leads to must not end the others' episodes
            self.counters.failures[Failure.RAISED] += 1
            outcome = Outcome(key=key, error=f"environment {self._config.name!r}: {type(error).__name__}: {error}")
        self.counters.took(time.perf_counter() - started, is_reset=is_reset)
        self._deliver(outcome)
