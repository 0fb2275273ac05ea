"""One installation of the chart on a cluster, with a namespace for jobs: what `make e2e` and `bench.chaos` test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from e2e.environment import needed
from e2e.jobs import ROOT
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


def image_values(image: str, prefix: str) -> list[str]:
    """--set arguments for an image reference repository:tag."""
    repository, _, tag = image.rpartition(":")
    return ["--set", f"{prefix}.repository={repository}", "--set-string", f"{prefix}.tag={tag}"]


def installation_values() -> list[str]:
    """--set arguments for the images that the environment names."""
    return [
        *image_values(needed("RLJOB_E2E_OPERATOR_IMAGE"), "image"),
        *image_values(needed("RLJOB_E2E_RUNTIME_IMAGE"), "runtime.image"),
    ]


@contextmanager
def installed(kubectl: Kubectl, helm: Helm, values: Sequence[str]) -> Iterator[None]:
    """Install the chart, wait until the operator is ready, and remove both at the end."""
    kubectl.apply(RESTRICTED)
    chart = str(ROOT / "helm" / "rljob")
    try:
        helm("upgrade", "--install", RELEASE, chart, "--create-namespace", "--wait", f"--timeout={HELM_TIMEOUT_S}s", *values)
    except AssertionError as error:
        pods = kubectl("describe", "pods", namespace=SYSTEM)
        logs = kubectl("logs", "deployment/rljob-operator", "--tail=50", namespace=SYSTEM)
        raise AssertionError(f"{error}\n{pods[-4000:]}\n{logs}") from None
    try:
        yield
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=true", "--timeout=180s", timeout_s=210)
        if "RLJOB_E2E_KEEP" not in os.environ:
            helm("uninstall", RELEASE, "--wait")
            kinds = "deployments,services,serviceaccounts,networkpolicies,clusterroles,clusterrolebindings,validatingadmissionpolicies"
            left = kubectl("get", kinds, f"--selector=app.kubernetes.io/instance={RELEASE}", "-o", "name", namespace=SYSTEM)
            assert not left.strip(), f"helm uninstall left {left}"
            assert kubectl("get", "crd", "rljobs.rljob.dev", "-o", "name").strip(), "the CRD, and with it every job, outlives the chart"
