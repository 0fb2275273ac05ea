"""The timeline of a run: a lane per worker with what it did, what it waited for, and what of it was on its devices. Read from files.

::

    activity.jsonl  phases of workers      ─┐
    timeline.jsonl  phases of whole steps   ├─> Timeline ─> perfetto.py (trace), timeline_page.py (HTML)
    switches.jsonl  moves of state, bands  ─┘

A bubble is a gap between the phases of a worker, at least ``MIN_BUBBLE_SHARE`` of a step long. Its cause is what the step as a whole was
doing for most of it: timeline.jsonl says that, or another worker on the same device that had it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rljob_runtime.errors import SetupError
from rljob_runtime.report.bands import Band, within
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import Row, iter_rows, number_of
from rljob_runtime.report.names import DRIVER_LANE

MAX_SPANS = 20_000
"""What a page or trace shows without an explicit choice of steps: the last ones that fit."""
MIN_BUBBLE_SHARE = 0.01
STEP_LANE = "step"
"""Lane of the phases of whole steps."""

CAUSES: Mapping[str, str] = {
    "generate": "waits for responses: engines still generate the batch",
    "reward": "waits for rewards of the last responses",
    "score": "waits while the batch is scored (reference, proximal policy, critic)",
    "train": "waits while the policy trains",
    "sync": "waits while weights are sent",
    "checkpoint": "waits while a checkpoint is written",
    "validate": "waits for a validation",
}
ENGINE_CAUSES: Mapping[str, str] = {
    "generate": "has no request: others finish the batch",
    "train": "waits while the policy trains: no prompt is admitted before the next weights (overlap.asyncGenerationRatio)",
}
"""The same for workers that generate, where other words say more."""
OTHER_CAUSE = "waits for the driver, between phases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took from ``start_s`` to ``end_s``, seconds since the run was first started."""

    phase: str
    """``wait`` for a bubble."""
    start_s: float
    end_s: float
    step: int
    note: str = ""
    """Cause of a bubble, or details of a move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A worker, or the steps as a whole."""

    name: str
    spans: tuple[Span, ...]
    """By start; bubbles among them."""
    bands: tuple[Band, ...] = ()
    """What was on its devices, where components take turns."""

    @property
    def devices(self) -> str:
        """Devices of the worker as far as they are known."""
        return ", ".join(str(device) for device in self.bands[0].devices) if self.bands else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Some steps of a run."""

    name: str
    first_step: int
    last_step: int
    steps_in_run: int
    lanes: tuple[Lane, ...]

    @property
    def start_s(self) -> float:
        """Where the first span begins."""
        return min(span.start_s for lane in self.lanes for span in lane.spans)

    @property
    def end_s(self) -> float:
        """Where the last one ends."""
        return max(span.end_s for lane in self.lanes for span in lane.spans)

    def waited_s(self) -> dict[str, dict[str, float]]:
        """By worker and cause, the seconds of its bubbles."""
        found: dict[str, dict[str, float]] = {}
        for lane in self.lanes:
            for span in lane.spans:
                if span.phase == "wait":
                    causes = found.setdefault(lane.name, {})
                    causes[span.note] = causes.get(span.note, 0.0) + span.end_s - span.start_s
        return found


def read(folder: RunFolder, steps: tuple[int, int] | None = None) -> Timeline:
    """The timeline of the steps from ``steps[0]`` to ``steps[1]``, or of the last ones that fit into ``MAX_SPANS``.

    Raises:
        SetupError: there is none, or none of these steps.
        RuntimeFault: a file is malformed.
    """
    whole = [row for row in iter_rows(folder.timeline_jsonl) if row.get("lane") != DRIVER_LANE]
    if not whole:
        raise SetupError(f"{folder.path}: no step is done yet, so there is no timeline")
    counts: dict[int, int] = {}
    for path in (folder.timeline_jsonl, folder.activity_jsonl, folder.switches_jsonl):
        for row in iter_rows(path):
            counts[_step(row)] = counts.get(_step(row), 0) + 1
    known = sorted({_step(row) for row in whole})
    chosen = [step for step in known if steps is None or steps[0] <= step <= steps[1]]
    if not chosen:
        raise SetupError(f"{folder.path}: none of steps {steps} is done; there are {known[0]} to {known[-1]}")
    if steps is None:
        chosen = _newest_that_fit(chosen, counts)
    first, last = chosen[0], chosen[-1]
    around = [row for row in whole if first <= _step(row) <= last]
    window = (min(number_of(row, "start_s") for row in around), max(number_of(row, "end_s") for row in around))
    lanes = _lanes(folder, around, window, first, last)
    return Timeline(name=folder.path.name, first_step=first, last_step=last, steps_in_run=len(known), lanes=lanes)


def _newest_that_fit(steps: Sequence[int], counts: Mapping[int, int]) -> list[int]:
    """The last steps whose rows together are at most ``MAX_SPANS``; one at least."""
    chosen: list[int] = []
    total = 0
    for step in reversed(steps):
        total += counts.get(step, 0)
        if chosen and total > MAX_SPANS:
            break
        chosen.append(step)
    return chosen[::-1]


def _lanes(folder: RunFolder, around: Sequence[Row], window: tuple[float, float], first: int, last: int) -> tuple[Lane, ...]:
    """The steps' own lane, then the workers' by name."""
    whole = sorted((_span(row) for row in around), key=lambda span: span.start_s)
    by_worker: dict[str, list[Span]] = {}
    for row in iter_rows(folder.activity_jsonl):
        if first <= _step(row) <= last and number_of(row, "end_s") > window[0]:
            by_worker.setdefault(str(row.get("worker")), []).append(_span(row))
    (bands,) = within(iter_rows(folder.switches_jsonl), [window])
    for row in iter_rows(folder.switches_jsonl):
        if row.get("row") == "move" and number_of(row, "start_s") < window[1] and number_of(row, "end_s") > window[0]:
            kinds = row.get("kinds")
            words = ", ".join(map(str, kinds)) if isinstance(kinds, list) else ""
            by_worker.setdefault(str(row.get("worker")), []).append(
                _span(row, str(row.get("direction")), f"{words}, for {row.get('what')}")
            )
    bands_of: dict[str, list[Band]] = {}
    for band in bands:
        bands_of.setdefault(band.worker, []).append(band)
    shortest_s = MIN_BUBBLE_SHARE * statistics.median(_lengths(whole))
    lanes = [Lane(name=STEP_LANE, spans=tuple(whole))]
    for name in sorted(by_worker.keys() | bands_of.keys()):
        busy = merged(by_worker.get(name, ()))
        causes = {**CAUSES, **ENGINE_CAUSES} if any(span.phase == "generate" for span in busy) else CAUSES
        gaps = bubbles(busy, whole, window, shortest_s, causes, _lent(name, bands_of))
        spans = tuple(sorted([*busy, *gaps], key=lambda span: span.start_s))
        lanes.append(Lane(name=name, spans=spans, bands=tuple(bands_of.get(name, ()))))
    return tuple(lanes)


def _lengths(whole: Sequence[Span]) -> list[float]:
    """Seconds of each step."""
    ends: dict[int, list[float]] = {}
    for span in whole:
        ends.setdefault(span.step, []).extend((span.start_s, span.end_s))
    return [max(times) - min(times) for times in ends.values()]


def _lent(name: str, bands_of: Mapping[str, Sequence[Band]]) -> list[tuple[float, float, str]]:
    """When another component had all its state on a device of this worker: start, end, whose."""
    own = bands_of.get(name, ())
    if not own:
        return []
    devices = set(own[0].devices)
    others = [band for bands in bands_of.values() for band in bands if band.client != own[0].client and not band.partly]
    return [(band.start_s, band.end_s, band.client) for band in others if devices & set(band.devices)]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans of a worker by start; those of the same phase that touch or overlap become one."""
    found: list[Span] = []
    newest: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        index = newest.get(span.phase)
        if index is not None and span.start_s <= found[index].end_s and not span.note:
            before = found[index]
            found[index] = Span(phase=span.phase, start_s=before.start_s, end_s=max(before.end_s, span.end_s), step=before.step)
            continue
        newest[span.phase] = len(found)
        found.append(span)
    return found


