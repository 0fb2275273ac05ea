"""The one object the driver talks to about what users see and keep of a run.

::

    driver ── phase(...)        ─┐            ┌─ display (live panel or plain lines)
           ── record(StepRecord) │            ├─ metrics.jsonl, tensorboard/, trackers
           ── span(...)          ├─ Reporter ─┼─ timeline.jsonl
           ── switched(...)      │            ├─ switches.jsonl
           ── called, worked     │            ├─ activity.jsonl
           ── trajectories(...)  │            ├─ trajectories/step-*.jsonl
           ── event(...)         │            ├─ logs/events.jsonl
           ── finish(status)    ─┘            └─ summary.json, report.html

A call costs well under a millisecond: rows are buffered and flushed once a second, by a ticker when no call comes, and on
``finish`` and on exceptions. All methods may be called from any thread of the driver.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rljob_runtime.errors import Interrupted, RuntimeFault
from rljob_runtime.records import StepRecord, Trajectory
from rljob_runtime.report.activity import PHASE_OF_CALL, ActivityWriter
from rljob_runtime.report.disk import replace_text, writing
from rljob_runtime.report.display import Display, Level, PhaseView, RunInfo
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import Clock, JsonLinesWriter, Row, encodable, number_of, read_rows, truncate_after
from rljob_runtime.report.metrics import MetricsWriter, load_metrics, record_of
from rljob_runtime.report.names import DRIVER_LANE
from rljob_runtime.report.summary import RunStatus, RunSummary, package_versions, save_summary, summarize
from rljob_runtime.report.switches import MAX_WORKERS, SwitchesWriter, drop_switches_after
from rljob_runtime.report.tensorboard import TensorboardWriter
from rljob_runtime.report.trackers.feed import TrackerFeeds
from rljob_runtime.report.trajectories import Decode, TrajectorySampling, drop_after, write_trajectories

if TYPE_CHECKING:
    from rljob_runtime.offload.records import DeviceResidency, SwitchRecord

_TICK_S = 1.0
_SHOWN_HISTORY_STEPS = 2_000


class Reporter:
    """Writes a run's files and feeds its display; a context manager that ends the run as failed when its body raises."""

    def __init__(
        self,
        folder: RunFolder,
        info: RunInfo,
        display: Display,
        *,
        resumed_step: int | None = None,
        sampling: TrajectorySampling | None = None,
        clock: Clock = time.monotonic,
        packages: Mapping[str, str] | None = None,
        trackers: TrackerFeeds | None = None,
        ticker: bool = True,
    ) -> None:
        """Open all files; drop what steps above ``resumed_step`` left behind in the folder, for they are run again.

        Args:
            folder: opened with ``RunFolder.open``.
            info: facts that are known before the start; its spec is written to spec.yaml.
            display: where users look.
            resumed_step: step of the checkpoint the run goes on from; None when it starts at step 1, also in the folder of an
                attempt that ended before its first checkpoint.
            sampling: which trajectories are kept; 8 each 10 steps when None.
            clock: monotonic seconds; ``span`` takes readings of the same clock.
            packages: package versions of the summary; those installed when None.
            trackers: experiment trackers; none when None.
            ticker: whether a thread flushes once a second; tests call ``tick`` themselves.

        Raises:
            RuntimeFault: a file cannot be read or written.
        """
        self._folder, self._info, self._display, self._clock = folder, info, display, clock
        self._sampling = sampling if sampling is not None else TrajectorySampling()
        self._packages = package_versions() if packages is None else packages
        self._trackers = trackers if trackers is not None else TrackerFeeds()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._running: dict[str, float] = {}
        self._first_step_s: float | None = None
        self._step = resumed_step or 0
        self._done = False
        self._late_error: RuntimeFault | None = None
        """What failed where it could not be raised; raised by the next ``record``."""
        kept, before_s = self._open(resumed_step)
        self._zero_s = clock() - before_s
        self._started_s = clock()
        display.started(info, folder.path, resumed_step)
        if kept:
            display.history(kept)
        if ticker:
            threading.Thread(target=self._tick_forever, name="rljob-report", daemon=True).start()

    def _open(self, resumed_step: int | None) -> tuple[list[StepRecord], float]:
        """Open all files behind the steps that are kept; returns the last of these, and the seconds spent before."""
        folder, clock = self._folder, self._clock
        kept, before_s = self._prepare(resumed_step)
        before_switches_s, has_switches = drop_switches_after(folder.switches_jsonl, resumed_step or 0)
        before_s = max(before_s, before_switches_s)
        self._metrics = MetricsWriter(folder.metrics_jsonl, clock=clock)
        self._timeline = JsonLinesWriter(folder.timeline_jsonl, clock=clock)
        self._activity = ActivityWriter(folder.activity_jsonl, clock=clock)
        self._switches = SwitchesWriter(folder.switches_jsonl, clock=clock)
        if has_switches:  # of processes that are gone
            self._switches.start(self._step + 1, before_s)
        self._events = JsonLinesWriter(folder.events_jsonl, clock=clock)
        purge = self._step + 1 if before_s > 0 else None
        self._tensorboard = TensorboardWriter(folder.tensorboard, purge_from_step=purge)
        return kept, before_s

    def _prepare(self, resumed_step: int | None) -> tuple[list[StepRecord], float]:
        """Write spec.yaml, truncate what an earlier attempt left; returns the last kept steps and the seconds spent before."""
        folder = self._folder
        replace_text(folder.spec_yaml, self._info.spec_yaml, "the resolved spec")
        for result in (folder.summary_json, folder.report_html):  # of the attempt that is gone on from: this one has not ended
            with writing(result, "the result of an earlier attempt"):
                result.unlink(missing_ok=True)
        last = resumed_step or 0
        rows = [*read_rows(folder.metrics_jsonl), *read_rows(folder.timeline_jsonl), *read_rows(folder.events_jsonl)]
        times = [t for row in rows for key in ("wall_s", "end_s") if math.isfinite(t := number_of(row, key))]
        kept = truncate_after(folder.metrics_jsonl, last)
        truncate_after(folder.timeline_jsonl, last)
        truncate_after(folder.activity_jsonl, last)
        truncate_after(folder.events_jsonl, last)
        drop_after(folder, last)
        return [record_of(row) for row in kept[-_SHOWN_HISTORY_STEPS:]], max(times, default=0.0)

    # ---- what the driver calls ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A start-up or closing phase (``starting the cluster``): shown while it runs, then with its seconds.

        Phases may run at once under different names.

        Raises:
            ValueError: a phase of that name is running.
            RuntimeFault: the timeline cannot be written.
        """
        with self._lock:
            if name in self._running:
                raise ValueError(f"phase {name!r} is running already; give the second one another name")
            self._running[name] = start_s = self._clock()
            self._display.phase_started(name)
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._lock:
                end_s = self._clock()
                del self._running[name]
                self._display.phase_ended(PhaseView(name=name, elapsed_s=end_s - start_s), failed=failed)
                self.span(DRIVER_LANE, name, start_s, end_s, self._step)

    def record(self, record: StepRecord) -> None:
        """A step is done: write and show its metrics.

        Raises:
            UnknownMetricError: a metric is not registered.
            RuntimeFault: a file cannot be written.
        """
        with self._lock:
            self._raise_late_error()
            now = self._clock()
            if self._first_step_s is None:
                self._first_step_s = now - record.metrics.get("time/step_s", 0.0)
            self._step = record.step
            self._metrics.write(record, now - self._zero_s)
            self._tensorboard.write(record)
            self._trackers.write(record)
            self._display.step(record)
            bad = [name for name, value in record.metrics.items() if not math.isfinite(value)]
            if bad:
                self.event(f"step {record.step}: {', '.join(bad)} not finite, kept as null", Level.WARNING)

    def rewind(self, step: int) -> None:
        """Forget the steps above ``step``: the run goes on from the checkpoint after it, with other workers.

        Raises:
            RuntimeFault: a file cannot be read or written.
        """
        with self._lock:
            self._raise_late_error()
            self._close_files()
            self._step = step
            kept, _ = self._open(step)
            self._display.history(kept)

    def span(self, lane: str, phase: str, start_s: float, end_s: float, step: int) -> None:
        """Something took from ``start_s`` to ``end_s`` (readings of the clock) in ``lane`` (``trainer``, ``engine 0``, ``rewards``).

        Raises:
            ValueError: it ends before it starts.
            RuntimeFault: the timeline cannot be written.
        """
        if end_s < start_s:
            raise ValueError(f"span {lane}/{phase} of step {step}: ends at {end_s} s, before its start at {start_s} s")
        with self._lock:
            start, end = round(start_s - self._zero_s, 6), round(end_s - self._zero_s, 6)
            self._timeline.write({"lane": lane, "phase": phase, "start_s": start, "end_s": end, "step": step})

    def called(self, worker: str, method: str, start_s: float, end_s: float) -> None:
        """A worker answered a call; ``on_call`` of a cluster. Never raises for want of space: the next ``record`` does."""
        phase = PHASE_OF_CALL.get(method)
        if phase is not None:
            self.worked(worker, phase, [(start_s, end_s)])

    def worked(self, worker: str, phase: str, spans: Sequence[tuple[float, float]]) -> None:
        """A worker was in ``phase`` over these (start, end), readings of the clock. Never raises for want of space, as ``called``."""
        with self._lock:
            if self._done:
                return
            try:
                self._activity.write(self._step + 1, worker, phase, [(a - self._zero_s, b - self._zero_s) for a, b in spans])
            except RuntimeFault as exc:
                self._late_error = exc

    def resident(self, residency: Sequence[DeviceResidency]) -> None:
        """What is on the devices now; recorded once when all workers are up, and again when workers came or went.

        Raises:
            RuntimeFault: it cannot be written.
        """
        with self._lock:
            self._switches.resident(self._step + 1, self._clock() - self._zero_s, residency)
            self._tell_of_left_out(0)

    def switched(self, record: SwitchRecord) -> None:
        """State moved; ``on_switch`` of a ``DeviceArbiter``, whose times are readings of the same clock.

        Never raises for want of space: who calls could do nothing about it, so the next ``record`` raises instead.
        """
        with self._lock:
            if self._done:  # workers release devices while the job ends
                return
            known = self._switches.left_out
            try:
                self._switches.switched(self._step + 1, self._zero_s, record)
                self._tell_of_left_out(known)
            except RuntimeFault as exc:
                self._late_error = exc

    def _tell_of_left_out(self, known: int) -> None:
        if self._switches.left_out and not known:
            name = self._folder.switches_jsonl.name
            self.event(f"{name} has the moves of the first {MAX_WORKERS} workers only; metrics count the others as well")

    def trajectories(self, step: int, trajectories: Sequence[Trajectory], decode: Decode, failed: Sequence[Trajectory] = ()) -> None:
        """Keep some of a step's trajectories and the ``failed`` ones, with texts by ``decode``, when the step is one of the sampled.

        Raises:
            RuntimeFault: they cannot be written.
        """
        write_trajectories(self._folder, step, trajectories, self._sampling, decode, failed)

    def event(self, text: str, level: Level = Level.INFO) -> None:
        """Show one line and keep it in logs/events.jsonl.

        Raises:
            RuntimeFault: it cannot be written.
        """
        text = encodable(text)  # a terminal takes no other
        with self._lock:
            row: Row = {"wall_s": round(self._clock() - self._zero_s, 6), "step": self._step, "level": level.value, "text": text}
            self._events.write(row)
            self._display.event(text, level)

    def finish(self, status: RunStatus, failure: str | None = None) -> RunSummary:
        """Flush everything, write summary.json and report.html, show the closing block, give the terminal back.

        Raises:
            RuntimeFault: the run is finished already, or a file cannot be written.
        """
        # imported late: plotly is of no use before
        from rljob_runtime.report.html import write_report

        with self._lock:
            if self._done:
                raise RuntimeFault(f"{self._folder.path}: the run is finished already; finish is called once")
            self._done = True
            self._stop.set()
            now = self._clock()
            started = self._first_step_s if self._first_step_s is not None else now
            try:
                for problem in self._trackers.finish(succeeded=status is RunStatus.SUCCEEDED):
                    self.event(problem, Level.WARNING)
                self._close_files()
                table = load_metrics(self._folder.metrics_jsonl)
                summary = summarize(
                    table,
                    job_name=self._info.job_name,
                    status=status,
                    failure=failure,
                    total_steps=self._info.total_steps,
                    total_s=now - self._zero_s,
                    startup_s=max(0.0, started - self._started_s),
                    seed=self._info.seed,
                    model_commit=self._info.model_commit,
                    packages=self._packages,
                )
                save_summary(self._folder.summary_json, summary)
                write_report(self._folder, self._info, summary, table)
                self._display.finished(summary, self._folder.report_html)
            finally:
                self._display.close()
            return summary

    # ---- flushing ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand all buffered rows to the operating system.

        Raises:
            RuntimeFault: a file cannot be written.
        """
        with self._lock:
            for writer in (self._metrics, self._timeline, self._activity, self._switches, self._events):
                writer.flush()

    def tick(self) -> None:
        """Flush and let the display show the time; the ticker calls it once a second.

        Raises:
            RuntimeFault: a file cannot be written.
        """
        with self._lock:
            if self._done:
                return
            now = self._clock()
            self._display.tick([PhaseView(name=name, elapsed_s=now - start) for name, start in self._running.items()])
            for problem in self._trackers.problems():
                self.event(problem, Level.WARNING)
            self.flush()

    def _tick_forever(self) -> None:
        while not self._stop.wait(_TICK_S):
            try:
                self.tick()
            except RuntimeFault as exc:  # raised by the next ``record``, in the driver's own thread
                self._late_error = exc
                return

    def _raise_late_error(self) -> None:
        if self._late_error is not None:
            raise self._late_error

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in (self._metrics, self._timeline, self._activity, self._switches, self._events, self._tensorboard):
                stack.callback(writer.close)

    # ---- context manager ---------------------------------------------------------------------------------------

    def __enter__(self) -> Reporter:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the run if ``finish`` was not called: failed or interrupted on an exception, succeeded without.

        A report that cannot be written must not hide the error that ended the run: it is attached to it as a note.

        Raises:
            RuntimeFault: the body raised nothing and a file cannot be written.
        """
        if self._done:
            return
        if error is None:
            try:
                self.finish(RunStatus.SUCCEEDED)
            except RuntimeFault as exc:
                exc.add_note("the run itself ended well: only its report could not be written")
                raise
            return
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        try:
            if stopped:
                self.finish(RunStatus.INTERRUPTED)
            else:
                self.finish(RunStatus.FAILED, one_line(error))
        except RuntimeFault as exc:
            error.add_note(f"the report of the run could not be written either: {exc}")


def one_line(error: BaseException) -> str:
    """Class and text of an error on one line."""
    text = encodable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
