"""The reconciler against a strict API server: it dies at every write, the cache lags, requests fail, names are taken."""

import asyncio
import gc
from typing import Any

import pytest

from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_operator.cache import Source
from rljob_operator.errors import ConflictError, KubeError, RejectedError, UnavailableError
from rljob_operator.protocol import WATCHED, Kind
from tests.unit.operator.shell.world import KEY, World, rljob

RETRYING = {"maxRestarts": 3}


def _fails_once(attempt: int) -> str:
    return "FAILED" if attempt == 1 else "SUCCEEDED"


SCENARIOS: dict[str, tuple[dict[str, Any], Any]] = {
    "succeeds": ({}, lambda attempt: "SUCCEEDED"),
    "fails permanently": ({"failurePolicy": {"maxRestarts": 0}}, lambda attempt: "FAILED"),
    "fails, restarts, succeeds": ({"failurePolicy": RETRYING}, _fails_once),
    "succeeds and is deleted": ({"ttlSecondsAfterFinished": 60}, lambda attempt: "SUCCEEDED"),
    "is rejected": ({"model": {"path": "models/tiny", "dtype": "float32"}, "components": []}, lambda attempt: "SUCCEEDED"),
}


async def _live(name: str, die_after_write: int | None = None) -> World:
    spec, outcome = SCENARIOS[name]
    world = World(outcome)
    world.kube.add(rljob(**spec))
    world.kube.die_after_write = die_after_write
    await world.settle()
    return world


def test_a_job_runs_to_its_end_with_few_writes():
    world = asyncio.run(_live("succeeds"))
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.created(Kind.RAYJOB) == ["math-a1"]
    writes = [write for write in world.kube.writes if not write.startswith("create Event")]
    assert len([write for write in writes if write.startswith("apply_status")]) <= 5, writes
    assert not world.errors


def test_the_rayjob_is_made_last():
    world = asyncio.run(_live("succeeds"))
    creates = [write for write in world.kube.writes if write.startswith("create ") and "Event" not in write]
    assert creates[-1] == "create RayJob math-a1"
    assert len(creates) == 5


def test_a_failed_attempt_is_followed_by_the_next():
    world = asyncio.run(_live("fails, restarts, succeeds"))
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a2"]
    assert world.most_live == 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_that_dies_after_any_write_ends_in_the_same_state(name):
    whole = asyncio.run(_live(name))
    assert whole.kube.writes
    for number in range(1, len(whole.kube.writes) + 1):
        world = asyncio.run(_live(name, die_after_write=number))
        where = f"died after write {number}: {whole.kube.writes[number - 1]}"
        assert world.end_state() == whole.end_state(), where
        assert world.created(Kind.RAYJOB) == whole.created(Kind.RAYJOB), where
        assert world.most_live <= 1, where


@pytest.mark.parametrize("name", SCENARIOS)
def test_looking_again_writes_nothing(name):
    async def scenario() -> tuple[list[str], list[str]]:
        world = await _live(name)
        before = list(world.kube.writes)
        world.is_booted = False
        await world.settle()
        return before, world.kube.writes

    before, after = asyncio.run(scenario())
    assert before == after


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cache_that_lags_makes_no_second_rayjob(name):
    """Watch events arrive only when the operator has nothing else to do."""

    async def scenario() -> World:
        spec, outcome = SCENARIOS[name]
        world = World(outcome)
        world.kube.add(rljob(**spec))
        await world.settle(slow_watch=True)
        return world

    world = asyncio.run(scenario())
    whole = asyncio.run(_live(name))
    assert world.created(Kind.RAYJOB) == whole.created(Kind.RAYJOB)
    assert world.end_state() == whole.end_state()


def test_a_rayjob_that_no_watch_delivered_is_not_taken_for_deleted():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob())
        await world.settle()
        assert world.condition("Running")[0] == "True"
        world.kube.is_listed = lambda kind, name: kind is not Kind.RAYJOB  # lists from a cache of the API server that lags
        await world.boot()
        assert world.cache.children(KEY) == ()
        await world.work()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Running")[0] == "True"
    assert world.kube.reads[-1] == "get RayJob math-a1"
    assert world.created(Kind.RAYJOB) == ["math-a1"]


