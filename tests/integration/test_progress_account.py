"""The progress policy on a real API server: what an account of the user's own may write of a job."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.cluster.errors import CommandError
from rljob_api.crd import progress_policy
from rljob_api.crd.schema import crd
from rljob_api.validation import check
from rljob_operator.desired import access
from rljob_runtime.entry.progress import STEP_MILLISECONDS
from tests.integration.kube_api import ApiServer
from tests.integration.operator_world.world import World
from tests.unit.api.manifests import manifest
from tests.unit.operator.desired import builders

POLICY, BINDING = progress_policy.manifests()


@pytest.fixture(scope="module")
def policy(api_server: ApiServer) -> Iterator[None]:
    documents = yaml.safe_dump_all([POLICY, BINDING])
    api_server.kubectl("apply", "-f", "-", input=documents)
    yield
    api_server.kubectl("delete", "-f", "-", input=documents)


@pytest.fixture
def world(api_server: ApiServer, namespace: str, policy: None) -> World:
    return World(api_server, namespace)


def answer(world: World, user: str, change: dict[str, Any]) -> str:
    """What the API server says to a status patch of a user."""
    patch = json.dumps({"status": change})
    try:
        return world.kubectl("patch", "rljob", "case", "--type=merge", "-p", patch, "--subresource=status", f"--as={user}")
    except CommandError as error:
        return str(error)


def test_an_account_of_the_users_own_changes_progress_and_nothing_else(world: World):
    document = manifest()
    document["spec"]["serviceAccount"] = {"name": "trainer"}
    world.apply(document)
    view = builders.view(builders.checked(document))
    resolved = check(document).job
    for child in (access.role(view), access.role_binding(view, resolved)):
        child["metadata"] = {"name": child["metadata"]["name"]}
        child["subjects"] = [subject | {"namespace": world.namespace} for subject in child.get("subjects", [])]
        world.apply({key: value for key, value in child.items() if value})
    # kubectl reads what it patches.
    reading = {"apiGroups": ["rljob.dev"], "resources": ["rljobs", "rljobs/status"], "verbs": ["get"]}
    world.apply({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "reader"}, "rules": [reading]})
    accounts = [f"--serviceaccount={world.namespace}:{name}" for name in ("trainer", "other")]
    world.kubectl("create", "rolebinding", "reader", "--role=reader", *accounts)
    trainer, other = (f"system:serviceaccount:{world.namespace}:{name}" for name in ("trainer", "other"))
    # A policy takes a moment to come into force; what is written until then must not be what is written next, which would change nothing.
    attempts = itertools.cycle((7, 8))
    world.until("the policy is in force", lambda: "may change status.progress only" in answer(world, trainer, {"attempt": next(attempts)}))
    assert "patched" in answer(world, trainer, {"progress": {"step": 3, "stepMilliseconds": {"step": 900, "train": 400}}})
    for change in ({"specHashes": {"model": "x"}}, {"conditions": []}, {"completionTime": "2026-01-01T00:00:00Z"}, {"image": "x"}):
        said = answer(world, trainer, change)
        assert "may change status.progress only" in said or "no change" in said, change
    assert "cannot patch resource" in answer(world, other, {"progress": {"step": 4}})
    # An operator whose account lies in the same namespace may delete jobs, and writes all of the status.
    rule = {"apiGroups": ["rljob.dev"], "resources": ["rljobs", "rljobs/status"], "verbs": ["get", "patch", "delete"]}
    world.apply({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "operator"}, "rules": [rule]})
    world.kubectl("create", "rolebinding", "operator", "--role=operator", f"--serviceaccount={world.namespace}:operator")
    operator = f"system:serviceaccount:{world.namespace}:operator"
    world.until("the operator's role is in force", lambda: "patched" in answer(world, operator, {"attempt": 7}))


def test_an_older_crd_refuses_the_whole_progress_and_names_the_field_that_it_lacks(api_server: ApiServer, namespace: str):
    """What the driver goes by when it leaves ``stepMilliseconds`` out.

    The older CRD is a kind of its own beside the session's, with names of its own: kubectl remembers kinds, also those that are gone.
    """
    older = copy.deepcopy(crd())
    older["metadata"]["name"] = "olderjobs.rljob.dev"
    older["spec"]["names"] = {"kind": "OlderJob", "listKind": "OlderJobList", "plural": "olderjobs", "singular": "olderjob"}
    progress = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["progress"]
    del progress["properties"][STEP_MILLISECONDS]
    world = World(api_server, namespace)
    try:
        api_server.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(older))
        job = manifest() | {"kind": "OlderJob"}
        world.until("the older kind is served", lambda: accepted(world, job))
        written = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": job["metadata"]}
        apply = ("apply", "--server-side", "--subresource=status", "--field-manager=rljob-runtime", "--validate=false", "-f", "-")
        with pytest.raises(CommandError, match=rf"status\.progress\.{STEP_MILLISECONDS}: field not declared in schema"):
            world.kubectl(*apply, input=json.dumps(written | {"status": {"progress": {"step": 3, STEP_MILLISECONDS: {"step": 900}}}}))
        world.kubectl(*apply, input=json.dumps(written | {"status": {"progress": {"step": 3}}}))
        assert json.loads(world.kubectl("get", "olderjobs.rljob.dev", "case", "-o", "json"))["status"]["progress"]["step"] == 3
    finally:
        api_server.kubectl("delete", "crd", "olderjobs.rljob.dev", "--ignore-not-found", "--wait=false")


def accepted(world: World, job: dict[str, Any]) -> bool:
    """Whether the API server took it; right after its kind was made it may not yet."""
    try:
        world.apply(job)
    except CommandError:
        return False
    return True
