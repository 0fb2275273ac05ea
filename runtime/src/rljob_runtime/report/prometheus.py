"""Training metrics in Prometheus' words: how the registry's names become Prometheus' names, and the values of a run as a collector.

::

    time/sync_s                    -> rljob_train_time_sync_seconds
    overlap/trainer_idle_fraction  -> rljob_train_overlap_trainer_idle_ratio
    reward/part/<name>             -> rljob_train_reward_part_by_name{name="<name>"}

Every metric of ``report.names`` is a gauge that holds the newest step's value. What is counted over steps is a counter besides
(``COUNTED``), for a gauge that is read every 30 s would miss steps. Prometheus' guide to names asks for base units at the end:
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_runtime.records import StepRecord
from rljob_runtime.report.display import Level, PhaseView, RunInfo
from rljob_runtime.report.names import METRICS, MetricInfo, UnknownMetricError, describe
from rljob_runtime.report.summary import RunSummary

PREFIX = "rljob_train_"
LABELS = ("namespace", "job", "attempt")
MAX_NAMES = 100
"""Series of one family: names may come from data (tags, sources), and each is a series that Prometheus keeps."""
LASTING = ("validation/",)
"""Metrics of some steps only, whose last value stays; others are absent after a step without them."""

COUNTED: Mapping[str, tuple[str, str]] = {
    "rollout/tokens": ("tokens", "response tokens trained"),
    "train/tokens": ("trainer_tokens", "prompt and response tokens processed by the trainer"),
    "rollout/groups_dropped": ("groups_dropped", "prompt groups dropped"),
    "rollout/engines_lost": ("engines_lost", "engines that ended, failed, or made no progress"),
    "engine/replaced": ("engines_replaced", "lost engines replaced by a new process"),
    "environment/replaced": ("environments_replaced", "lost environment workers replaced by a new process"),
    "sync/resent": ("syncs_resent", "weight syncs sent again because of a wrong checksum"),
    "reward/errors": ("rewards_failed", "evaluations of a reward that raised, returned no number, or lost their process"),
    "reward/timeouts": ("rewards_timed_out", "evaluations of a reward that timed out twice"),
    "train/skipped_updates": ("updates_skipped", "policy updates that were skipped"),
}
"""Metric of a step -> (name of its sum over steps without ``_total``, meaning)."""

_OWN: Mapping[str, tuple[str, str]] = {
    "steps": ("counter", "steps trained by this process, including those trained again after the loss of a worker"),
    "worker_restarts": ("counter", "restarts of lost workers within the attempt, from the newest checkpoint"),
    "step": ("gauge", "newest finished step"),
    "target_steps": ("gauge", "spec.training.steps"),
    "weight_version": ("gauge", "weight version after the newest step"),
    "staleness_bound_versions": ("gauge", "upper bound of the staleness of trained tokens, in versions"),
    "last_progress_timestamp_seconds": ("gauge", "Unix time of the last start or end of a step or of a start-up phase"),
    "deadline_timestamp_seconds": ("gauge", "Unix time at which spec.activeDeadlineSeconds ends the job; absent if it is not set"),
    "driver_memory_bytes": ("gauge", "resident memory of the driver's process"),
    "left_out_series": ("gauge", f"names beyond the first {MAX_NAMES} of a family, which are not exported"),
}
"""Metrics that are no step's."""

_SUFFIXES: Mapping[str, tuple[str, str, float]] = {
    "s": ("_s", "seconds", 1.0),
    "fraction": ("_fraction", "ratio", 1.0),
    "tokens/s": ("_per_s", "per_second", 1.0),
    "GB/s": ("gb_per_s", "bytes_per_second", 1e9),
    "bytes": ("_bytes", "bytes", 1.0),
    "tokens": ("", "tokens", 1.0),
    "versions": ("", "versions", 1.0),
    "nats": ("", "nats", 1.0),
}
"""Unit of the registry -> (its ending there, the ending here, factor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One metric as Prometheus sees it."""

    name: str
    """With prefix and unit; of a counter without ``_total``."""
    kind: str
    """``gauge`` or ``counter``."""
    meaning: str
    source: str = ""
    """Metric of the registry; empty where there is none."""
    is_family: bool = False
    """Whether it has the label ``name``."""
    factor: float = 1.0
    """From the registry's unit to the base unit."""