def test_a_deleted_rayjob_is_recorded_and_followed_by_the_next():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob(failurePolicy=RETRYING))
        await world.settle()
        world.kube.remove(Kind.RAYJOB, "team", "math-a1")
        await world.settle(hours=1)
        return world

    world = asyncio.run(scenario())
    assert world.status()["attempt"] == 2
    assert world.status()["lastFailure"]["reason"] == "ChildDeleted"
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a2"]


def test_a_deletion_that_no_watch_delivered_is_found_by_a_resync():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob(failurePolicy=RETRYING))
        await world.settle()
        world.kube.lose = lambda type_, kind, obj: type_ == "DELETED"
        world.kube.remove(Kind.RAYJOB, "team", "math-a1")
        await world.settle(hours=0.1)
        assert world.status()["attempt"] == 1
        await world.resync.compare(WATCHED, Source.OTHER)
        await world.settle(hours=1)
        return world

    world = asyncio.run(scenario())
    assert world.status()["lastFailure"]["reason"] == "ChildDeleted"
    assert world.status()["attempt"] == 2


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("x", 429, "too many requests", 1.0),
        UnavailableError("x", 500, "etcd leader changed"),
        UnavailableError("x", 0, "no connection"),
        ConflictError("x", 409, "the object has been modified"),
    ],
    ids=["429", "500", "no answer", "409"],
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_transient_request_failures_do_not_change_the_outcome(name, error):
    async def scenario() -> World:
        spec, outcome = SCENARIOS[name]
        world = World(outcome)
        world.kube.add(rljob(**spec))
        seen: set[tuple[str, str]] = set()

        def fault(verb: str, kind: Kind, what: str) -> KubeError | None:
            """The first request of each kind fails; events are best effort and excluded."""
            request = (verb, str(kind))
            if request in seen or kind is Kind.EVENT or verb == "list":
                return None
            seen.add(request)
            return error

        world.kube.fault = fault
        await world.settle()
        assert world.errors
        return world

    world, whole = asyncio.run(scenario()), asyncio.run(_live(name))
    assert world.created(Kind.RAYJOB) == whole.created(Kind.RAYJOB)
    left, right = world.end_state(), whole.end_state()
    assert left.keys() == right.keys()
    if "RLJob math" in right:
        assert world.condition("Succeeded") == whole.condition("Succeeded")
    assert world.most_live <= 1


def test_a_foreign_rayjob_is_named_and_left_alone():
    async def scenario() -> World:
        world = World()
        world.kube.add(
            {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "math-a1", "namespace": "team"}, "spec": {"a": 1}}
        )
        world.kuberay.step = lambda: False  # type: ignore[method-assign]
        world.kube.add(rljob())
        await world.settle(hours=0.01)
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("Unknown", "ChildNameTaken")
    assert world.kube.one(Kind.RAYJOB, "math-a1")["spec"] == {"a": 1}
    message = next(c["message"] for c in world.status()["conditions"] if c["type"] == "Succeeded")
    assert "RayJob math-a1 already exists and is not owned by this RLJob" in message


