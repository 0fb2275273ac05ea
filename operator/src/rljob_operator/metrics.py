"""What the operator counts, for Prometheus. All names start with ``rljob_operator_``; docs/reference/operator-metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "rljob_operator_"
RECONCILE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All metrics of one operator, in a registry of its own."""

    def __init__(self) -> None:
        """Make them, all at zero."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # they double the series and nothing reads them
        self.registry = CollectorRegistry()
        self.queue_depth = Gauge(PREFIX + "queue_depth", "RLJobs that wait to be looked at.", registry=self.registry)
        self.reconcile_seconds = Histogram(
            PREFIX + "reconcile_seconds",
            "Seconds that looking at one RLJob took, its requests included.",
            buckets=RECONCILE_BUCKETS_S,
            registry=self.registry,
        )
        self.errors = Counter(
            PREFIX + "errors",
            "Reconciles that ended with an error and are tried again, by class of error.",
            ["error"],
            registry=self.registry,
        )
        self.requests = Counter(
            PREFIX + "requests",
            "Requests to the API server, by verb, kind and HTTP status; status 0: no answer.",
            ["verb", "kind", "status"],
            registry=self.registry,
        )
        self.events_lost = Counter(
            PREFIX + "events_lost", "Events about RLJobs that could not be written.", ["error"], registry=self.registry
        )
        self.missed_objects = Counter(
            PREFIX + "missed_objects",
            "Objects whose change or deletion a full list told before the watch did, by kind.",
            ["kind"],
            registry=self.registry,
        )

    def observe_request(self, verb: str, kind: str, status: int) -> None:
        """Count one request."""
        self.requests.labels(verb, kind, status).inc()

    def watch_cache(self, jobs: Callable[[], Mapping[str, int]], watch_ages_s: Callable[[], Mapping[str, float]]) -> None:
        """Add the two metrics that are read from the cache when Prometheus asks; both callables are called from its thread."""
        self.registry.register(_CacheCollector(jobs, watch_ages_s))


class _CacheCollector(Collector):
    """Metrics that exist as state elsewhere."""

    def __init__(self, jobs: Callable[[], Mapping[str, int]], watch_ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._jobs = jobs
        self._watch_ages_s = watch_ages_s

    def collect(self) -> Iterable[Metric]:
        """Current values."""
        jobs = GaugeMetricFamily(PREFIX + "jobs", "RLJobs by the reason of their condition Succeeded.", labels=["reason"])
        for reason, count in sorted(self._jobs().items()):
            jobs.add_metric([reason], count)
        ages = GaugeMetricFamily(
            PREFIX + "watch_age_seconds",
            "Seconds that a watch has owed a change that the operator knows of, by kind; 0: it owes none.",
            labels=["kind"],
        )
        for kind, age_s in sorted(self._watch_ages_s().items()):
            ages.add_metric([kind], age_s)
        return (jobs, ages)


def reference(metrics: Metrics) -> str:
    """The table of docs/reference/operator-metrics.md."""
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | {family.documentation} |"
        for family in sorted(metrics.registry.collect(), key=lambda family: family.name)
    ]
    return "\n".join(["| metric | type | meaning |", "|---|---|---|", *rows])
