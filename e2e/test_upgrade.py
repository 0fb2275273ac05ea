"""CRD, chart and operator are upgraded and rolled back under one job, which is then suspended, resumed and deleted.

It is the job that the scenarios of security have looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from e2e.cluster.crds import RLJOB_CRD
from e2e.conftest import RIGHTS_FOR_A_WHILE
from e2e.guarded import NAME, Guarded
from e2e.installation import HELM_TIMEOUT_S, RELEASE, SYSTEM, Helm, image_values
from e2e.jobs import ROOT, two_groups
from e2e.kubectl import Kubectl
from e2e.objects import KubectlError
from e2e.test_rights import account_of_operator, installed_rights
from e2e.test_training import STARTS_S, metrics
from e2e.volumes import Volume

NOVEL = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/novel"
NEXT_IMAGE = "registry.invalid/rljob-runtime:next"
WAIT = ("--wait", f"--timeout={HELM_TIMEOUT_S}s")
CHILDREN = "rayjobs,rayclusters,pods,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,services,secrets"


@contextmanager
def newer_crd(kubectl: Kubectl) -> Iterator[None]:
    """A CRD with one field more than the operator knows, with a default; the operator's own again at the end."""
    novel = {"op": "add", "path": NOVEL, "value": {"type": "string", "default": "later"}}
    kubectl("patch", "crd", "rljobs.rljob.dev", "--type=json", "-p", json.dumps([novel]))
    try:
        yield
    finally:
        kubectl("apply", "--server-side", "--force-conflicts", "-f", str(RLJOB_CRD))


def trains_on(kubectl: Kubectl) -> None:
    """More steps, in the same objects."""
    step = kubectl.step(NAME)
    kubectl.until("more steps", lambda: kubectl.step(NAME) > step, STARTS_S, job=NAME)
    assert kubectl.condition(NAME, "Accepted")["status"] == "True", "a field of a newer CRD refuses no job"


def uids(kubectl: Kubectl) -> set[str]:
    return {o["metadata"]["uid"] for kind in ("rayjobs", "rayclusters", "pods") for o in kubectl.children(NAME, kind)}


def images(kubectl: Kubectl) -> set[str]:
    return {c["image"] for pod in kubectl.children(NAME, "pods") for c in pod["spec"]["containers"]}


def refused(kubectl: Kubectl) -> str:
    """What `kubectl apply` answers to a placement on devices that do not exist; empty where it is stored."""
    job = two_groups("refused", steps=5)
    job["spec"]["components"][0]["placement"]["ranks"] = "0-7"
    try:
        kubectl("apply", "--dry-run=server", "-f", "-", input=yaml.safe_dump(job))
    except KubectlError as error:
        return str(error)
    return ""


def test_an_upgrade_and_a_rollback_change_nothing_of_a_job_that_is_then_suspended_resumed_and_deleted(
    kubectl: Kubectl, helm: Helm, volume: Volume, guarded: Guarded, chart_values: list[str], request: pytest.FixtureRequest
) -> None:
    guarded.trains(steps=6)
    made, image = uids(kubectl), images(kubectl)
    with newer_crd(kubectl):
        trains_on(kubectl)
        newer = [*chart_values, *image_values(NEXT_IMAGE, "runtime.image"), "--set", "webhook.enabled=true,operator.logLevel=DEBUG"]
        (before,) = kubectl.items("pods", "app.kubernetes.io/name=rljob-operator", namespace=SYSTEM)
        helm("upgrade", RELEASE, str(ROOT / "helm" / "rljob"), *WAIT, *newer)
        try:
            pods = kubectl.items("pods", "app.kubernetes.io/name=rljob-operator", namespace=SYSTEM)
            assert before["metadata"]["name"] not in {p["metadata"]["name"] for p in pods if not p["metadata"].get("deletionTimestamp")}
            trains_on(kubectl)
            message = kubectl.until("the webhook behind its Service", lambda: refused(kubectl), 120)
            assert "validate.rljob.dev" in message
            assert "spec.components[0].placement.ranks" in message
            request.config.stash[RIGHTS_FOR_A_WHILE] = installed_rights(kubectl, account_of_operator(kubectl))
        finally:
            helm("rollback", RELEASE, *WAIT)
        trains_on(kubectl)
    assert refused(kubectl) == "", "the rollback removes the webhook"
    assert uids(kubectl) == made, "nothing was created and nothing deleted"

    kubectl("patch", "rljob", NAME, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    kubectl.wait(NAME, "Suspended", 180)
    kubectl.until("no pods while suspended", lambda: not kubectl.children(NAME, "pods"), 150, job=NAME)
    assert [f for f in volume.files(f"{NAME}/checkpoints") if f.endswith("COMPLETE")], "a suspension leaves a checkpoint"
    step = kubectl.step(NAME)

    kubectl("patch", "rljob", NAME, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    kubectl.wait(NAME, "Running", STARTS_S)
    kubectl.until("steps after the resumption", lambda: kubectl.step(NAME) > step, STARTS_S, job=NAME)
    steps = [m["step"] for m in metrics(volume, NAME)]
    assert steps == list(range(1, len(steps) + 1)), "the run resumes from the checkpoint"
    assert (kubectl.get("rljob", NAME)["status"]["attempt"], images(kubectl)) == (1, image)

    kubectl("delete", "rljob", NAME)
    kubectl.until("nothing left", lambda: not kubectl("get", CHILDREN, f"--selector=rljob.dev/job={NAME}", "-o", "name").strip(), 180)
