"""The environments that come with the runtime, and how a task of a configuration is made.

Games look the policy's answer up among their actions, take milliseconds and cannot hang, so that they run in the worker itself.
Conversations have their tools, users and scores in processes (:mod:`.conversation_host`), classes of the user's all of themselves
(:mod:`.crew`), and so has ReasoningGym: several of its tasks evaluate the answer as an expression of Python or SymPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rljob_api.vocabulary import EnvironmentType
from rljob_runtime.environments.config import Isolation
from rljob_runtime.environments.protocol import Task
from rljob_runtime.errors import EnvironmentSetupError

BUILT_IN = {
    "FrozenLake": "frozen_lake:FrozenLake",
    "Sokoban": "sokoban:Sokoban",
}
"""Module below this package and class; imported when a job names it."""
SANDBOXED = {"ReasoningGym": f"{__package__}.reasoning_gym_task:ReasoningGym"}
"""Played in processes as a user's class is."""
SHARED = Isolation(max_processes=16, episodes_per_process=256)
"""Of those: a call takes milliseconds, so that many episodes share a process."""
CONVERSATIONS = (EnvironmentType.TOOL_USE, EnvironmentType.CHAT)


def is_built_in(kind: str) -> bool:
    """Whether a type is a built-in game; raises EnvironmentSetupError when it is no ``module:Class`` either."""
    if kind in BUILT_IN:
        return True
    if ":" not in kind:
        known = ", ".join((*BUILT_IN, *SANDBOXED, *CONVERSATIONS))
        raise EnvironmentSetupError(f"environment type {kind!r} is unknown; use {known}, or name your own as module:Class")
    return False


def make_task(kind: str, parameters: Mapping[str, Any]) -> Task:
    """A built-in environment; raises EnvironmentSetupError when a parameter is unknown or of no use."""
    module, _, name = BUILT_IN[kind].partition(":")
    task: Task = getattr(import_module(f"{__package__}.{module}"), name)(parameters)
    return task
