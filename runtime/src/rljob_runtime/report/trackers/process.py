"""``python -m rljob_runtime.report.trackers.process TYPE``: runs one tracker. Started by :class:`~.feed.TrackerFeed`.

It reads JSON lines from its input: first the run, then a line a step, then how the run ended. Where the input ends without that, the driver
is gone and the run counts as failed. What the package prints is the log.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rljob_api.v1alpha1.operations import TrackerType
from rljob_runtime.report.trackers import TRACKERS
from rljob_runtime.report.trackers.protocol import TrackedRun, Tracker


def main(arguments: Sequence[str]) -> int:
    """Run the tracker; any error of its package ends the process, whose last line says what it was."""
    # Ctrl-C and the stop of a pod are for the driver, which then says how the run ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(sys.stdin, importlib.import_module(TRACKERS[TrackerType(arguments[0])].module).make)
    return 0


def follow(lines: Iterable[str], make: Callable[[TrackedRun], Tracker]) -> None:
    """Feed what ``make`` opens until the lines end."""
    rows = map(json.loads, lines)
    first = next(rows)
    tracker = make(TrackedRun(**first | {"folder": Path(first["folder"])}))
    succeeded = False
    for row in rows:
        if "succeeded" in row:
            succeeded = row["succeeded"]
            break
        tracker.log(row["step"], row["metrics"])
    tracker.finish(succeeded=succeeded)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
