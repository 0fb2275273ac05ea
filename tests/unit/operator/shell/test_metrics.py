"""Metric names are an interface: frozen here, and the same as on the reference page."""

from pathlib import Path

from rljob_operator.metrics import PREFIX, Metrics, reference
from tests.support.golden import Golden

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "operator-metrics.md"
NAMES = {
    "rljob_operator_queue_depth",
    "rljob_operator_reconcile_seconds",
    "rljob_operator_errors",
    "rljob_operator_requests",
    "rljob_operator_events_lost",
    "rljob_operator_leader",
    "rljob_operator_missed_objects",
    "rljob_operator_jobs",
    "rljob_operator_watch_age_seconds",
    "rljob_operator_webhook_reviews",
    "rljob_operator_crd_fields",
    "rljob_operator_jobs_failed",
}


def _all() -> Metrics:
    metrics = Metrics()
    metrics.watch_cache(lambda: {"Running": 2}, lambda: {"RayJob": 1.5})
    return metrics


def test_the_metrics_are_these():
    families = list(_all().registry.collect())
    assert {family.name for family in families} == NAMES
    assert all(family.name.startswith(PREFIX) and family.documentation.endswith(".") for family in families)


def test_the_reference_page_lists_them(golden: Golden):
    before, _, rest = PAGE.read_text().partition("| metric |")
    after = rest.partition("\n\n")[2]
    assert golden.differences(PAGE, f"{before}{reference(_all())}\n\n{after}") == ""


def test_requests_are_counted_by_verb_kind_and_status():
    metrics = _all()
    metrics.observe_request("create", "RayJob", 201)
    assert metrics.registry.get_sample_value("rljob_operator_requests_total", {"verb": "create", "kind": "RayJob", "status": "201"}) == 1


def test_the_state_of_the_cache_is_read_when_asked():
    registry = _all().registry
    assert registry.get_sample_value("rljob_operator_jobs", {"reason": "Running"}) == 2
    assert registry.get_sample_value("rljob_operator_watch_age_seconds", {"kind": "RayJob"}) == 1.5


def test_two_operators_in_one_process_do_not_share_metrics():
    first, second = _all(), _all()
    first.queue_depth.set(3)
    assert second.registry.get_sample_value("rljob_operator_queue_depth") == 0
