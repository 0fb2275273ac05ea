"""Dashboards and alert rules: every expression parses, and names metrics, labels and reasons that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import promql_parser
import pytest
import yaml
from promql_parser import Call, MatrixSelector, VectorSelector

from rljob_api import naming
from rljob_api.v1alpha1.conditions import Reason
from rljob_operator.metrics import Metrics
from rljob_runtime.report.prometheus import LABELS, exported, sample_name
from tests.layout.tree import ROOT
from tests.support.chart import CHART
from tests.support.grafana import schema_problems

DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DURATION = re.compile(r"([0-9]+(ms|s|m|h))+")


def known_metrics() -> dict[str, set[str]]:
    """Names in queries -> own labels."""
    found = {sample_name(one): {*LABELS, *(["name"] if one.is_family else [])} for one in exported()}
    metrics = Metrics()
    metrics.watch_cache(dict, dict)
    for family in metrics.registry.collect():
        name = family.name.removesuffix("_total")
        names = {"counter": [f"{name}_total"], "histogram": [f"{name}_{end}" for end in ("bucket", "count", "sum")]}
        labels = {"jobs": {"reason"}, "watch_age_seconds": {"kind"}, "errors": {"error"}, "requests": {"verb", "kind", "status"}}
        own = labels.get(name.removeprefix("rljob_operator_"), {"le"} if family.type == "histogram" else set())
        found |= dict.fromkeys(names.get(family.type, [name]), own)
    return found


KNOWN = known_metrics()


def selectors(node: Any) -> Iterator[VectorSelector]:
    """All selectors of an expression."""
    if isinstance(node, MatrixSelector):
        node = node.selector if hasattr(node, "selector") else node.vector_selector
    if isinstance(node, VectorSelector):
        yield node
        return
    children = list(node.args) if isinstance(node, Call) else [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
    for child in children:
        if child is not None and hasattr(child, "prettify"):
            yield from selectors(child)


def problems(expression: str) -> list[str]:
    """What is wrong with an expression."""
    text = expression.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$job", ".*")
    try:
        tree = promql_parser.parse(text)
    except ValueError as error:
        return [f"does not parse: {error}"]
    chosen = list(selectors(tree))
    found = [f"no such metric: {s.name}" for s in chosen if s.name not in KNOWN]
    for selector in chosen:
        for matcher in selector.matchers.matchers:
            if selector.name in KNOWN and matcher.name not in KNOWN[selector.name]:
                found.append(f"{selector.name} has no label {matcher.name}")
            if matcher.name == "reason":
                found += [f"no such reason: {word}" for word in matcher.value.split("|") if word not in {r.value for r in Reason}]
    mentioned = set(re.findall(r"rljob_\w+", text))
    return found + [f"not looked at: {name}" for name in mentioned - {s.name for s in chosen}]


def test_the_check_sees_what_is_wrong() -> None:
    assert problems("sum(rljob_train_step) by (job") != []
    assert problems("rate(rljob_train_stepp[5m])") == ["no such metric: rljob_train_stepp"]
    assert problems('1 + sum(rljob_operator_jobs{reason="Nope"})') == ["no such reason: Nope"]
    assert problems('rljob_train_step{queue="a"}') == ["rljob_train_step has no label queue"]
    assert problems("histogram_quantile(0.5, sum by (le) (rate(rljob_operator_reconcile_seconds_bucket[5m])))") == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_can_fire(rule: dict[str, Any]) -> None:
    assert problems(rule["expr"]) == []
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert "for" not in rule or DURATION.fullmatch(rule["for"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert used <= {"namespace", "job", "reason", "kind", "error"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_silent_about_what_is_not_scraped(rule: dict[str, Any]) -> None:
    """Without series an expression over series is empty; only a constant or ``absent`` would make it fire in a cluster without a scrape."""

    def calls(node: Any) -> Iterator[str]:
        if isinstance(node, Call):
            yield node.func.name
        below = list(node.args) if isinstance(node, Call) else [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
        for child in below:
            if child is not None and hasattr(child, "prettify"):
                yield from calls(child)

    assert list(calls(promql_parser.parse("(sum(a) or vector(0)) != 1"))) == ["vector"]
    assert {"vector", "absent", "absent_over_time"}.isdisjoint(calls(promql_parser.parse(rule["expr"])))


def test_alerts_have_names_of_their_own() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_draws_metrics_that_exist(path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert problems(target["expr"]) == [], panel["title"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= variables
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_fits_the_schema_of_grafana(path) -> None:
    assert schema_problems(json.loads(path.read_text())) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("option", {"legend": {"placment": "bottom"}}, "no such key"),
        ("options", {"legend": {"displayMode": "list", "placement": "below", "showLegend": True, "calcs": []}}, "'below' is none of"),
        ("options", {"legend": {"displayMode": "list", "placement": "bottom", "calcs": []}}, "needs show_legend"),
        ("options", {"tooltips": {}}, ".options.tooltips: Options has no such key"),
        ("type", "timeserie", "the type of this panel is unknown"),
        ("targets", [{"refId": "A", "expression": "up", "datasource": {"type": "prometheus"}}], "expression: Dataquery has no such key"),
        ("datasource", {"type": "promtheus"}, "no model of a query"),
        ("gridPos", {"x": "0", "y": 1, "w": 8, "h": 8}, "gridPos.x: '0' is no int"),
    ],
)
def test_a_misspelled_option_of_a_panel_is_found(key: str, value: Any, problem: str) -> None:
    board = json.loads(DASHBOARDS[0].read_text())
    board["panels"][1][key] = value
    assert problem in "\n".join(schema_problems(board))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_lie_side_by_side_on_the_grid(path) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in json.loads(path.read_text())["panels"]]
    for title, place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, title
    for (one, a), (other, b) in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (one, other)


def test_the_dashboards_are_the_generated_ones() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "dashboards.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_pod_monitor_finds_the_heads_of_jobs() -> None:
    text = (CHART / "templates" / "podmonitor.yaml").read_text()
    assert f"port: {naming.METRICS_PORT_NAME}\n" in text
    assert f"key: {naming.JOB_LABEL}, operator: Exists" in text
