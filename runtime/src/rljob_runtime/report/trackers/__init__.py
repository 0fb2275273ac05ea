"""Experiment trackers that a run reports to (``spec.report.trackers``): Weights & Biases, MLflow, Trackio, SwanLab.

::

    Reporter ── write(StepRecord) ──> TrackerFeed ──(JSON lines, never waits)──> process of one tracker ──> its package
                                      feed.py                                    process.py                wandb.py, mlflow.py, ...

Each tracker is a process of its own: its package prints, uploads, crashes and leaks there, and training never waits for it. One file per
tracker; its package is imported in that process alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.v1alpha1.operations import Tracker, TrackerType
from rljob_runtime.errors import SetupError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPackage:
    """What a tracker needs to be installed."""

    package: str
    """The import name."""
    extra: str
    """The extra of rljob-runtime that installs it."""
    module: str
    """Where its ``make`` is."""


def _row(name: str) -> TrackerPackage:
    return TrackerPackage(package=name, extra=name, module=f"{__name__}.{name}")


TRACKERS: Mapping[TrackerType, TrackerPackage] = {
    TrackerType.WANDB: _row("wandb"),
    TrackerType.MLFLOW: _row("mlflow"),
    TrackerType.TRACKIO: _row("trackio"),
    TrackerType.SWANLAB: _row("swanlab"),
}


def check_installed(trackers: Sequence[Tracker]) -> None:
    """Refuse trackers whose package this Python lacks; their processes run beside the driver.

    Raises:
        SetupError: one or several are missing; names the extra of each.
    """
    missing = [
        f"spec.report.trackers[{index}].type {tracker.type} needs the package {row.package}, which is not installed; "
        f"pip install 'rljob-runtime[{row.extra}]', or remove the tracker"
        for index, tracker in enumerate(trackers)
        if not _is_installed((row := TRACKERS[tracker.type]).package)
    ]
    if missing:
        raise SetupError("\n".join(missing))


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of that name, which W&B and MLflow leave beside jobs, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