def test_what_an_earlier_job_of_the_name_leaves_is_waited_for():
    """Deleted and applied again: KubeRay's finalizer keeps the old RayJob for a while."""

    async def scenario() -> World:
        world = World()
        metadata = {"name": "math-a1", "namespace": "team", "finalizers": ["ray.io/rayjob-finalizer"]}
        world.kube.add({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": {}})
        world.kube.remove(Kind.RAYJOB, "team", "math-a1")
        step, world.kuberay.step = world.kuberay.step, lambda: False  # type: ignore[method-assign]
        world.kube.add(rljob())
        await world.settle(hours=0.0)
        (succeeded,) = [c for c in world.status()["conditions"] if c["type"] == "Succeeded"]
        assert succeeded["reason"] == "Starting"
        assert succeeded["message"] == "Attempt 1 starts once RayJob math-a1 of an earlier RLJob of this name is gone."
        world.kuberay.step = step  # type: ignore[method-assign]
        world.kube.finish_deletions()
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")


def test_a_foreign_service_account_is_named_and_no_rayjob_is_made():
    async def scenario() -> World:
        world = World()
        world.kube.add({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "math-rljob", "namespace": "team"}})
        world.kube.add(rljob())
        await world.settle(hours=0.01)
        assert world.condition("Succeeded") == ("Unknown", "ChildNameTaken")
        assert world.created(Kind.RAYJOB) == []
        world.kube.remove(Kind.SERVICE_ACCOUNT, "team", "math-rljob")
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")


def test_a_rejected_rayjob_is_reported_and_retried():
    async def scenario() -> World:
        world = World()
        world.kube.add(rljob())
        rejection = RejectedError("create RayJob math-a1", 403, "exceeded quota: gpus")
        world.kube.fault = lambda verb, kind, name: rejection if (verb, kind) == ("create", Kind.RAYJOB) else None
        await world.settle(hours=0.01)
        message = next(c["message"] for c in world.status()["conditions"] if c["type"] == "Succeeded")
        assert world.condition("Succeeded") == ("Unknown", "ChildRejected")
        assert "exceeded quota: gpus" in message
        world.kube.fault = lambda verb, kind, name: None
        await world.settle()
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("True", "Completed")


def test_a_server_error_on_a_rayjob_is_reported_until_it_is_made():
    async def scenario() -> World:
        world = World()
        world.kube.add(rljob())
        broken = UnavailableError("create RayJob math-a1", 500, 'failed calling webhook "mrayjob.kb.io": connection refused')
        world.kube.fault = lambda verb, kind, name: broken if (verb, kind) == ("create", Kind.RAYJOB) else None
        await world.settle(until=lambda: len(world.errors) > 3)
        assert world.condition("Running") == ("False", "ApiUnavailable")
        assert sum(write.startswith("apply_status") for write in world.kube.writes) == 1, "said once"
        message = next(c["message"] for c in world.status()["conditions"] if c["type"] == "Running")
        assert "connection refused" in message
        world.kube.fault = lambda verb, kind, name: None
        await world.settle()
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("True", "Completed")


def _head_is_deleted(world: World) -> None:
    """As a drain does it: the pod goes once its grace period is over."""
    name = next(n for n in world.kube.names(Kind.POD) if n.endswith("headgroup"))
    world.kube.edit(Kind.POD, "team", name, {"metadata": {"deletionTimestamp": "2026-01-01T01:00:00Z"}})


def test_a_drained_head_restarts_a_job_that_allows_no_restart():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING" if attempt == 1 else "SUCCEEDED")
        world.kube.add(rljob())
        await world.settle()
        _head_is_deleted(world)
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert (world.status()["attempt"], world.status()["disruptions"]) == (2, 1)


def test_a_rayjob_that_is_gone_at_once_is_followed_by_the_next_attempt():
    """KubeRay has not put its finalizer on it, or is gone: the answer to the deletion is all that is heard of it."""

    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING" if attempt == 1 else "SUCCEEDED")
        world.kube.add(rljob())
        await world.settle()
        _head_is_deleted(world)
        await world.settle(until=lambda: "lastFailure" in world.status())
        for kind in (Kind.POD, Kind.RAYCLUSTER):
            for name in world.kube.names(kind):
                world.kube.remove(kind, "team", name)
        world.kube.edit(Kind.RAYJOB, "team", "math-a1", {"metadata": {"finalizers": None}})
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a2"]
    assert world.condition("Succeeded") == ("True", "Completed")


def test_the_head_of_a_job_that_has_ended_is_not_evicted_however_late_the_end_is_known():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob())
        await world.settle()
        world.kube.lose = lambda type_, kind, obj: kind is Kind.RAYJOB
        world.kube.set_status(Kind.RAYJOB, "team", "math-a1", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        _head_is_deleted(world)
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert "disruptions" not in world.status()


def test_all_attempts_run_the_image_of_the_first():
    async def scenario() -> World:
        world = World(lambda attempt: "FAILED" if attempt == 1 else "SUCCEEDED")
        world.kube.add(rljob(failurePolicy=RETRYING))
        await world.settle(until=lambda: world.kube.names(Kind.RAYJOB) != [] and world.status().get("image") is not None)
        world.upgrade("registry.example/rljob-runtime:2", "3.0.0")
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a2"]
    assert (world.status()["image"], world.status()["rayVersion"]) == ("registry.example/rljob-runtime:1", "2.60.0")
    containers = world.kube.one(Kind.RAYJOB, "math-a2")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert containers[0]["image"] == "registry.example/rljob-runtime:1"


def test_a_queued_job_is_suspended_by_ending_its_rayjob_and_goes_on_with_the_same_attempt():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob(queue={"name": "team"}))
        await world.settle()
        world.kube.edit(Kind.RAYJOB, "team", "math-a1", {"spec": {"suspend": False}})  # Kueue admits it
        await world.settle()
        assert world.condition("Running")[0] == "True"
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": True}})
        await world.settle()
        assert world.kube.names(Kind.RAYJOB) == []
        assert world.condition("Suspended") == ("True", "Suspended")
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": False}})
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a1"]
    assert world.condition("Suspended") == ("True", "Queued")
    assert "lastFailure" not in world.status()


