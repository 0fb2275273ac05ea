"""Permissions of a job's pods, who can connect to them, and secrecy of its credentials."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from e2e.conftest import AUDIT_LOG
from e2e.enforcement import enforcing
from e2e.guarded import SECRET, Guarded
from e2e.installation import SYSTEM
from e2e.kubectl import Kubectl
from e2e.volumes import Volume

PROBE = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1])
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""

CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=3).close()
        print(port)
    except OSError:
        pass
"""
PORTS = ["6379", "8265"]
"""Of a head: Ray's store of the cluster's state, and the dashboard."""
REQUEST = """
import os, ssl, sys, urllib.error, urllib.request
method, path, body = sys.argv[1:]
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
headers = {"Authorization": "Bearer " + open(folder + "/token").read(), "Content-Type": "application/merge-patch+json"}
url = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"] + path
request = urllib.request.Request(url, data=body.encode() or None, headers=headers, method=method)
try:
    answer = urllib.request.urlopen(request, context=ssl.create_default_context(cafile=folder + "/ca.crt"), timeout=10)
    print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


@pytest.fixture(scope="module")
def enforced(kubectl: Kubectl, volume: Volume) -> Iterator[None]:
    """NetworkPolicies are enforced; in another cluster than the built one that is up to its network plug-in."""
    if AUDIT_LOG not in os.environ:
        yield
        return
    with enforcing(kubectl):
        yield


@pytest.fixture(scope="module")
def running(guarded: Guarded, enforced: None) -> str:
    """The job that starts and trains while its NetworkPolicy is enforced."""
    return guarded.trains(steps=2)


def head_of(kubectl: Kubectl, job: str) -> str:
    return kubectl.items("pods", f"rljob.dev/job={job},ray.io/node-type=head")[0]["metadata"]["name"]


def test_the_dashboard_requires_a_token(kubectl: Kubectl, running: str):
    code = kubectl("exec", head_of(kubectl, running), "-c", "ray", "--", "python", "-c", PROBE, "http://127.0.0.1:8265/api/jobs/")
    assert code.strip() in ("401", "403")


def reached(kubectl: Kubectl, pod: str, address: str, container: str) -> list[str]:
    """Ports of an address that a pod can connect to."""
    return kubectl("exec", pod, "-c", container, "--", "python", "-c", CONNECT, address, *PORTS).split()


def test_its_own_pods_connect_and_no_other_pod_does(kubectl: Kubectl, running: str):
    pods = kubectl.children(running, "pods")
    (head,) = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "head"]
    address = head["status"]["podIP"]
    for pod in pods:
        assert reached(kubectl, pod["metadata"]["name"], address, "ray") == PORTS
    assert reached(kubectl, Volume.POD, address, "shell") == []


def test_pods_run_restricted_and_read_only(kubectl: Kubectl, running: str):
    pods = kubectl.children(running, "pods")
    assert len(pods) == 3
    for pod in pods:
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, container["name"]
    identity = kubectl("exec", head_of(kubectl, running), "-c", "ray", "--", "id", "-u").strip()
    assert identity == "1000"
    logs = kubectl("exec", head_of(kubectl, running), "-c", "ray", "--", "ls", "/tmp/ray/session_latest/logs").split()
    assert "raylet.out" in logs
    assert not {"log_monitor.log", "monitor.log"} & set(logs), "processes of Ray's that nothing here uses"


def as_job(kubectl: Kubectl, job: str, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    """One request from inside the head with its own token: status code and answer."""
    sent = json.dumps(body) if body is not None else ""
    answer = kubectl("exec", head_of(kubectl, job), "-c", "ray", "--", "python", "-c", REQUEST, method, path, sent)
    code, _, text = answer.partition(" ")
    return int(code), text


def test_only_the_head_has_the_account_and_its_account_changes_progress_only(kubectl: Kubectl, running: str):
    for pod in kubectl.children(running, "pods"):
        is_head = pod["metadata"]["labels"]["ray.io/node-type"] == "head"
        assert pod["spec"].get("automountServiceAccountToken") is is_head
    namespaced = f"/apis/rljob.dev/v1alpha1/namespaces/{kubectl.namespace}/rljobs"
    own = f"{namespaced}/{running}"
    code, _ = as_job(kubectl, running, "PATCH", f"{own}/status", {"status": {"progress": {"passRate": "0.5"}}})
    assert code == 200
    for change in ({"attempt": 7}, {"conditions": []}, {"completionTime": "2026-01-01T00:00:00Z"}):
        code, text = as_job(kubectl, running, "PATCH", f"{own}/status", {"status": change})
        assert code in (403, 422), change
        assert "may change status.progress only" in text
    for method, path, body in (
        ("PATCH", own, {"spec": {"suspend": True}}),
        ("DELETE", own, None),
        ("GET", own, None),
        ("GET", f"/api/v1/namespaces/{kubectl.namespace}/pods", None),
        ("GET", f"/api/v1/namespaces/{kubectl.namespace}/secrets", None),
        ("PATCH", f"{namespaced}/other/status", {"status": {"progress": {"step": 1}}}),
    ):
        code, text = as_job(kubectl, running, method, path, body)
        assert code == 403, (method, path, text)
        assert "cannot" in text


def test_logs_are_readable_while_the_job_runs_and_secret_values_are_nowhere(kubectl: Kubectl, volume: Volume, running: str):
    seen = kubectl("get", "rljobs,rayjobs,rayclusters,events,pods", "-o", "json")
    logs = [kubectl("logs", p["metadata"]["name"], "--all-containers") for p in kubectl.children(running, "pods")]
    files = volume.texts(running, "-path './logs/*' -o -name '*.json' -o -name '*.jsonl' -o -name '*.yaml'")
    operator = kubectl("logs", "deployment/rljob-operator", namespace=SYSTEM)
    assert len(files) > 3
    for source in ("driver", "actor_train-0", "actor_infer-0", "reward-0"):
        assert any(f"[{source}] " in log for log in logs), f"kubectl logs shows nothing of {source}"
    for text in (seen, *logs, *files, operator):
        assert SECRET not in text
    assert json.loads(seen)["items"]
