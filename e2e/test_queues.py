"""Kueue, the real one: quota, preemption and suspension of jobs that it admits. No step is lost, and operator and Kueue do not fight."""

from __future__ import annotations

from concurrent.futures import Future

from e2e.jobs import quickstart
from e2e.kubectl import Kubectl
from e2e.queues import NOTE_S, Outcome, is_queued, managed_namespace, ray_job

ENDS_S = 1200.0
MAX_FIRST_CHANGES = 4
"""Of the RayJob's spec: created, suspended by Kueue's webhook, and what its label changes."""


def suspension(kubectl: Kubectl, job: str) -> str:
    return str(kubectl.condition(job, "Suspended").get("message"))


def test_quota_preemption_and_suspension_cost_no_step(scenario_of_queues: Future[Outcome]) -> None:
    """:func:`e2e.queues.preempted_and_suspended` has run in a namespace of its own beside earlier scenarios, as it mostly waits."""
    outcome = scenario_of_queues.result(ENDS_S)
    assert outcome.status["attempt"] == 1, "neither was a failure"
    assert outcome.steps
    assert outcome.steps == list(range(1, len(outcome.steps) + 1)), "every step was trained once"


def test_a_job_without_a_queue_where_kueue_manages_all_jobs_waits_until_it_has_one(kubectl: Kubectl) -> None:
    """Kueue suspends such a RayJob each time somebody resumes it; the operator says so and leaves it."""
    name, namespace = "no-queue", "rljob-e2e-no-queue"
    kubectl.apply(managed_namespace(namespace))
    inside = Kubectl(kubectl.binary, kubectl.kubeconfig, namespace)
    inside.apply(quickstart(name, steps=3))
    inside.until("it is held", lambda: is_queued(inside, name), NOTE_S, job=name)
    inside.until("the reason is Kueue's", lambda: "LocalQueue  doesn't exist" in suspension(inside, name), NOTE_S, job=name)
    message = suspension(inside, name)
    assert "(manageJobsWithoutQueueName)" in message
    command = message.partition("run kubectl ")[2].partition("=")[0].split()

    inside(*command[:3], f"{command[3]}=team")
    inside.until("the queue is named", lambda: suspension(inside, name).startswith("Queued in team: "), NOTE_S, job=name)
    assert ray_job(inside, name)["metadata"]["generation"] <= MAX_FIRST_CHANGES, "nobody fought about spec.suspend"
    assert inside.children(name, "pods") == []
    kubectl("delete", "namespace", namespace, "--wait=false")