@dataclass(slots=True, kw_only=True)
class Deadline:
    """When somebody else ends the run; set by one thread, read by another."""

    at_s: float | None = None
    """Unix time; None: never, or not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What an exporter knows from the start, and where it hears of the rest."""

    namespace: str
    """Empty on a machine without Kubernetes; Prometheus takes an empty label for none."""
    job: str
    attempt: int
    target_steps: int
    staleness_bound: int
    active_deadline_s: int | None
    """From its start, where the run itself keeps it."""
    deadline: Deadline = field(default_factory=Deadline)
    """On Kubernetes, where the operator keeps it and the field can be changed."""

    @property
    def labels(self) -> tuple[str, str, str]:
        """Values of ``LABELS``."""
        return (self.namespace, self.job, str(self.attempt))


def exported_of(info: MetricInfo) -> Exported:
    """The gauge of a metric of the registry."""
    words = [word for word in info.name.split("/") if word != "*"]
    is_family = "*" in info.name
    ending, unit, factor = _SUFFIXES.get(info.unit, ("", "", 1.0))
    words[-1] = words[-1].removesuffix(ending)
    name = "_".join(word for word in words if word)
    if is_family:
        name += "_by_name"
    if unit and unit not in name.split("_"):
        name += f"_{unit}"
    name = PREFIX + name.replace("__", "_")
    return Exported(name=name, kind="gauge", meaning=info.meaning, source=info.name, is_family=is_family, factor=factor)


def exported() -> tuple[Exported, ...]:
    """All metrics that a run can export, by name."""
    found = [exported_of(info) for info in METRICS.values()]
    found += [
        Exported(name=PREFIX + name, kind="counter", meaning=f"{meaning}, summed over steps", source=source)
        for source, (name, meaning) in COUNTED.items()
    ]
    found += [Exported(name=PREFIX + name, kind=kind, meaning=meaning) for name, (kind, meaning) in _OWN.items()]
    return tuple(sorted(found, key=lambda one: one.name))


def sample_name(one: Exported) -> str:
    """The name in queries."""
    return one.name + ("_total" if one.kind == "counter" else "")


def reference() -> str:
    """Render the table of ``docs/reference/training-metrics.md``."""
    lines = ["| metric | type | of a step | meaning |", "|---|---|---|---|"]
    for one in exported():
        labels = "{name}" if one.is_family else ""
        source = f"`{one.source.replace('/*', '/<name>')}`" if one.source else ""
        lines.append(f"| `{sample_name(one)}{labels}` | {one.kind} | {source} | {one.meaning} |")
    return "\n".join([*lines, ""])


