"""Kueue, the real one: quota, preemption and suspension of jobs that it admits. No step is lost, and operator and Kueue do not fight.

The urgent job that preempts the other one is an agentic job, whose episodes test_agents.py looks at.

The namespace has a LocalQueue called ``default``: Kueue gives every RayJob there a queue, whether the RLJob names one or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.cluster.kueue import MANAGED
from e2e.installation import RESTRICTED
from e2e.jobs import DEVICE, Manifest, lake, unhurried
from e2e.kubectl import Kubectl
from e2e.test_training import STARTS_S, metrics
from e2e.volumes import Volume

NAMESPACE = "rljob-e2e-queues"
QUEUES = "kueue.x-k8s.io/v1beta2"
URGENT = "urgent"
STEPS, TURNS = 4, 3
"""Of the urgent job: training steps, and turns of an episode at most."""
MAX_SPEC_CHANGES = 12
"""Of a RayJob that is admitted, preempted and admitted again; controllers that undo each other's changes make hundreds a minute."""
SUSPENDS_S = 180.0
URGENT_ENDS_S = 600.0
NOTE_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the scenario leaves."""

    status: Manifest
    """Of the job that was preempted and suspended."""
    steps: list[int]
    """That it trained, in their order."""
    volume: Volume
    """In the namespace with the queue, with the run folders of both jobs."""


def managed_namespace(name: str) -> Manifest:
    """One whose jobs Kueue manages."""
    labels = {**RESTRICTED["metadata"]["labels"], **MANAGED}
    return {**RESTRICTED, "metadata": {**RESTRICTED["metadata"], "name": name, "labels": labels}}


def objects() -> list[Manifest]:
    """A namespace, and quota for one job of two devices, where a job of higher priority preempts."""
    quotas = [{"name": name, "nominalQuota": quota} for name, quota in (("cpu", "64"), ("memory", "256Gi"), (DEVICE, "2"))]
    group = {"coveredResources": [q["name"] for q in quotas], "flavors": [{"name": "default", "resources": quotas}]}
    return [
        managed_namespace(NAMESPACE),
        {"apiVersion": QUEUES, "kind": "ResourceFlavor", "metadata": {"name": "default"}},
        {
            "apiVersion": QUEUES,
            "kind": "ClusterQueue",
            "metadata": {"name": "research"},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [group],
            },
        },
        {"apiVersion": QUEUES, "kind": "WorkloadPriorityClass", "metadata": {"name": URGENT}, "value": 1000},
    ]


@contextmanager
def namespace_with_a_queue(kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace with a queue; both are removed while Kueue, whose webhooks that needs, still runs.

    That is after all scenarios: pods of the last job need their grace period to end, half a minute in which others run.
    """
    made = objects()
    kubectl.until("Kueue's webhooks answer", lambda: kubectl.accepts(made[1]), 30)
    kubectl.apply(*made)
    inside = Kubectl(kubectl.binary, kubectl.kubeconfig, NAMESPACE)
    queue = {"apiVersion": QUEUES, "kind": "LocalQueue", "metadata": {"name": "default"}, "spec": {"clusterQueue": "research"}}
    inside.apply(queue)
    yield inside
    kubectl("delete", "namespace", NAMESPACE, "--wait=true", "--timeout=180s", timeout_s=210)
    for item in reversed(made[1:]):
        kubectl("delete", item["kind"], item["metadata"]["name"])


def is_queued(kubectl: Kubectl, job: str) -> bool:
    condition = kubectl.condition(job, "Suspended")
    return (condition.get("status"), condition.get("reason")) == ("True", "Queued")


def kueues_reason(kubectl: Kubectl, job: str) -> bool:
    message = str(kubectl.condition(job, "Suspended").get("message"))
    return message.startswith("Queued in default: ") and ("insufficient" in message or "Preempted" in message)


def ray_job(kubectl: Kubectl, job: str) -> dict[str, Any]:
    (found,) = kubectl.children(job, "rayjobs")
    return found


def trains_beyond(kubectl: Kubectl, job: str, step: int) -> int:
    """Wait for progress; returns the step."""
    kubectl.until(f"{job} trains beyond step {step}", lambda: kubectl.step(job) > step + 5, STARTS_S, job=job)
    return kubectl.step(job)


def preempted_and_suspended(queued: Kubectl, volume: Volume) -> Outcome:
    """The scenario: a job is preempted by another one and goes on, is suspended and goes on.

    Args:
        queued: in the namespace with the queue.
        volume: there.
    """
    name = "patient"
    queued.apply(*unhurried(name, checkpoint_every=0))
    trains_beyond(queued, name, 0)
    assert ray_job(queued, name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default", "Kueue gave it the namespace's queue"

    urgent = lake(URGENT, steps=STEPS, turns=TURNS)
    urgent["spec"]["queue"] = {"name": "default", "priorityClass": URGENT}
    queued.apply(urgent)
    queued.until("the first job is preempted", lambda: is_queued(queued, name), SUSPENDS_S, job=name)
    queued.until("the reason is Kueue's", lambda: kueues_reason(queued, name), NOTE_S, job=name)
    queued.wait(URGENT, "Succeeded", URGENT_ENDS_S)
    trained = queued.step(name)
    trained = trains_beyond(queued, name, trained)
    assert ray_job(queued, name)["metadata"]["generation"] <= MAX_SPEC_CHANGES

    queued("patch", "rljob", name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    queued.wait(name, "Suspended", SUSPENDS_S)
    queued.until("the quota is given back", lambda: not queued.children(name, "rayjobs"), SUSPENDS_S, job=name)
    queued("patch", "rljob", name, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    # Made once the previous driver is gone, which trains a few steps more and reports them after its RayJob.
    queued.until("its RayJob is made again", lambda: bool(queued.children(name, "rayjobs")), SUSPENDS_S, job=name)
    trains_beyond(queued, name, queued.step(name))
    assert ray_job(queued, name)["metadata"]["generation"] <= MAX_SPEC_CHANGES

    status = queued.get("rljob", name)["status"]
    steps = [int(m["step"]) for m in metrics(volume, name)]
    queued("delete", "rljob", name, URGENT)
    return Outcome(status=status, steps=steps, volume=volume)
