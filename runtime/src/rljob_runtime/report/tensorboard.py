"""The metrics as TensorBoard events, written with tensorboard's own file writer: neither torch nor tensorflow is imported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from rljob_runtime.records import StepRecord
from rljob_runtime.report.disk import writing


class TensorboardWriter:
    """Writes one event a step with all its scalars; values that are not finite are left out."""

    def __init__(self, folder: Path, *, purge_from_step: int | None = None, wall_time: Callable[[], float] = time.time) -> None:
        """Open a new event file.

        ``purge_from_step``: on resume, TensorBoard hides earlier files' values of this step and later ones.
        ``wall_time``: returns Unix seconds.

        Raises:
            RuntimeFault: the file cannot be made.
        """
        # imported late: half a second that only a real run should pay
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._folder = folder
        self._wall_time = wall_time
        with writing(folder, "TensorBoard events"):
            self._writer = EventFileWriter(str(folder), flush_secs=2)
            if purge_from_step is not None:
                self._writer.add_event(Event(wall_time=wall_time(), step=purge_from_step, file_version="brain.Event:2"))
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=wall_time(), step=purge_from_step, session_log=start))

    def write(self, record: StepRecord) -> None:
        """Queue one step; a thread of the writer puts it on disk.

        Raises:
            RuntimeFault: an earlier event could not be written.
        """
        values = [self._summary.Value(tag=n, simple_value=v) for n, v in record.metrics.items() if math.isfinite(v)]
        with writing(self._folder, "TensorBoard events"):
            self._writer.add_event(self._event(wall_time=self._wall_time(), step=record.step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write what is queued and close; a second call does nothing.

        Raises:
            RuntimeFault: the events cannot be written.
        """
        with writing(self._folder, "TensorBoard events"):
            self._writer.close()
