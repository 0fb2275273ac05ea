"""The chart as text: options, schema, permissions and environment agree with each other and with the operator. No helm needed."""

from __future__ import annotations

import dataclasses
import re
from itertools import product

import jsonschema
import pytest
import yaml

from rljob_operator.settings import Settings
from tests.layout.tree import ROOT
from tests.support.chart import CHART, TEMPLATES, options, rules, schema, values

TEMPLATE_TEXT = "\n".join(path.read_text() for path in TEMPLATES)

# All permissions of the operator. A new one is added here on purpose, with a reason in the chart.
EXPECTED_RIGHTS = {
    ("rljob.dev", "rljobs"): {"get", "list", "watch", "delete"},
    ("rljob.dev", "rljobs/status"): {"patch"},
    ("rljob.dev", "rljobs/finalizers"): {"update"},
    ("ray.io", "rayjobs"): {"get", "list", "watch", "create", "patch", "delete"},
    ("ray.io", "rayclusters"): {"list", "watch"},
    ("", "pods"): {"list", "watch"},
    ("", "serviceaccounts"): {"get", "create", "patch"},
    ("networking.k8s.io", "networkpolicies"): {"get", "create", "patch"},
    ("rbac.authorization.k8s.io", "roles"): {"get", "create", "patch"},
    ("rbac.authorization.k8s.io", "rolebindings"): {"get", "create", "patch"},
    ("policy", "poddisruptionbudgets"): {"get", "create", "patch"},
    ("kueue.x-k8s.io", "workloads"): {"list"},
    ("", "events"): {"list", "create"},
}


def test_the_default_values_fit_the_schema():
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(values(), schema())


@pytest.mark.parametrize("option", ["networkPolicy", "jobs"])
def test_a_peer_that_names_nobody_is_refused(option: str):
    """Kubernetes refuses it, too, but for jobs only when the operator creates a NetworkPolicy."""
    with pytest.raises(jsonschema.ValidationError, match=r"non-empty|enough properties"):
        jsonschema.validate(values() | {option: values()[option] | {"metricsFrom": [{}]}}, schema())


@pytest.mark.parametrize("option", ["dnsPorts", "apiServerPorts"])
def test_ports_that_are_missing_or_null_are_refused(option: str):
    """A rule of a NetworkPolicy without ports allows all of them, and so do null values of --set and old values of --reuse-values."""
    given = values()
    given["networkPolicy"][option] = None
    with pytest.raises(jsonschema.ValidationError, match="None is not of type 'array'"):
        jsonschema.validate(given, schema())
    del given["networkPolicy"][option]
    with pytest.raises(jsonschema.ValidationError, match=f"'{option}' is a required property"):
        jsonschema.validate(given, schema())


def test_the_schema_has_exactly_the_options():
    def leaves(node: dict, prefix: str = "") -> set[str]:
        if "properties" not in node:
            return {prefix.removesuffix(".")}
        return {leaf for name, child in node["properties"].items() for leaf in leaves(child, f"{prefix}{name}.")}

    assert leaves(schema()) - {"global", "enabled"} == set(options(values())), "those two are of a parent chart"


def test_every_object_of_the_schema_is_closed_or_typed():
    def open_objects(node: object, path: str) -> list[str]:
        if not isinstance(node, dict):
            return []
        found = [path] if "properties" in node and node.get("additionalProperties") is not False else []
        for name, child in node.get("properties", {}).items():
            found += open_objects(child, f"{path}.{name}")
        return found + open_objects(node.get("items"), f"{path}[]")

    assert open_objects(schema(), "") == []


@pytest.mark.parametrize("option", sorted(options(values())))
def test_every_option_is_used(option: str):
    # Images are passed to a helper as a whole; their fields are used there.
    image, _, field = option.rpartition(".")
    if image in ("image", "runtime.image") and field != "pullPolicy":
        assert f".Values.{image} " in TEMPLATE_TEXT
        assert f"$image.{field}" in TEMPLATE_TEXT
    else:
        assert re.search(rf"\.Values\.{re.escape(option)}\b(?!\.)", TEMPLATE_TEXT), f"{option} is accepted and ignored"