CHANGES: dict[Kind, dict[str, Any]] = {
    Kind.SERVICE_ACCOUNT: {"automountServiceAccountToken": True},
    Kind.ROLE: {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]},
    Kind.ROLE_BINDING: {"subjects": []},
    Kind.NETWORK_POLICY: {"spec": {"ingress": [{}]}},
    Kind.DISRUPTION_BUDGET: {"spec": {"minAvailable": 0}},
}


async def _changed_before_the_rayjob(kind: Kind, name: str, change: dict[str, Any]) -> tuple[World, dict[str, Any]]:
    """A world where an object was modified before its attempt was complete, and the object as it was created."""
    world = World()
    world.kube.add(rljob(refuseEvictions=True))
    rejection = RejectedError("create RayJob math-a1", 403, "exceeded quota: gpus")
    world.kube.fault = lambda verb, kind, name: rejection if (verb, kind) == ("create", Kind.RAYJOB) else None
    await world.settle(hours=0.01)
    made = world.kube.one(kind, name)
    assert world.kube.edit(kind, "team", name, change) != made
    world.kube.fault = lambda verb, kind, name: None
    await world.settle()
    assert world.condition("Succeeded") == ("True", "Completed")
    return world, made


@pytest.mark.parametrize(("kind", "change"), CHANGES.items())
def test_modified_shared_objects_are_restored_by_the_next_try(kind: Kind, change: dict[str, Any]):
    world, made = asyncio.run(_changed_before_the_rayjob(kind, "math-rljob", change))
    stored = world.kube.one(kind, "math-rljob")
    for field in change:
        assert stored[field] == made[field]
    assert [write for write in world.kube.writes if write.startswith("patch ")] == [f"patch {kind} math-rljob"]


def test_suspend_and_resume():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob())
        await world.settle()
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": True}})
        await world.settle()
        assert world.condition("Suspended") == ("True", "Suspended")
        assert world.kube.names(Kind.POD) == []
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": False}})
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Running")[0] == "True"
    assert world.created(Kind.RAYJOB) == ["math-a1"]


def test_progress_of_the_job_survives_the_operators_writes():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob())
        await world.settle()
        progress = {"attempt": 1, "step": 7, "totalSteps": 200}
        manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "math", "namespace": "team"}}
        world.kube.apply_status_as("rljob-runtime", {**manifest, "status": {"progress": progress}})
        before = len(world.kube.writes)
        await world.settle()
        assert len(world.kube.writes) == before, "progress alone is no reason to write"
        world.kuberay.outcome = lambda attempt: "SUCCEEDED"
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.status()["progress"] == {"attempt": 1, "step": 7, "totalSteps": 200}
    assert world.condition("Succeeded") == ("True", "Completed")


def test_events_that_cannot_be_written_are_counted_and_change_nothing():
    async def scenario() -> World:
        world = World()
        world.kube.add(rljob())
        rejection = RejectedError("create Event", 403, "no")
        world.kube.fault = lambda verb, kind, name: rejection if kind is Kind.EVENT else None
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.metrics.registry.get_sample_value("rljob_operator_events_lost_total", {"error": "RejectedError"})


def test_nothing_of_a_deleted_job_is_kept():
    def specs() -> int:
        gc.collect()
        return sum(type(each) is RLJobSpec for each in gc.get_objects())

    before = specs()
    kept = [asyncio.run(_live("succeeds")), asyncio.run(_live("succeeds and is deleted"))]
    assert specs() - before == 1, "what was found of a spec is kept as long as its job is there"
    assert [world.kube.names(Kind.RLJOB) for world in kept] == [["math"], []]


def test_a_deleted_job_is_left_to_the_garbage_collector():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob())
        await world.settle()
        before = len(world.kube.writes)
        world.kube.remove(Kind.RLJOB, "team", "math")
        await world.settle()
        assert len(world.kube.writes) == before
        return world

    world = asyncio.run(scenario())
    assert [where for where in world.kube.objects if where[0] is not Kind.EVENT] == []
    assert world.cache.keys() == []
