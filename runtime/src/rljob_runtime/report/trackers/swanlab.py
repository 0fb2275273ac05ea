"""SwanLab. Online where SWANLAB_API_KEY is set; else offline, for ``swanlab sync``. SWANLAB_MODE overrides both."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rljob_runtime.report.trackers.protocol import TrackedRun, Tracker


def make(run: TrackedRun) -> Tracker:
    """Open the run, or open it again."""
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
    opened = swanlab.init(
        project=run.project,
        name=run.name,
        id=run.run_id,
        resume="allow",
        log_dir=str(run.folder),
        config=dict(run.config),
        mode=mode,
    )

    class _Run:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            opened.log(dict(metrics), step=step)

        def finish(self, *, succeeded: bool) -> None:
            opened.finish(state="success" if succeeded else "crashed")

    return _Run()
