"""Dashboards and alert rules: every expression parses, and names metrics, labels and reasons that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from itertools import combinations
from typing import Any

import promql_parser
import pytest
import yaml
from promql_parser import AggModifierType, AggregateExpr, BinaryExpr, Call, MatrixSelector, VectorSelector

from rljob_api import naming
from rljob_api.v1alpha1.conditions import Reason
from rljob_operator.metrics import LABELS as LABELS_OF_OPERATOR
from rljob_operator.metrics import Metrics
from rljob_runtime.report.prometheus import LABELS, exported, sample_name
from tests.layout.tree import ROOT
from tests.support.chart import CHART
from tests.support.grafana import schema_problems

DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
ALERTS = yaml.load((CHART / "files" / "alerts.yaml").read_text(), yaml.CSafeLoader)
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
        own = set(LABELS_OF_OPERATOR.get(name.removeprefix("rljob_operator_"), ()))
        found |= {one: own | ({"le"} if one.endswith("_bucket") else set()) for one in names.get(family.type, [name])}
    return found


KNOWN = known_metrics()
TARGET = {"namespace", "job", "pod", "container", "endpoint", "instance", "service"}
"""Labels that the Prometheus operator gives every series of a ServiceMonitor or PodMonitor."""


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


class NoMatchError(Exception):
    """Raised when an expression names labels that the series inside do not have, or compares series that never match."""


def labels_of(node: Any) -> set[str] | None:
    """Labels of the series that an expression gives; None of a number.

    Raises:
        NoMatchError: see there.
    """
    if isinstance(node, MatrixSelector | VectorSelector):
        (selector,) = selectors(node)
        return KNOWN.get(selector.name, set()) | TARGET
    if isinstance(node, Call):
        inside = [found for one in node.args if (found := labels_of(one)) is not None]
        return inside[-1] - ({"le"} if node.func.name == "histogram_quantile" else set()) if inside else None
    if isinstance(node, AggregateExpr):
        named, inner = set(node.modifier.labels) if node.modifier is not None else set(), labels_of(node.expr) or set()
        if not named <= inner:
            raise NoMatchError(f"no such labels: {sorted(named - inner)}")
        return inner - named if node.modifier is not None and node.modifier.type == AggModifierType.Without else named
    if isinstance(node, BinaryExpr):
        left, right = labels_of(node.lhs), labels_of(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        if left != right and (node.modifier is None or node.modifier.matching is None):
            raise NoMatchError(f"{node.prettify()}: labels {sorted(left ^ right)} are on one side alone")
        return left
    return labels_of(node.expr) if hasattr(node, "expr") else None


def problems(expression: str, used_labels: Collection[str] = ()) -> list[str]:
    """What is wrong with an expression, of whose series a text shows some labels."""
    text = expression.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$job", ".*")
    try:
        tree = promql_parser.parse(text)
    except ValueError as error:
        return [f"does not parse: {error}"]
    chosen = list(selectors(tree))
    found = [f"no such metric: {s.name}" for s in chosen if s.name not in KNOWN]
    for selector in chosen:
        for matcher in selector.matchers.matchers:
            if selector.name in KNOWN and matcher.name not in KNOWN[selector.name] | TARGET:
                found.append(f"{selector.name} has no label {matcher.name}")
            if matcher.name == "reason":
                found += [f"no such reason: {word}" for word in matcher.value.split("|") if word not in {r.value for r in Reason}]
    try:
        found += [f"{name} is a label of no series of it" for name in set(used_labels) - (labels_of(tree) or set())]
    except NoMatchError as error:
        found.append(str(error))
    mentioned = set(re.findall(r"rljob_\w+", text))
    return found + [f"not looked at: {name}" for name in mentioned - {s.name for s in chosen}]


def test_the_check_sees_what_is_wrong() -> None:
    assert problems("sum(rljob_train_step) by (job") != []
    assert problems("rate(rljob_train_stepp[5m])") == ["no such metric: rljob_train_stepp"]
    assert problems('1 + sum(rljob_operator_jobs{reason="Nope"})') == ["no such reason: Nope"]
    assert problems('rljob_train_step{queue="a"}') == ["rljob_train_step has no label queue"]
    assert problems("sum by (queue) (rljob_train_step)") == ["no such labels: ['queue']"]
    assert problems("sum by (job) (rljob_train_step)", ["job", "attempt"]) == ["attempt is a label of no series of it"]
    assert "are on one side alone" in problems("sum by (job) (rljob_train_step) / rljob_train_step")[0]
    assert problems("sum by (result) (rate(rljob_operator_webhook_reviews_total[5m]))", ["result"]) == []
    assert problems("histogram_quantile(0.5, sum by (le) (rate(rljob_operator_reconcile_seconds_bucket[5m])))") == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_can_fire(rule: dict[str, Any]) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert problems(rule["expr"], used) == []
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert "for" not in rule or DURATION.fullmatch(rule["for"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


def test_every_reason_of_a_failure_raises_an_alert_or_is_left_out_on_purpose() -> None:
    (failed,), (deadline,) = ([rule for rule in RULES if rule["alert"] == name] for name in ("RLJobFailed", "RLJobDeadlineExceeded"))
    named = [set(re.findall(r'reason=~"([^"]+)"', rule["expr"])) for rule in (failed, deadline)]
    assert [len(one) for one in named] == [1, 1], "the same reasons before and now"
    of_authors = {Reason.MODEL_INVALID, Reason.DATA_INVALID, Reason.IMAGE_UNAVAILABLE, Reason.STOPPED, Reason.CHILD_DELETED}
    alerted = {Reason(word) for one in named for word in one.pop().split("|")}
    assert alerted | of_authors == {reason for reason in Reason if reason.ends_attempt} | {Reason.ACTIVE_DEADLINE_EXCEEDED}
    assert alerted & of_authors == set()


def test_the_rule_of_the_template_names_a_metric_that_exists() -> None:
    text = (CHART / "templates" / "prometheusrule.yaml").read_text()
    (expression,) = re.findall(r"expr: (.*)", text)
    assert problems(re.sub(r"{{.*?}}", "x", expression), ["namespace", "service"]) == []


def test_the_alerts_of_the_reference_page_are_about_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "reference" / "operator-metrics.md").read_text()
    expressions = re.findall(r"^\| `([^`]+)`(?! \| (?:gauge|counter|histogram) \|)", page, re.MULTILINE)
    assert len(expressions) == 7
    assert [problem for one in expressions for problem in problems(one)] == []
    verbs = re.findall(r'verb="(\w+)"', "".join(expressions))
    assert verbs
    assert all(f'_request("{verb}"' in (ROOT / "operator/src/rljob_operator/kube.py").read_text() for verb in verbs)


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
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            ((expression, label),) = re.findall(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert problems(expression, [label]) == [], variable["name"]
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert problems(target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"])) == [], panel["title"]
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
    assert "honorLabels: true\n" in text, "else Prometheus names the labels of a job exported_namespace and exported_job"
