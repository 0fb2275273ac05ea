"""The validating webhook behind a real API server: up, down, and with jobs that were stored while it was away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.crds import RLJOB_CRD
from e2e.cluster.errors import CommandError
from tests.integration.kube_api import ApiServer
from tests.integration.operator_world.process import OperatorProcess
from tests.integration.operator_world.world import ROOT, World
from tests.support.invalid_manifests import named

# Passes the schema; only the planner sees that a device does not exist.
BAD: dict[str, Any] = yaml.safe_load(named("mapping-beyond").manifest())


@pytest.fixture
def world(api_server: ApiServer, namespace: str) -> World:
    return World(api_server, namespace)


@pytest.fixture
def operator(api_server: ApiServer, world: World, tmp_path: Path) -> Iterator[OperatorProcess]:
    """With a configuration as the chart's, but for the address: the API server of the tests has no pod network."""
    service = f"{world.namespace}/hook"
    process = OperatorProcess(api_server.kubeconfig, tmp_path / "operator.log", namespaces=world.namespace, webhook=service)
    rendered = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"{world.namespace}-hook"},
        "webhooks": [
            {
                "name": "validate.rljob.dev",
                "admissionReviewVersions": ["v1"],
                "failurePolicy": "Ignore",
                "sideEffects": "None",
                "timeoutSeconds": 3,
                "clientConfig": {"url": f"https://127.0.0.1:{process.webhook_port}/validate"},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}},
                "rules": [
                    {"apiGroups": ["rljob.dev"], "apiVersions": ["v1alpha1"], "operations": ["CREATE", "UPDATE"], "resources": ["rljobs"]}
                ],
            }
        ],
    }
    world.apply(rendered)
    yield process
    process.kill()
    world.kubectl("delete", "validatingwebhookconfiguration", f"{world.namespace}-hook")


def bad(name: str) -> dict[str, Any]:
    return {**BAD, "metadata": {"name": name}}


def answers(world: World) -> bool:
    """Whether the API server asks the webhook and trusts it: it caches configurations for a moment."""
    try:
        world.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(bad("probe")))
    except CommandError as error:
        return "validate.rljob.dev" in str(error)
    return False


def test_problems_are_reported_at_apply_and_never_stand_in_the_way_of_an_operator_that_is_away(world: World, operator: OperatorProcess):
    world.apply(bad("stored"))  # nobody listens
    operator.start()
    world.until_condition("stored", "Accepted", "False/SpecInvalid")
    world.until("the webhook answers", lambda: answers(world))

    with pytest.raises(CommandError) as refused:
        world.apply(bad("refused"))
    assert world.message("stored", "Accepted") in str(refused.value), "the same words as the condition's"
    assert world.get("rljob", "refused") is None

    with pytest.raises(CommandError, match=r"spec\.storage is not set"):
        world.kubectl("create", "--warnings-as-errors", "-f", str(ROOT / "examples" / "quickstart.yaml"))
    world.until_child("quickstart-a1")  # a warning only

    world.kubectl("label", "rljob", "stored", "team=rl")
    world.patch("rljob", "stored", {"spec": {"suspend": True}})
    world.kubectl("delete", "rljob", "stored")

    operator.kill()
    world.apply(bad("unchecked"))
    operator.start()
    world.until_condition("unchecked", "Accepted", "False/SpecInvalid")
    world.until("the webhook answers again, with the certificate of the Secret", lambda: answers(world))
    assert operator.stop() == 0


def crd_spec(world: World, *change: dict[str, Any]) -> None:
    """Change the CRD's fields of ``spec`` by JSON patch; paths are below its properties."""
    base = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"
    patch = json.dumps([{**one, "path": f"{base}/{one['path']}"} for one in change])
    world.kubectl("patch", "crd", "rljobs.rljob.dev", "--type=json", "-p", patch)


def test_a_newer_crd_refuses_no_job_and_an_older_one_is_reported(world: World, operator: OperatorProcess):
    """As after an upgrade of the CRD alone, and after an upgrade of the operator alone."""
    world.job("before", suspend=True)
    operator.start()
    world.until_condition("before", "Accepted", "True/SpecValid")
    world.until("the webhook answers", lambda: answers(world))
    removed = {"op": "remove", "path": "refuseEvictions"}
    crd_spec(world, {"op": "add", "path": "novel", "value": {"type": "string", "default": "a"}}, removed)
    try:
        world.until("unknown fields in the log", lambda: "which does not know spec.novel" in operator.log_file.read_text())
        world.until("missing fields in the log", lambda: "stored without spec.refuseEvictions" in operator.log_file.read_text())
        world.job("after", suspend=True)
        world.until_condition("after", "Accepted", "True/SpecValid")
        stored = world.get("rljob", "after")
        assert stored is not None
        assert stored["spec"]["novel"] == "a"
        world.patch("rljob", "before", {"spec": {"suspend": False}})
        world.until_child("before-a1")
        world.until_condition("before", "Accepted", "True/SpecValid")
        with pytest.raises(CommandError, match=r"spec\.novel"):
            world.job("chosen", novel="b")
    finally:
        world.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(RLJOB_CRD))
    world.until("the operator noticed that the CRD is its own", lambda: "is this operator's again" in operator.log_file.read_text())
    world.until_condition("before", "Accepted", "True/SpecValid")
    assert operator.stop() == 0
