"""One installation of the chart per run: namespaces, a volume, the operator from the built image; removed at the end.

`make e2e` builds the cluster and the images first. For another cluster set KUBECONFIG (its context must be on the allow-list of
e2e.cluster), RLJOB_E2E_OPERATOR_IMAGE, RLJOB_E2E_RUNTIME_IMAGE, and RLJOB_E2E_STORAGE_CLASS for a ReadWriteMany volume.

A job whose scenario only looks at the outcome is applied when the run begins (marker ``begins``), and trains while others wait.

test_rights.py runs last and checks the operator's permissions against the API server's audit log, RLJOB_E2E_AUDIT_LOG. Only the built
cluster has one; without it that test is deselected.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from e2e.cluster.guard import require_allowed_context
from e2e.jobs import CLAIM, ROOT
from e2e.kubectl import Kubectl

NAMESPACE = "rljob-e2e"
SYSTEM = "rljob-system"
RELEASE = "rljob"
RESTRICTED = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
}
HELM_TIMEOUT_S = 180
AUDIT_LOG = "RLJOB_E2E_AUDIT_LOG"
COMPARED = "test_time_division.py"
"""Compares with a job of an earlier file, which it otherwise has to train again."""
LAST = Path(__file__).with_name("test_rights.py")
COLLECTED_AT = pytest.StashKey[datetime]()
"""Before the first request of this run."""
DESELECTED = pytest.StashKey[list[str]]()
"""Tests that were collected and will not run."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the test that evaluates all scenarios last, or deselect it without an audit log."""
    config.stash[COLLECTED_AT] = datetime.now(UTC)
    items.sort(key=lambda item: item.path.name == COMPARED)
    last = [item for item in items if item.path == LAST]
    others = [item for item in items if item.path != LAST]
    if AUDIT_LOG in os.environ:
        items[:] = [*others, *last]
    elif last:
        items[:] = others
        config.hook.pytest_deselected(items=last)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash.setdefault(DESELECTED, []).append(item.name)


def what_did_not_run(session: pytest.Session) -> str:
    """Why this was not a complete, passing run of e2e/; empty if it was."""
    here = Path(__file__).parent
    files = {path.name for path in here.glob("test_*.py")} - {item.path.name for item in session.items if item.path.parent == here}
    reasons = [
        f"not collected: {', '.join(sorted(files))}" if files else "",
        f"deselected: {', '.join(session.config.stash.get(DESELECTED, []))}" if session.config.stash.get(DESELECTED, []) else "",
        f"only part of a file: {', '.join(session.config.args)}" if any("::" in arg for arg in session.config.args) else "",
        f"{session.testsfailed} failed" if session.testsfailed else "",
    ]
    return "; ".join(filter(None, reasons))


def needed(variable: str) -> str:
    value = os.environ.get(variable)
    assert value, f"{variable} is not set; `make e2e` sets it"
    return value


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    kubeconfig = Path(needed("KUBECONFIG"))
    require_allowed_context(kubeconfig)
    return Kubectl(shutil.which("kubectl") or needed("RLJOB_E2E_KUBECTL"), kubeconfig, NAMESPACE)


