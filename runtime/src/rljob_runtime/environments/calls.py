"""What a crew sends to a process of a user's environments. A module of its own: the process's main program is another module to pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    reference: str
    folder: str | None
    parameters: Mapping[str, Any]
    network: bool
    processes: bool
    read_paths: tuple[str, ...]
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Reset an environment and take the actions again that were taken before; answered with the last turn."""

    key: str
    seed: int
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Act."""

    key: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The episode is over or given up; the environment is free for another. Not answered."""

    key: str
