"""The chart through helm: its own test, upgrade and rollback."""

from __future__ import annotations

from e2e.conftest import HELM_TIMEOUT_S, RELEASE, SYSTEM, Helm
from e2e.jobs import ROOT
from e2e.kubectl import Kubectl


def log_level(kubectl: Kubectl) -> str:
    (deployment,) = kubectl.list("deployments", "app.kubernetes.io/name=rljob-operator", namespace=SYSTEM)
    assert deployment["status"].get("readyReplicas") == 1
    env = {e["name"]: e.get("value") for e in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    return str(env["RLJOB_OPERATOR_LOG_LEVEL"])


def test_the_charts_own_test_passes(helm: Helm):
    assert "Succeeded" in helm("test", RELEASE, "--timeout=120s")


def test_upgrade_and_rollback(helm: Helm, kubectl: Kubectl, chart_values: list[str]):
    before = log_level(kubectl)
    wait = ("--wait", f"--timeout={HELM_TIMEOUT_S}s")
    helm("upgrade", RELEASE, str(ROOT / "helm" / "rljob"), *wait, *chart_values, "--set", "operator.logLevel=DEBUG")
    assert log_level(kubectl) == "DEBUG" != before
    helm("rollback", RELEASE, *wait)
    assert log_level(kubectl) == before
