"""The operator dies, the API server refuses, watches break: afterwards everything is as if nothing had happened."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from e2e.cluster import build
from e2e.cluster.errors import CommandError
from tests.integration.kube_api import ApiServer
from tests.integration.operator_world import webhooks
from tests.integration.operator_world.faulty_proxy import FaultyProxy, refusal
from tests.integration.operator_world.process import OperatorProcess
from tests.integration.operator_world.world import SUCCEEDED, World


@pytest.fixture
def world(api_server: ApiServer, namespace: str) -> World:
    return World(api_server, namespace)


@pytest.fixture
def proxy(api_server: ApiServer, tmp_path: Path) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(str(build.binary("kubectl")), api_server.kubeconfig, tmp_path)
    yield proxy
    proxy.stop()


@pytest.fixture
def operator(proxy: FaultyProxy, world: World, tmp_path: Path) -> Iterator[OperatorProcess]:
    process = OperatorProcess(proxy.kubeconfig, tmp_path / "operator.log", namespaces=world.namespace)
    yield process
    process.kill()


def children(world: World, job: str) -> list[str]:
    kinds = "rayjobs,serviceaccounts,roles,rolebindings,networkpolicies"
    return sorted(f"{o['kind']}/{o['metadata']['name']}" for o in world.list(kinds, job))


ALL_CHILDREN = [
    "NetworkPolicy/{0}-rljob", "RayJob/{0}-a1", "Role/{0}-rljob", "RoleBinding/{0}-rljob", "ServiceAccount/{0}-rljob",
]  # fmt: skip


def test_killed_and_restarted_at_every_stage(world: World, operator: OperatorProcess):
    operator.start()
    world.job("steady")
    child = world.until_child("steady-a1")
    operator.kill()
    operator.start()
    world.runs("steady-a1")
    world.until_condition("steady", "Running", "True/Running")
    operator.kill()
    world.rayjob_status("steady-a1", **SUCCEEDED)
    operator.start()
    world.until_condition("steady", "Succeeded", "True/Completed")
    assert children(world, "steady") == [c.format("steady") for c in ALL_CHILDREN]
    assert world.get("rayjob", "steady-a1")["metadata"]["uid"] == child["metadata"]["uid"]
    assert operator.stop() == 0


def test_jobs_made_while_the_operator_was_away_are_found(world: World, operator: OperatorProcess):
    world.job("early")
    operator.start()
    world.until_child("early-a1")
    assert children(world, "early") == [c.format("early") for c in ALL_CHILDREN]


def test_a_rayjob_whose_label_is_removed_goes_on_and_gets_it_back(world: World, operator: OperatorProcess):
    operator.start()
    world.job("unlabeled")
    world.runs("unlabeled-a1")
    world.until_condition("unlabeled", "Running", "True/Running")
    world.kubectl("label", "rayjob", "unlabeled-a1", "rljob.dev/job-")
    world.until("the label is back", lambda: world.list("rayjobs", "unlabeled"))
    world.rayjob_status("unlabeled-a1", **SUCCEEDED)
    world.until_condition("unlabeled", "Succeeded", "True/Completed")
    assert "lastFailure" not in world.status("unlabeled")
    reasons = world.kubectl("get", "events", "--field-selector=involvedObject.name=unlabeled", "-o", "jsonpath={.items[*].reason}")
    assert "LabelsRestored" in reasons.split()


def test_watches_that_are_cut_are_taken_up_again(world: World, operator: OperatorProcess, proxy: FaultyProxy):
    operator.start()
    world.job("cut")
    world.runs("cut-a1")
    world.until_condition("cut", "Running", "True/Running")
    assert proxy.cut_watches() >= 3
    world.rayjob_status("cut-a1", **SUCCEEDED)
    world.until_condition("cut", "Succeeded", "True/Completed")


@pytest.mark.parametrize(
    ("status", "reason"), [(409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable")]
)
def test_answers_that_mean_try_again(world: World, operator: OperatorProcess, proxy: FaultyProxy, status: int, reason: str):
    """Every third write is refused, over the whole life of a job. It may take several tries, but never forgets what is done already."""
    writes = itertools.count(1)

    def every_third_write(method: str, path: str) -> web.Response | None:
        if method == "GET" or next(writes) % 3:
            return None
        return refusal(status, reason, retry_after_s=1 if status == 429 else None)

    proxy.rule = every_third_write
    operator.start()
    name = f"refused-{status}"
    world.job(name)
    world.runs(f"{name}-a1", f"c{status}")
    world.rayjob_status(f"{name}-a1", **SUCCEEDED)
    world.until_condition(name, "Succeeded", "True/Completed")
    assert children(world, name) == [c.format(name) for c in ALL_CHILDREN]
    assert proxy.injected[status] >= 3


def test_a_deletion_that_no_watch_delivers_is_found_at_once(world: World, operator: OperatorProcess, proxy: FaultyProxy):
    """Every watch answers 410 Gone from now on: the lists after it show what is there, not what is gone."""
    operator.start()
    world.job("gone")
    world.runs("gone-a1")
    world.until_condition("gone", "Running", "True/Running")
    proxy.watch_error = 410
    proxy.cut_watches()
    world.until("the watches began again", lambda: proxy.injected[410] >= 4)
    began_s, lists = time.monotonic(), proxy.lists["rayjobs"]
    world.kubectl("delete", "rayjob", "gone-a1")
    world.until("the deletion is found", lambda: world.status("gone").get("lastFailure", {}).get("reason") == "ChildDeleted", 60)
    seconds = time.monotonic() - began_s
    print(f"found after {seconds:.1f} s with {proxy.lists['rayjobs'] - lists} lists of RayJobs")
    assert proxy.lists["rayjobs"] - lists <= 2 * seconds + 4, "a hot loop of lists"
    proxy.watch_error = None
    world.job("later")
    world.until_child("later-a1")


def test_a_watch_error_that_is_not_survived_ends_the_process_and_the_next_one_goes_on(
    world: World, operator: OperatorProcess, proxy: FaultyProxy
):
    operator.start()
    proxy.watch_error = 500
    proxy.cut_watches()
    world.until("the operator ends", lambda: operator.exit_code() is not None)
    assert operator.exit_code() != 0
    operator.kill()
    proxy.watch_error = None
    operator.start()
    world.job("again")
    world.until_child("again-a1")


def test_a_slow_api_server_only_takes_longer(world: World, operator: OperatorProcess, proxy: FaultyProxy):
    operator.start()
    proxy.delay_s = 1.5
    world.job("slow")
    world.runs("slow-a1")
    world.rayjob_status("slow-a1", **SUCCEEDED)
    world.until_condition("slow", "Succeeded", "True/Completed")
    assert children(world, "slow") == [c.format("slow") for c in ALL_CHILDREN]


def test_an_api_server_that_is_away_for_a_while(world: World, operator: OperatorProcess, proxy: FaultyProxy):
    operator.start()
    world.job("before")
    world.until_child("before-a1")
    refused: Counter[tuple[str, str]] = Counter()

    def away(method: str, path: str) -> web.Response:
        refused[method, path] += 1
        return refusal(503, "ServiceUnavailable")

    began_s = time.monotonic()
    proxy.rule = away
    proxy.cut_watches()
    world.job("during")
    world.until("the operator noticed", lambda: refused.total() >= 20)
    (request, times), seconds = refused.most_common(1)[0], time.monotonic() - began_s
    assert times <= 2 * seconds + 4, f"a hot loop of {request}"  # of each: jobs of other tests have requests of their own
    proxy.rule = lambda method, path: None
    child = world.until("RayJob during-a1", lambda: world.get("rayjob", "during-a1"), 60)
    assert child["metadata"]["labels"]["rljob.dev/attempt"] == "1"


@pytest.fixture
def dead_hook(world: World) -> Iterator[str]:
    """The name of a webhook of RayJobs that nobody answers for, and that nothing can be stored without."""
    name = f"{world.namespace}-dead"
    world.apply(webhooks.configuration(name, world.namespace, webhooks.dead_port(), "rayjobs", policy="Fail"))
    yield f"{name}.example.com"
    world.kubectl("delete", "validatingwebhookconfiguration", name, "--ignore-not-found")


def is_asked(world: World, hook: str, rayjob: str) -> bool:
    """Whether the API server asks a webhook: it caches configurations for a moment."""
    try:
        world.kubectl("label", "rayjob", rayjob, "probe=1", "--overwrite", "--dry-run=server")
    except CommandError as error:
        return hook in str(error)
    return False


def test_a_webhook_of_others_that_is_down_is_named_and_what_it_held_up_is_done_afterwards(
    world: World, operator: OperatorProcess, request: pytest.FixtureRequest
):
    operator.start()
    world.job("held")
    world.runs("held-a1")
    world.until_condition("held", "Running", "True/Running")
    hook = request.getfixturevalue("dead_hook")
    world.until("the webhook is asked", lambda: is_asked(world, hook, "held-a1"))
    world.job("new")
    world.patch("rljob", "held", {"spec": {"suspend": True}})
    world.until_condition("new", "Running", "False/ApiUnavailable")
    assert hook in world.message("new", "Running")
    world.until_condition("held", "Suspended", "False/Suspended")
    assert "still holds nodes" in world.message("held", "Running")
    assert hook in world.message("held", "Running")
    world.kubectl("delete", "validatingwebhookconfiguration", hook.removesuffix(".example.com"))
    world.until_child("new-a1")
    world.until("the RayJob is suspended", lambda: (world.get("rayjob", "held-a1") or {}).get("spec", {}).get("suspend"))
    world.until("the refusal is gone from the message", lambda: hook not in world.message("held", "Running"))


def test_a_repair_that_the_api_server_refuses_is_in_the_status_with_its_words(world: World, operator: OperatorProcess):
    """The role of a binding cannot change: one that somebody created again with another role cannot be repaired by a patch."""
    operator.start()
    world.job("bound", failurePolicy={"maxRestarts": 1, "restartBackoffSeconds": 1})
    world.runs("bound-a1")
    world.until_condition("bound", "Running", "True/Running")
    binding = world.get("rolebinding", "bound-rljob")
    assert binding is not None
    world.kubectl("delete", "rolebinding", "bound-rljob")
    kept = {key: binding["metadata"][key] for key in ("name", "labels", "ownerReferences")}
    world.apply({**binding, "metadata": kept, "roleRef": {**binding["roleRef"], "name": "another"}})
    world.rayjob_status("bound-a1", jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed", message="step 7")
    world.pods_gone("c1-head", "c1-w0")
    world.until_condition("bound", "Accepted", "False/ChildRejected")
    assert "RoleBinding bound-rljob exists and cannot be brought up to date" in world.message("bound", "Accepted")
    assert "cannot change roleRef" in world.message("bound", "Accepted")
    assert world.get("rayjob", "bound-a2") is None
    world.kubectl("delete", "rolebinding", "bound-rljob")
    world.patch("rljob", "bound", {"spec": {"ttlSecondsAfterFinished": 3600}})  # sooner than the retry after a minute
    world.until_child("bound-a2")
    assert (world.get("rolebinding", "bound-rljob") or {})["roleRef"] == binding["roleRef"]
