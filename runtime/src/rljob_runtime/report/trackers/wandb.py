"""Weights & Biases. Online where WANDB_API_KEY is set; else offline, for ``wandb sync``. WANDB_MODE overrides both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from rljob_runtime.report.trackers.protocol import TrackedRun, Tracker

STEP = "training step"
"""Metric that the charts have on their x-axis."""


def make(run: TrackedRun) -> Tracker:
    """Open the run."""
    import wandb

    mode: Literal["online", "offline"] | None
    mode = None if "WANDB_MODE" in os.environ else "online" if os.environ.get("WANDB_API_KEY") else "offline"
    # Console, code and machine statistics would be those of the tracker's own process.
    settings = wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_stats=True)
    opened = wandb.init(
        project=run.project,
        name=run.name,
        id=run.run_id,
        resume="allow",
        dir=str(run.folder),
        config=dict(run.config),
        mode=mode,
        settings=settings,
    )

    opened.define_metric(STEP)
    opened.define_metric("*", step_metric=STEP)

    class _Run:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            # Not as W&B's own step, with which it ignores what a restart repeats and keeps what that discarded.
            opened.log({**metrics, STEP: step})

        def finish(self, *, succeeded: bool) -> None:
            opened.finish(exit_code=0 if succeeded else 1)

    return _Run()
