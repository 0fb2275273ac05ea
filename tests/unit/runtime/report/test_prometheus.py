"""Metrics as Prometheus reads them: names, values, what is counted over steps, the endpoint itself."""

import math
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict_parse

from rljob_runtime.report import METRICS, PhaseView
from rljob_runtime.report.metrics_endpoint import MetricsEndpoint, serve
from rljob_runtime.report.prometheus import LABELS, MAX_NAMES, Deadline, RunFacts, TrainingMetrics, exported, sample_name
from tests.layout.tree import ROOT
from tests.support.ports import free_port
from tests.support.report_fakes import INFO, FakeClock, make_record

FACTS = RunFacts(namespace="team", job="math", attempt=2, target_steps=30, staleness_bound=1, active_deadline_s=600)
SAME = {"namespace": "team", "job": "math", "attempt": "2"}


def running(clock: FakeClock | None = None) -> TrainingMetrics:
    metrics = TrainingMetrics(FACTS, now_s=clock or FakeClock())
    metrics.started(INFO, Path("run"), None)
    metrics.phase_started("starting engines")
    metrics.phase_ended(PhaseView(name="starting engines", elapsed_s=1.0), failed=False)
    return metrics


def samples(metrics: TrainingMetrics) -> dict[str, float]:
    """By name, without labels; a family's by name and label."""
    found: dict[str, float] = {}
    for family in metrics.collect():
        for sample in family.samples:
            assert {key: sample.labels[key] for key in LABELS} == SAME
            found[sample.name + (f"/{sample.labels['name']}" if "name" in sample.labels else "")] = sample.value
    return found


def test_a_step_is_read_with_units_and_labels() -> None:
    metrics = running()
    metrics.step(make_record(3, overlap__trainer_idle_fraction=0.25, offload__gb_per_s=1.5, **{"reward/part/sums": 0.5}))
    found = samples(metrics)
    assert found["rljob_train_step"] == 3
    assert found["rljob_train_time_sync_seconds"] == 0.009
    assert found["rljob_train_overlap_trainer_idle_ratio"] == 0.25
    assert found["rljob_train_offload_bytes_per_second"] == 1.5e9
    assert found["rljob_train_reward_part_by_name/sums"] == 0.5
    assert (found["rljob_train_target_steps"], found["rljob_train_staleness_bound_versions"]) == (30, 1)
    assert found["rljob_train_deadline_timestamp_seconds"] == 1600


def test_a_deadline_that_the_operator_keeps_is_shown_as_it_is_known() -> None:
    metrics = TrainingMetrics(replace(FACTS, active_deadline_s=None, deadline=(deadline := Deadline())), now_s=FakeClock())
    metrics.started(INFO, Path("run"), None)
    assert "rljob_train_deadline_timestamp_seconds" not in samples(metrics)
    deadline.at_s = 5000.0
    assert samples(metrics)["rljob_train_deadline_timestamp_seconds"] == 5000


def test_counters_add_up_over_steps_and_restarts_and_never_become_nan() -> None:
    metrics = running()
    metrics.history([])
    for step, lost in ((1, 1.0), (2, math.nan), (3, 2.0)):
        metrics.step(make_record(step, rollout__engines_lost=lost))
    metrics.history([make_record(1)])  # a worker was lost: steps 2 and 3 are trained again
    metrics.step(make_record(2))
    found = samples(metrics)
    assert found["rljob_train_engines_lost_total"] == 3
    assert found["rljob_train_tokens_total"] == 4 * 640
    assert (found["rljob_train_steps_total"], found["rljob_train_step"], found["rljob_train_worker_restarts_total"]) == (4, 2, 2)


def test_the_history_of_an_earlier_process_is_no_restart() -> None:
    metrics = TrainingMetrics(FACTS, now_s=FakeClock())
    metrics.history([make_record(7)])
    found = samples(metrics)
    assert (found["rljob_train_worker_restarts_total"], found["rljob_train_step"], found["rljob_train_tokens_total"]) == (0, 7, 0)


def test_the_history_of_another_version_does_not_end_the_endpoint() -> None:
    metrics = TrainingMetrics(FACTS, now_s=FakeClock())
    metrics.history([make_record(7, **{"train/entropy_from_behaviors": 1.0})])
    assert samples(metrics)["rljob_train_step"] == 7


def test_progress_is_any_step_or_phase_and_a_validation_is_remembered() -> None:
    clock = FakeClock()
    metrics = running(clock)
    clock.advance(50)
    assert samples(metrics)["rljob_train_last_progress_timestamp_seconds"] == 1000
    metrics.step(make_record(1, validation__mean=0.75, sync__fell_back=1.0))
    metrics.step(make_record(2))
    found = samples(metrics)
    assert found["rljob_train_last_progress_timestamp_seconds"] == 1050
    assert found["rljob_train_validation_mean"] == 0.75
    assert "rljob_train_sync_fell_back" not in found


def test_a_family_of_too_many_names_is_cut_and_that_is_counted() -> None:
    metrics = running()
    metrics.step(make_record(1, **{f"reward/tag/{i:04d}": float(i) for i in range(MAX_NAMES + 5)}))
    found = samples(metrics)
    assert sum(name.startswith("rljob_train_reward_tag_by_name/") for name in found) == MAX_NAMES
    assert found["rljob_train_left_out_series"] == 5


def every_metric() -> TrainingMetrics:
    metrics = running()
    metrics.step(make_record(1, **{name.replace("*", "some"): 1.0 for name in METRICS}))
    return metrics


def test_the_reference_lists_exactly_what_a_run_exports() -> None:
    page = (ROOT / "docs" / "reference" / "training-metrics.md").read_text()
    listed = {line.split("`")[1].partition("{")[0] for line in page.splitlines() if line.startswith("| `")}
    assert listed == {sample.name for family in every_metric().collect() for sample in family.samples}
    assert listed == {sample_name(one) for one in exported()}


def test_the_strict_parser_of_openmetrics_reads_all_of_it() -> None:
    registry = CollectorRegistry()
    registry.register(every_metric())
    families = list(strict_parse(openmetrics(registry).decode()))  # raises on a name that two families have
    assert len(families) == len(exported())
    units = {"s": "_seconds", "bytes": "_bytes", "fraction": "_ratio", "tokens/s": "_per_second"}
    for one in exported():
        if one.source and one.kind == "gauge":
            assert one.name.endswith(units.get(METRICS[one.source].unit, "")), one


def test_the_endpoint_answers_and_a_port_in_use_is_words() -> None:
    metrics, port = running(), free_port()
    metrics.step(make_record(1))
    endpoint = serve(metrics, "127.0.0.1", port)
    assert isinstance(endpoint, MetricsEndpoint)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert 'rljob_train_step{attempt="2",job="math",namespace="team"} 1.0' in answer.read().decode()
        refused = serve(metrics, "127.0.0.1", port)
        assert isinstance(refused, str)
        assert f"port {port} of 127.0.0.1: Address already in use" in refused
    finally:
        endpoint.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)
