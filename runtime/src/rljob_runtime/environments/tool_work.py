"""What a conversation has done in a process, and what comes back. No main program: that would be another module to pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_runtime.environments.outcome import Failure
from rljob_runtime.rewards.config import RewardConfig

NONCE_BYTES = 16
Message = Mapping[str, str]
"""Role (``user``, ``assistant`` or ``tool``) and content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message: what a process is for."""

    folder: str | None
    """Searched first for the user's code."""
    runs_code: bool = False
    """Runs programs that the policy wrote, each in a process of its own, and nothing of the user's."""
    functions: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """``module:function`` of each tool, and the arguments that its schema names."""
    user: str | None = None
    """``module:Class`` of the chat's user."""
    user_parameters: Mapping[str, Any] = field(default_factory=dict)
    reward: RewardConfig | None = None
    """Scores answers."""
    network: bool = False
    processes: bool = False
    read_paths: tuple[str, ...] = ()
    memory_bytes: int = 8 << 30
    disk_bytes: int = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgram:
    """Run what the policy wrote."""

    code: str
    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFunction:
    """Call a tool of the user's."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskUser:
    """What the chat's user says next."""

    task: Mapping[str, Any]
    """``prompt``, ``answer`` and ``metadata``."""
    messages: tuple[Message, ...]
    """The conversation so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAnswer:
    """Score the last response."""

    prompt: str
    response: str
    answer: str
    metadata: Mapping[str, Any]


Work = RunProgram | CallFunction | AskUser | ScoreAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    value: Any = None
    """JSON. Tool: ``text``, ``failed``. User: ``observation``, ``reward``, ``done``. Score: ``score`` and other numbers."""
    error: str = ""
    """One line; empty where nothing went wrong."""
    failure: Failure | None = None
    """Which kind of error."""
    elapsed_s: float = 0.0
