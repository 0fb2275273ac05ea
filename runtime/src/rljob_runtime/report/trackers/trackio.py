"""Trackio. To the Space of TRACKIO_SPACE_ID or the server of TRACKIO_SERVER_URL where one is set; else into the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rljob_runtime.report.trackers.protocol import TrackedRun, Tracker


def make(run: TrackedRun) -> Tracker:
    """Open the run, or open it again."""
    os.environ.setdefault("TRACKIO_DIR", str(run.folder.resolve()))  # read when the package is imported
    import trackio

    # Its runs are found again by their name, so that the identifier is part of it. Statistics would be those of the tracker's own process.
    opened = trackio.init(
        project=run.project,
        name=f"{run.name}-{run.run_id}",
        resume="allow",
        config=dict(run.config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    class _Run:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            opened.log(dict(metrics), step=step)

        def finish(self, *, succeeded: bool) -> None:
            trackio.finish()

    return _Run()
