"""The script of `helm test` against a small HTTP server that acts as the API server."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import pytest

from rljob_api import validation
from tests.support.chart import CHART, rules


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_install", CHART / "files" / "check_install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cluster:
    """Answers of the fake API server; tests change them."""

    def __init__(self) -> None:
        self.established = "True"
        self.kuberay_fields = {"rayVersion", "authOptions"}
        self.denied: set[tuple[str, str]] = set()
        self.defaults = {"startupDeadlineSeconds": 1800}
        self.reviews: list[dict[str, Any]] = []

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/version":
            return 200, {"gitVersion": "v1.36.3"}
        if path == "/metrics":
            return 200, {}
        if "customresourcedefinitions" in path:
            conditions = [{"type": "Established", "status": self.established}]
            cluster = {"properties": {field: {} for field in self.kuberay_fields}}
            schema = {"properties": {"spec": {"properties": {"rayClusterSpec": cluster}}}}
            return 200, {
                "spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]},
                "status": {"conditions": conditions},
            }
        if path.endswith("subjectaccessreviews"):
            self.reviews.append(body["spec"])
            attributes = body["spec"]["resourceAttributes"]
            return 201, {"status": {"allowed": (attributes["verb"], attributes["resource"]) not in self.denied}}
        if path == "/apis/rljob.dev/v1alpha1/namespaces/system/rljobs?dryRun=All&fieldValidation=Strict":
            return 201, {**body, "spec": {**body["spec"], **self.defaults}}
        return 404, {"message": f"{method} {path} is not known"}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def environment(cluster: Cluster) -> Iterator[dict[str, str]]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, answer = cluster.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"127.0.0.1:{server.server_address[1]}"
    yield {
        "RLJOB_CHECK_API": f"http://{address}",
        "RLJOB_CHECK_RULES": json.dumps(rules()),
        "RLJOB_CHECK_ACCOUNT": "system:rljob-operator",
        "RLJOB_CHECK_NAMESPACES": "",
        "RLJOB_CHECK_NAMESPACE": "system",
        "RLJOB_CHECK_METRICS": address,
    }
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_all_checks_pass(script: ModuleType, cluster: Cluster, environment: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert script.main(environment) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"ok      {title}"
        for title in ("API server", "RLJob CRD", "KubeRay CRD", "operator's permissions", "sample RLJob", "operator's metrics")
    ]
    wanted = sum(len(r["apiGroups"]) * len(r["resources"]) * len(r["verbs"]) for r in rules())
    assert len(cluster.reviews) == wanted
    assert {r["user"] for r in cluster.reviews} == {"system:serviceaccount:system:rljob-operator"}
    status = [r["resourceAttributes"] for r in cluster.reviews if r["resourceAttributes"]["subresource"] == "status"]
    assert status == [{"namespace": "", "group": "rljob.dev", "resource": "rljobs", "subresource": "status", "name": "", "verb": "patch"}]


def test_rights_on_the_lease_and_the_webhook_are_checked_by_name_and_place(
    script: ModuleType, cluster: Cluster, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    lease = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["op"], "verbs": ["get", "patch"]}]
    webhook = [{"apiGroups": ["x"], "resources": ["configurations"], "resourceNames": ["hook"], "verbs": ["patch"]}]
    wider = {"RLJOB_CHECK_NAMESPACES": "a,b", "RLJOB_CHECK_OWN_RULES": json.dumps(lease), "RLJOB_CHECK_GLOBAL_RULES": json.dumps(webhook)}
    cluster.denied = {("patch", "leases")}
    assert script.main(environment | wider) == 1
    asked = [(r["namespace"], r["resource"], r["name"]) for r in (review["resourceAttributes"] for review in cluster.reviews)]
    assert asked[-3:] == [("system", "leases", "op"), ("system", "leases", "op"), ("", "configurations", "hook")]
    assert "lacks permissions: patch coordination.k8s.io/leases op in system;" in capsys.readouterr().out


def test_rights_are_checked_in_every_namespace(script: ModuleType, cluster: Cluster, environment: dict[str, str]):
    assert script.main(environment | {"RLJOB_CHECK_NAMESPACES": "a,b"}) == 0
    assert {r["resourceAttributes"]["namespace"] for r in cluster.reviews} == {"a", "b"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"established": "False"}, "FAILED  RLJob CRD: rljobs.rljob.dev is not established"),
        (
            {"denied": {("create", "rayjobs")}},
            "FAILED  operator's permissions: the operator lacks permissions: create ray.io/rayjobs in all namespaces",
        ),
        ({"kuberay_fields": {"rayVersion"}}, "FAILED  KubeRay CRD: rayjobs.ray.io is older than KubeRay 1.6.2: version v1 has no spec."),
        ({"defaults": {}}, "FAILED  sample RLJob: the API server did not fill in defaults"),
    ],
    ids=["crd", "rights", "old-kuberay", "old-crd"],
)
def test_failures_are_reported(
    change: dict[str, Any],
    message: str,
    script: ModuleType,
    cluster: Cluster,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
):
    for name, value in change.items():
        setattr(cluster, name, value)
    assert script.main(environment) == 1
    assert message in capsys.readouterr().out


def test_no_api_server(script: ModuleType, environment: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert script.main(environment | {"RLJOB_CHECK_API": "http://127.0.0.1:1"}) == 1
    assert "FAILED  API server: GET /version: <urlopen error" in capsys.readouterr().out


def test_the_metrics_are_left_out_where_they_cannot_be_reached(
    script: ModuleType, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert script.main({k: v for k, v in environment.items() if k != "RLJOB_CHECK_METRICS"}) == 0
    assert "metrics" not in capsys.readouterr().out


def test_the_sample_is_a_valid_job(script: ModuleType):
    assert validation.check(script.SAMPLE).plan.nodes