@pytest.mark.parametrize("option", sorted(options(values())))
def test_every_option_is_rendered_with_another_value_than_its_default(option: str):
    """By a golden case of tests/integration/test_helm.py, or by a --set there."""

    def value_in(tree: object) -> object:
        for name in option.split("."):
            tree = tree.get(name) if isinstance(tree, dict) else None
        return tree

    cases = [yaml.load(path.read_text(), yaml.CSafeLoader) or {} for path in (ROOT / "tests" / "golden" / "helm").glob("*.values.yaml")]
    golden = any(value_in(case) not in (None, value_in(values())) for case in cases)
    assert golden or f"{option}=" in (ROOT / "tests" / "integration" / "test_helm.py").read_text()


def test_every_option_that_is_used_exists():
    used = set(re.findall(r"\.Values\.([\w.]+)", TEMPLATE_TEXT))
    known = set(options(values()))
    assert {u for u in used if not any(k == u or k.startswith(f"{u}.") for k in known)} == set()


def test_the_operators_rights():
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in rules():
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        for key in product(rule["apiGroups"], rule["resources"]):
            assert key not in granted, f"{key} is granted twice"
            granted[key] = set(rule["verbs"])
    assert granted == EXPECTED_RIGHTS


def test_the_operator_reads_no_secrets_and_holds_no_wildcard():
    text = (CHART / "templates" / "_helpers.tpl").read_text() + (CHART / "templates" / "rbac.yaml").read_text()
    assert "*" not in text.replace("{{/*", "").replace("*/}}", "")
    assert "secrets" not in "".join(resource for rule in rules() for resource in rule["resources"])


def test_the_deployment_sets_every_setting_of_the_operator():
    text = (CHART / "templates" / "deployment.yaml").read_text()
    assert re.findall(r"name: (RLJOB_OPERATOR_\w+)", text) == [f"RLJOB_OPERATOR_{f.name.upper()}" for f in dataclasses.fields(Settings)]


def test_defaults_of_chart_and_operator_agree():
    defaults = {f.name: f.default for f in dataclasses.fields(Settings)}
    chart = values()
    assert chart["jobs"]["networkPolicy"] is defaults["network_policy"]
    assert chart["operator"] == {
        "workers": defaults["workers"],
        "requests": defaults["requests"],
        "logLevel": defaults["log_level"],
        "logFormat": defaults["log_format"],
        "listenAddress": "",  # that of the API server's family
    }
    assert chart["kuberay"]["namespace"] == defaults["kuberay_namespace"]
    assert ",".join(chart["watch"]["namespaces"]) == defaults["namespaces"]
    assert ",".join(chart["runtime"]["imagePullSecrets"]) == defaults["runtime_image_pull_secrets"]
    assert (chart["jobs"]["egress"], defaults["egress"]) == ({"restrict": False, "allow": []}, "")
    assert (chart["jobs"]["metricsFrom"], defaults["metrics_from"]) == ([], "")
    text = (CHART / "templates" / "deployment.yaml").read_text()
    for name in ("health", "metrics"):
        assert f'{name.upper()}_PORT, value: "{defaults[f"{name}_port"]}"' in text
        assert f"{{name: {name}, containerPort: {defaults[f'{name}_port']}}}" in text


def test_versions_agree():
    chart = yaml.load((CHART / "Chart.yaml").read_text(), yaml.CSafeLoader)
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "operator" / "pyproject.toml").read_text()
    assert f"ARG VERSION={chart['appVersion']}\n" in (ROOT / "Dockerfile").read_text()
    assert f"ray[default]=={values()['runtime']['rayVersion']}" in (ROOT / "runtime" / "pyproject.toml").read_text()


def test_the_charts_crd_is_the_generated_one():
    assert (CHART / "crds" / "rljobs.rljob.dev.yaml").read_text() == (ROOT / "crds" / "rljobs.rljob.dev.yaml").read_text()