def bubbles(
    busy: Sequence[Span],
    whole: Sequence[Span],
    window: tuple[float, float],
    shortest_s: float,
    causes: Mapping[str, str] = CAUSES,
    lent: Sequence[tuple[float, float, str]] = (),
) -> list[Span]:
    """The gaps between the spans of a worker inside the window, with their causes."""
    gaps: list[tuple[float, float]] = []
    at_s = window[0]
    for span in busy:
        if span.start_s > at_s:
            gaps.append((at_s, min(span.start_s, window[1])))
        at_s = max(at_s, span.end_s)
    gaps.append((at_s, window[1]))
    return [
        Span(phase="wait", start_s=start_s, end_s=end_s, step=_step_at(whole, start_s), note=cause_of(start_s, end_s, whole, causes, lent))
        for start_s, end_s in gaps
        if end_s - start_s >= shortest_s and end_s > start_s
    ]


def cause_of(
    start_s: float, end_s: float, whole: Sequence[Span], causes: Mapping[str, str] = CAUSES, lent: Sequence[tuple[float, float, str]] = ()
) -> str:
    """What the step was doing for most of that time, and who had the worker's devices."""
    seconds: dict[str, float] = {}
    for span in whole:
        shared_s = min(end_s, span.end_s) - max(start_s, span.start_s)
        if shared_s > 0:
            seconds[span.phase] = seconds.get(span.phase, 0.0) + shared_s
    phase = max(seconds, key=lambda name: seconds[name], default=None)
    words = causes.get(phase, OTHER_CAUSE) if phase is not None else OTHER_CAUSE
    taken: dict[str, float] = {}
    for other_start_s, other_end_s, client in lent:
        shared_s = min(end_s, other_end_s) - max(start_s, other_start_s)
        if shared_s > 0:
            taken[client] = taken.get(client, 0.0) + shared_s
    holder = max(taken, key=lambda name: taken[name], default=None)
    if holder is not None and taken[holder] > (end_s - start_s) / 2:
        return f"{words}; {holder} has its devices"
    return words


def _span(row: Row, phase: str | None = None, note: str = "") -> Span:
    return Span(
        phase=phase or str(row.get("phase")),
        start_s=number_of(row, "start_s"),
        end_s=number_of(row, "end_s"),
        step=_step(row),
        note=note,
    )


def _step(row: Row) -> int:
    return int(number_of(row, "step"))


def _step_at(whole: Sequence[Span], at_s: float) -> int:
    """The step under way at that time."""
    return next((span.step for span in whole if span.end_s > at_s), whole[-1].step)