class TrainingMetrics(Collector):
    """A display whose screen is Prometheus: takes steps in, and answers scrapes from another thread with the newest values.

    A step costs the training a few microseconds; names and values are worked out when somebody reads them.
    """

    def __init__(self, facts: RunFacts, *, now_s: Callable[[], float] = time.time) -> None:
        """Before the first step; ``now_s`` gives Unix time."""
        self._facts = facts
        self._now_s = now_s
        self._lock = threading.Lock()
        self._newest: StepRecord | None = None
        self._lasting: dict[str, float] = {}
        self._sums = dict.fromkeys(COUNTED, 0.0)
        self._steps = 0
        self._restarts = 0
        self._is_up = False
        """Whether a phase has begun: the history before it is of an earlier process, the one after it of a restart."""
        self._started_s = self._progress_s = now_s()

    # ---- Display -----------------------------------------------------------------------------------------------

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """Nothing is known yet that ``RunFacts`` lack."""

    def history(self, records: Sequence[StepRecord]) -> None:
        """The run goes on after these steps."""
        with self._lock:
            self._restarts += self._is_up
            self._newest = records[-1] if records else None
            self._progress_s = self._now_s()

    def phase_started(self, name: str) -> None:
        """A sign of life."""
        with self._lock:
            self._is_up = True
            self._progress_s = self._now_s()

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """A sign of life."""
        with self._lock:
            self._progress_s = self._now_s()

    def step(self, record: StepRecord) -> None:
        """Take a step in."""
        with self._lock:
            self._newest = record
            self._steps += 1
            self._progress_s = self._now_s()
            for name in COUNTED:
                value = record.metrics.get(name, 0.0)
                self._sums[name] += value if value > 0 else 0.0  # a counter with NaN would never recover
            self._lasting |= {name: value for name, value in record.metrics.items() if name.startswith(LASTING)}

    def event(self, text: str, level: Level) -> None:
        """Lines are the log's."""

    def tick(self, running: Sequence[PhaseView]) -> None:
        """Scrapes read the clock themselves."""

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """The last values stay until the process ends."""

    def close(self) -> None:
        """The endpoint is closed by its owner."""

    # ---- Collector ---------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """The newest values; runs in the thread of a scrape."""
        with self._lock:
            newest, sums = self._newest, dict(self._sums)
            values = {**self._lasting, **(newest.metrics if newest is not None else {})}
            counts = {"steps": float(self._steps), "worker_restarts": float(self._restarts)}
            progress_s = self._progress_s
        labels = self._facts.labels
        for name, value in [*counts.items(), *((COUNTED[source][0], total) for source, total in sums.items())]:
            counter = CounterMetricFamily(PREFIX + name, _meaning(name), labels=LABELS)
            counter.add_metric(labels, value)
            yield counter
        gauges, left_out = self._gauges(values)
        yield from gauges
        for name, number in self._own(newest, progress_s, left_out).items():
            gauge = GaugeMetricFamily(PREFIX + name, _meaning(name), labels=LABELS)
            gauge.add_metric(labels, number)
            yield gauge

    def _gauges(self, values: Mapping[str, float]) -> tuple[list[Metric], int]:
        """One gauge a metric or family, and how many names were left out."""
        families: dict[str, GaugeMetricFamily] = {}
        left_out = 0
        for key, value in sorted(values.items()):
            try:
                one = exported_of(describe(key))
            except UnknownMetricError:  # the newest step so far, read from a folder of another version
                continue
            family = families.get(one.name)
            if family is None:
                names = (*LABELS, "name") if one.is_family else LABELS
                family = families[one.name] = GaugeMetricFamily(one.name, one.meaning, labels=names)
            if len(family.samples) >= MAX_NAMES:
                left_out += 1
                continue
            own = (_free_part(key, one.source),) if one.is_family else ()
            family.add_metric((*self._facts.labels, *own), value * one.factor)
        return list(families.values()), left_out

    def _own(self, newest: StepRecord | None, progress_s: float, left_out: int) -> dict[str, float]:
        """Values of the gauges that are no step's."""
        facts = self._facts
        values = {
            "step": float(newest.step if newest is not None else 0),
            "target_steps": float(facts.target_steps),
            "weight_version": float(newest.version if newest is not None else 0),
            "staleness_bound_versions": float(facts.staleness_bound),
            "last_progress_timestamp_seconds": progress_s,
            "driver_memory_bytes": float(psutil.Process().memory_info().rss),
            "left_out_series": float(left_out),
        }
        at_s = facts.deadline.at_s if facts.active_deadline_s is None else self._started_s + facts.active_deadline_s
        if at_s is not None:
            values["deadline_timestamp_seconds"] = at_s
        return values


def _meaning(name: str) -> str:
    """Of a metric that is no step's, or a sum over steps."""
    return _OWN[name][1] if name in _OWN else next(meaning for known, meaning in COUNTED.values() if known == name)


def _free_part(key: str, pattern: str) -> str:
    """What stands for the ``*``."""
    head, _, tail = pattern.partition("*")
    return key[len(head) : len(key) - len(tail)]