class Helm:
    """The helm binary on the same cluster."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.binary = shutil.which("helm") or needed("RLJOB_E2E_HELM")
        self.kubeconfig = kubectl.kubeconfig

    def __call__(self, *args: str) -> str:
        done = subprocess.run(
            [self.binary, *args, f"--kubeconfig={self.kubeconfig}", f"--namespace={SYSTEM}"],
            capture_output=True,
            text=True,
            timeout=HELM_TIMEOUT_S + 30,
            check=False,
        )
        assert done.returncode == 0, f"helm {' '.join(args)}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def helm(kubectl: Kubectl) -> Helm:
    return Helm(kubectl)


def image_values(image: str, prefix: str) -> list[str]:
    """--set arguments for an image reference repository:tag."""
    repository, _, tag = image.rpartition(":")
    return ["--set", f"{prefix}.repository={repository}", "--set-string", f"{prefix}.tag={tag}"]


@pytest.fixture(scope="session")
def chart_values() -> list[str]:
    return [
        *image_values(needed("RLJOB_E2E_OPERATOR_IMAGE"), "image"),
        *image_values(needed("RLJOB_E2E_RUNTIME_IMAGE"), "runtime.image"),
    ]


@pytest.fixture(scope="session", autouse=True)
def installation(kubectl: Kubectl, helm: Helm, chart_values: list[str]) -> Iterator[None]:
    """Install the chart and wait until the operator is ready."""
    kubectl.apply(RESTRICTED)
    chart = str(ROOT / "helm" / "rljob")
    try:
        helm("upgrade", "--install", RELEASE, chart, "--create-namespace", "--wait", f"--timeout={HELM_TIMEOUT_S}s", *chart_values)
    except AssertionError as error:
        pods = kubectl("describe", "pods", namespace=SYSTEM)
        logs = kubectl("logs", "deployment/rljob-operator", "--tail=50", namespace=SYSTEM)
        raise AssertionError(f"{error}\n{pods[-4000:]}\n{logs}") from None
    try:
        yield
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=true", "--timeout=120s", timeout_s=150)
        if "RLJOB_E2E_KEEP" not in os.environ:
            helm("uninstall", RELEASE, "--wait")
            kinds = "deployments,services,serviceaccounts,networkpolicies,clusterroles,clusterrolebindings,validatingadmissionpolicies"
            left = kubectl("get", kinds, f"--selector=app.kubernetes.io/instance={RELEASE}", "-o", "name", namespace=SYSTEM)
            assert not left.strip(), f"helm uninstall left {left}"
            assert kubectl("get", "crd", "rljobs.rljob.dev", "-o", "name").strip(), "the CRD, and with it every job, outlives the chart"


class Volume:
    """Reads run folders on the shared volume through a pod that mounts it, which works on every cluster."""

    POD = "inspector"

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def files(self, folder: str) -> list[str]:
        """Relative paths of all files below a run folder, or a folder in it; empty if the folder does not exist."""
        found = self.kubectl("exec", self.POD, "--", "sh", "-c", f"cd /volume/{NAMESPACE}/{folder} 2>/dev/null && find . -type f || true")
        return sorted(line.removeprefix("./") for line in found.splitlines())

    def read(self, path: str) -> str:
        return self.kubectl("exec", self.POD, "--", "cat", f"/volume/{NAMESPACE}/{path}")

    def texts(self, folder: str, tests: str) -> list[str]:
        """Contents of all files below a folder that match find's ``tests``; a file that a running job removes meanwhile is empty."""
        show = """sh -c 'cat "$1" 2>/dev/null; printf "\\0"' _ {} \\;"""
        script = f"cd /volume/{NAMESPACE}/{folder} && find . -type f \\( {tests} \\) -exec {show} || true"
        return self.kubectl("exec", self.POD, "--", "sh", "-c", script).split("\0")[:-1]


@pytest.fixture(scope="session")
def volume(kubectl: Kubectl, installation: None) -> Iterator[Volume]:
    """A ReadWriteMany volume for checkpoints: a PersistentVolume on a folder of the node, or one of a storage class."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""},
    }
    storage_class = os.environ.get("RLJOB_E2E_STORAGE_CLASS")
    folder = None
    if storage_class:
        claim["spec"]["storageClassName"] = storage_class
    else:
        folder = Path(tempfile.mkdtemp(prefix="rljob-e2e-volume-"))
        folder.chmod(0o777)
        claim["spec"]["volumeName"] = "rljob-e2e"
        kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": "rljob-e2e"},
                "spec": {
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteMany"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(folder)},
                    "claimRef": {"namespace": NAMESPACE, "name": CLAIM},
                },
            }
        )
    kubectl.apply(claim, inspector_pod())
    kubectl("wait", "--for=condition=Ready", f"pod/{Volume.POD}", "--timeout=60s", timeout_s=90)
    yield Volume(kubectl)
    kubectl("delete", "pod", Volume.POD, "--grace-period=0", "--force")
    if folder:
        kubectl("delete", "pvc", CLAIM, "--wait=false")
        kubectl("delete", "pv", "rljob-e2e", "--wait=false")
        shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def begun(request: pytest.FixtureRequest, kubectl: Kubectl, installation: None) -> None:
    """Apply the jobs of all collected scenarios that have the marker ``begins``."""
    jobs = [marker.args[0] for item in request.session.items for marker in item.iter_markers("begins")]
    if jobs:
        request.getfixturevalue("volume")
        kubectl.apply(*jobs)


def inspector_pod() -> dict[str, object]:
    """A restricted pod with the volume at /volume."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": Volume.POD},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "shell",
                    "image": needed("RLJOB_E2E_OPERATOR_IMAGE"),
                    "command": ["sleep", "3600"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "work", "mountPath": "/volume"}],
                }
            ],
            "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }
