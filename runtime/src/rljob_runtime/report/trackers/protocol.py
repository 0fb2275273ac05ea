"""What a tracker is to the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run as a tracker gets to know it."""

    project: str
    name: str
    """Of the job."""
    run_id: str
    """Stays the same over restarts and resumptions: what is sent later continues the same run."""
    folder: Path
    """Of this tracker alone, inside the run folder: for what it keeps on this machine."""
    config: Mapping[str, Any]
    """The resolved spec."""


class Tracker(Protocol):
    """A run that is open in a tracker. Any exception ends the tracker, never the training."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's finite metrics; steps that are trained again after a restart come again."""

    def finish(self, *, succeeded: bool) -> None:
        """Close the run and send what is left."""
