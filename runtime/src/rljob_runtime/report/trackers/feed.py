"""The driver's end of a tracker: starts its process, hands it the steps, says once when it is gone. Never waits but at the end."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_api.v1alpha1.operations import Tracker, TrackerType
from rljob_runtime.records import StepRecord
from rljob_runtime.report.disk import replace_text, writing
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import dump_row

MAX_WAITING_BYTES = 16 * 2**20
"""What a tracker that does not read may fall behind by, thousands of steps, before it is dropped."""
FINISH_TIMEOUT_S = 20.0
"""What all trackers together may take at the end of a run for what they have not sent yet."""
_POLL_S = 0.02
ID_FILE = "run_id"


def run_id_of(folder: RunFolder) -> str:
    """The identifier that trackers know this run folder's run by: made once and kept in the folder.

    Raises:
        RuntimeFault: it cannot be written or read.
    """
    path = folder.trackers / ID_FILE
    with writing(path, "the identifier of the run"):
        folder.trackers.mkdir(exist_ok=True)
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:12]
    replace_text(path, f"{run_id}\n", "the identifier of the run")
    return run_id


def start_trackers(trackers: Sequence[Tracker], folder: RunFolder, job_name: str, config: Mapping[str, Any]) -> TrackerFeeds:
    """Start one process per tracker.

    Raises:
        RuntimeFault: the run folder cannot be written.
    """
    feeds: list[TrackerFeed] = []
    for tracker in trackers:
        name = tracker.type.value.lower()
        own = folder.trackers / name
        run_id = run_id_of(folder)
        with writing(own, f"what {tracker.type} keeps"):
            own.mkdir(exist_ok=True)
        row = {"project": tracker.project or job_name, "name": job_name, "run_id": run_id, "folder": str(own), "config": config}
        feeds.append(TrackerFeed(tracker.type, process_command(tracker.type), row, folder.logs / f"tracker-{name}.log"))
    return TrackerFeeds(feeds)


def process_command(tracker: TrackerType) -> list[str]:
    """What runs a tracker. ``-P``: files beside the job do not take the place of its package."""
    return [sys.executable, "-P", "-m", "rljob_runtime.report.trackers.process", tracker.value]


class TrackerFeed:
    """One tracker's process. A problem of it ends up in ``problems``, once; after it nothing is handed over any more."""

    def __init__(self, tracker: TrackerType, command: Sequence[str], run: Mapping[str, Any], log: Path) -> None:
        """Start it with the first line of its input.

        Raises:
            RuntimeFault: its log cannot be written.
        """
        self._tracker, self._log = tracker, log
        self._waiting = bytearray()
        self._problems: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        with writing(log, "the log of a tracker"), log.open("ab") as output:
            try:
                # A session of its own: Ctrl-C in a terminal reaches the driver alone.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, bufsize=0
                )
            except OSError as error:
                self._lost(f"could not be started: {error.strerror}")
                return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._send(run)

    def write(self, record: StepRecord) -> None:
        """Hand over one step; returns at once."""
        self._send({"step": record.step, "metrics": {n: v for n, v in record.metrics.items() if math.isfinite(v)}})

    def problems(self) -> list[str]:
        """Warnings that were not returned before: the tracker is gone or does not keep up."""
        self._push()
        found, self._problems = self._problems, []
        return found

    def finish(self, *, succeeded: bool) -> None:
        """Say how the run ended; ``end`` waits for it."""
        self._send({"succeeded": succeeded})

    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        self._push()
        process = self._process
        if process is None:
            return True
        if not self._waiting and process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
        code = process.poll()
        if code is None:
            return False
        if code != 0:
            self._lost(self._last_line(code))
        self._process = None
        return True

    def end(self) -> None:
        """End a process that has not ended by itself."""
        if self._process is not None:
            self._lost("had not sent everything when the time for it was over")

    def _send(self, row: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._waiting += dump_row(row).encode() + b"\n"
        self._push()
        if len(self._waiting) > MAX_WAITING_BYTES:
            self._lost(f"does not take what it is given, {len(self._waiting):,} bytes are waiting")

    def _push(self) -> None:
        """Write as much as the pipe takes."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        try:
            while self._waiting:
                written = process.stdin.write(self._waiting[: 2**16])
                if not written:
                    return
                del self._waiting[:written]
        except OSError:  # its end of the pipe is closed: it ends, or has ended
            self._waiting.clear()
        code = process.poll()
        if code is not None:
            self._lost(self._last_line(code))

    def _last_line(self, code: int) -> str:
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"ended (exit {code}): {lines[-1][:300] if lines else 'no message'}"

    def _lost(self, what: str) -> None:
        process, self._process = self._process, None
        self._waiting.clear()
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            process.kill()
            process.wait()
        self._problems.append(f"tracker {self._tracker} {what}; the run goes on without it, its log: {self._log}")


class TrackerFeeds:
    """All trackers of a run."""

    def __init__(self, feeds: Sequence[TrackerFeed] = ()) -> None:
        """They run already."""
        self._feeds = feeds

    def write(self, record: StepRecord) -> None:
        """Hand one step to each; returns at once."""
        for feed in self._feeds:
            feed.write(record)

    def problems(self) -> list[str]:
        """Warnings since the last call."""
        return [problem for feed in self._feeds for problem in feed.problems()]

    def finish(
        self,
        *,
        succeeded: bool,
        timeout_s: float = FINISH_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[str]:
        """Close the runs, wait ``timeout_s`` at most for what is not sent yet; returns the warnings."""
        for feed in self._feeds:
            feed.finish(succeeded=succeeded)
        deadline = clock() + timeout_s
        while not all([feed.has_ended() for feed in self._feeds]) and clock() < deadline:
            sleep(_POLL_S)
        for feed in self._feeds:
            feed.end()
        return self.problems()
