"""Prometheus metrics of the operator. All names start with ``rljob_operator_``; docs/reference/operator-metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_api.vocabulary import Reason

PREFIX = "rljob_operator_"
LABELS: Mapping[str, tuple[str, ...]] = {
    "crd_fields": ("state",),
    "errors": ("error",),
    "events_lost": ("error",),
    "jobs": ("reason",),
    "jobs_failed": ("reason",),
    "missed_objects": ("kind",),
    "requests": ("verb", "kind", "status"),
    "watch_age_seconds": ("kind",),
    "webhook_reviews": ("result",),
}
"""Name without :data:`PREFIX` and ``_total`` -> labels of its series; the others have none."""
RECONCILE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All metrics of one operator, in a registry of its own."""

    def __init__(self) -> None:
        """Register all metrics, at zero."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # they double the number of series and nobody reads them
        self.registry = CollectorRegistry()
        self.queue_depth = Gauge(PREFIX + "queue_depth", "RLJobs waiting in the work queue.", registry=self.registry)
        self.reconcile_seconds = Histogram(
            PREFIX + "reconcile_seconds",
            "Seconds per reconcile of one RLJob, including its requests.",
            buckets=RECONCILE_BUCKETS_S,
            registry=self.registry,
        )
        self.errors = Counter(
            PREFIX + "errors",
            "Reconciles that failed and are retried, by error class.",
            LABELS["errors"],
            registry=self.registry,
        )
        self.requests = Counter(
            PREFIX + "requests",
            "Requests to the API server, by verb, kind and HTTP status; status 0 means no answer.",
            LABELS["requests"],
            registry=self.registry,
        )
        self.events_lost = Counter(
            PREFIX + "events_lost",
            "Kubernetes events about RLJobs that could not be written, by error class.",
            LABELS["events_lost"],
            registry=self.registry,
        )
        self.reviews = Counter(
            PREFIX + "webhook_reviews",
            "Requests to the validating webhook, by result: allowed, denied, unchecked (too many at once), malformed.",
            LABELS["webhook_reviews"],
            registry=self.registry,
        )
        self.jobs_failed = Counter(
            PREFIX + "jobs_failed",
            "RLJobs that failed permanently, by reason, since this process started; those that were deleted since included.",
            LABELS["jobs_failed"],
            registry=self.registry,
        )
        for reason in Reason:
            if reason.ends_attempt or reason is Reason.ACTIVE_DEADLINE_EXCEEDED:
                self.jobs_failed.labels(str(reason))  # at 0, so that the first one is an increase
        self.leader = Gauge(
            PREFIX + "leader",
            "1 while this process acts on RLJobs; 0 while it stands by.",
            registry=self.registry,
        )
        self.crd_fields = Gauge(
            PREFIX + "crd_fields",
            "Fields of the CRD that is served: missing (known to this operator alone: apply its CRD) and unknown (to this operator).",
            LABELS["crd_fields"],
            registry=self.registry,
        )
        self.missed_objects = Counter(
            PREFIX + "missed_objects",
            "Objects whose change or deletion was found by a resync before the watch delivered it, by kind.",
            LABELS["missed_objects"],
            registry=self.registry,
        )

    def observe_request(self, verb: str, kind: str, status: int) -> None:
        """Count one request."""
        self.requests.labels(verb, kind, status).inc()

    def watch_cache(self, jobs: Callable[[], Mapping[str, int]], watch_ages_s: Callable[[], Mapping[str, float]]) -> None:
        """Add the metrics that are read from the cache on each scrape; both callables run in the thread of the metrics server."""
        self.registry.register(_CacheCollector(jobs, watch_ages_s))


class _CacheCollector(Collector):
    """Metrics derived from the state of the cache."""

    def __init__(self, jobs: Callable[[], Mapping[str, int]], watch_ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._jobs = jobs
        self._watch_ages_s = watch_ages_s

    def collect(self) -> Iterable[Metric]:
        """Read the current values."""
        jobs = GaugeMetricFamily(PREFIX + "jobs", "RLJobs by the reason of condition Succeeded.", labels=LABELS["jobs"])
        for reason, count in sorted(self._jobs().items()):
            jobs.add_metric([reason], count)
        ages = GaugeMetricFamily(
            PREFIX + "watch_age_seconds",
            "Age of the oldest known change that the watch has not delivered yet, by kind; 0 means none.",
            labels=LABELS["watch_age_seconds"],
        )
        for kind, age_s in sorted(self._watch_ages_s().items()):
            ages.add_metric([kind], age_s)
        return (jobs, ages)


def reference(metrics: Metrics) -> str:
    """Render the table of docs/reference/operator-metrics.md."""
    rows = []
    for family in sorted(metrics.registry.collect(), key=lambda family: family.name):
        total = "_total" if family.type == "counter" else ""
        labels = ", ".join(LABELS.get(family.name.removeprefix(PREFIX), ()))
        name = f"{family.name}{total}{{{labels}}}" if labels else f"{family.name}{total}"
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(["| metric | type | meaning |", "|---|---|---|", *rows])
