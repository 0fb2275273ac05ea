"""Decisions from the start of an attempt to its end."""

from __future__ import annotations

from rljob_api.vocabulary import Reason
from tests.support.operator_scene import at, failed_log, scene
from tests.unit.operator.cases.expectations import COMPLETED, HELD, OLD_HEAD, OOM, PULL, RUNS, Case, app_failed, over, waits

ATTEMPTS = [
    # --- before the first attempt
    Case(name="a new job gets its first attempt", scene=scene(), expected=waits("Starting"), actions={"create_attempt": 1}),
    Case(name="a deleted job is left alone", scene=scene().deleting(), expected={"Succeeded": "Unknown Pending"}),
    Case(name="a deleted job with a child too", scene=scene().running().deleting(), expected={"Succeeded": "Unknown Pending"}),
    Case(
        name="another controller's job is left alone",
        scene=scene().spec(managedBy="kueue.x-k8s.io/multikueue"),
        expected={"Accepted": "Unknown Pending"},
    ),
    Case(
        name="the operator's own name is its job",
        scene=scene().spec(managedBy="rljob.dev/operator"),
        expected=waits("Starting"),
        actions={"create_attempt": 1},
    ),
    Case(name="an invalid spec creates no child", scene=scene().invalid(), expected=waits("SpecInvalid", Accepted="False SpecInvalid")),
    Case(
        name="an invalid suspended spec reports both",
        scene=scene().suspended().invalid(),
        expected=waits("SpecInvalid", Accepted="False SpecInvalid", Suspended="True Suspended"),
    ),
    Case(name="suspended before the start", scene=scene().suspended(), expected=HELD),
    Case(
        name="a name conflict",
        scene=scene().taken("math-grpo-a1"),
        expected=waits("ChildNameTaken"),
        actions={"next_check": at(90)},
        message="math-grpo-a1 already exists and is not owned by this RLJob",
    ),
    Case(
        name="a child rejected by the API server",
        scene=scene().reject("exceeded quota: pods"),
        expected=waits("ChildRejected", Accepted="False ChildRejected"),
        actions={"next_check": at(120)},
        message="exceeded quota",
    ),
    Case(
        name="the head pod of a deleted job of the same name is waited for",
        scene=scene().pod("old-head", 3, head=True),
        expected=waits("Starting"),
        actions={"next_check": at(600)},
        message="pod old-head",
    ),
    Case(
        name="but not forever",
        scene=scene().pod("old-head", 3, head=True),
        seconds=600,
        expected=waits("Starting"),
        actions={"create_attempt": 1},
    ),
    Case(
        name="a foreign RayJob of the same label is not ours",
        scene=scene().child(1, "Running", owner_uid="somebody"),
        expected=waits("Starting"),
        actions={"create_attempt": 1},
    ),
    # --- starting
    Case(
        name="nodes start",
        scene=scene().child(1, "Initializing").pod("n0").pod("n1", ready=False),
        expected=waits("Starting"),
        actions={"next_check": at(1800)},
    ),
    Case(
        name="an image that cannot be pulled",
        scene=scene().child(1, "Initializing").pod("n0", ready=False, waiting=PULL),
        expected=waits("ImageUnavailable"),
        actions={"next_check": at(1800)},
    ),
    Case(
        name="an unschedulable pod",
        scene=scene().child(1, "Initializing").pod("n0", ready=False, phase="Pending", unschedulable="0/1 nodes: Insufficient gpu"),
        expected=waits("Unschedulable"),
    ),
    Case(
        name="a pod that a scheduler has just been given",
        scene=scene().child(1, "Initializing").pod("n0", ready=False, phase="Pending", scheduled_at=None),
        expected=waits("Starting"),
        actions={"next_check": at(61)},
    ),
    Case(
        name="a pod of which no scheduler says anything waits for a machine",
        scene=scene().child(1, "Initializing").pod("n0", ready=False, phase="Pending", scheduled_at=None),
        seconds=2000,
        expected=waits("Unschedulable"),
    ),
    Case(
        name="the time without a machine does not count",
        scene=scene().child(1, "Initializing").nodes(ready=False, scheduled_at=at(90_000)),
        seconds=90_100,
        expected=waits("Starting"),
        actions={"next_check": at(91_800)},
    ),
    Case(
        name="nor that of a pod which was deleted while it waited, until a scheduler has looked at its replacement",
        scene=scene().child(1, "Initializing").pod("n0", ready=False, phase="Pending", created=at(5000), scheduled_at=None),
        seconds=5010,
        expected=waits("Starting"),
        actions={"next_check": at(5060)},
    ),
    Case(
        name="an unschedulable pod with a deadline",
        scene=scene()
        .spec(schedulingDeadlineSeconds=600)
        .child(1, "Initializing")
        .pod("n0", ready=False, phase="Pending", unschedulable="Insufficient gpu"),
        expected=waits("Unschedulable"),
        actions={"next_check": at(600)},
    ),
    Case(
        name="a machine that is missing pauses the deadline, whatever another pod lacks",
        scene=scene()
        .child(1, "Initializing")
        .pod("n0", ready=False, phase="Pending", unschedulable="Insufficient gpu")
        .pod("n1", ready=False, waiting=("ray", "ErrImagePull", "registry is away")),
        seconds=99_999,
        expected=waits("ImageUnavailable"),
    ),
    Case(
        name="no machine in time",
        scene=scene()
        .spec(schedulingDeadlineSeconds=600)
        .child(1, "Initializing")
        .pod("n0", ready=False, phase="Pending", unschedulable="Insufficient gpu"),
        seconds=600,
        expected=over("StartupDeadlineExceeded"),
        failure=(
            Reason.STARTUP_DEADLINE_EXCEEDED,
            "Not ready within schedulingDeadlineSeconds (600 s): 0 of 3 nodes are ready.",
        ),
    ),
    Case(
        name="an image name that no waiting will pull",
        scene=scene().restarts(3).child(1, "Initializing").pod("n0", ready=False, waiting=("ray", "InvalidImageName", "invalid reference")),
        expected=over("ImageUnavailable"),
        failure=(Reason.IMAGE_UNAVAILABLE, "Pod n0, container ray: InvalidImageName: invalid reference"),
    ),
    Case(
        name="a pod that keeps crashing",
        scene=scene()
        .child(1, "Initializing")
        .pod("n0", ready=False, waiting=("ray", "CrashLoopBackOff", ""), terminated=("ray", "Error", 1)),
        expected=waits("PodFailed"),
        actions={"next_check": at(1800)},
    ),
    Case(
        name="a pod that ends and is made again does not extend the deadline",
        scene=scene()
        .child(1, "Initializing")
        .pod("n0", ready=False, phase="Failed", created=at(1790), scheduled_at=at(1791), terminated=("ray", "Error", 1)),
        seconds=1800,
        expected=over("StartupDeadlineExceeded"),
        failure=(Reason.STARTUP_DEADLINE_EXCEEDED, "exit code 1"),
    ),
    Case(
        name="pods that KubeRay cannot create",
        scene=scene().child(1, "Initializing").cluster("math-grpo-a1-c", "pods is forbidden: exceeded quota"),
        expected=waits("PodFailed"),
        actions={"next_check": at(1800)},
    ),
    Case(
        name="all nodes are ready, the driver is not started",
        scene=scene().child(1, "Initializing").nodes(),
        expected=waits("Starting", cluster="True NodesReady"),
        actions={"next_check": at(1800)},
    ),
    Case(
        name="the driver is submitted",
        scene=scene().child(1, "Running", job_status="PENDING").nodes(),
        expected=waits("Starting", cluster="True NodesReady"),
    ),
    Case(
        name="KubeRay says Running before it has submitted the driver",
        scene=scene().child(1, "Running").nodes(),
        expected=waits("Starting", cluster="True NodesReady"),
        actions={"next_check": at(1800)},
    ),
    Case(
        name="KubeRay never submitted the driver",
        scene=scene().spec(startupDeadlineSeconds=90).child(1, "Running").nodes(),
        seconds=90,
        expected=over("SubmissionFailed"),
        failure=(
            Reason.SUBMISSION_FAILED,
            "not submitted the driver of RayJob math-grpo-a1 within startupDeadlineSeconds (90 s).",
        ),
        message="port 8265",
    ),
    Case(
        name="resuming restarts the time in which the driver is submitted",
        scene=scene().spec(startupDeadlineSeconds=90).stored(startTime="2026-01-31T12:00:50Z").child(1, "Running").nodes(),
        seconds=100,
        expected=waits("Starting", cluster="True NodesReady"),
        actions={"next_check": at(140)},
    ),
    Case(
        name="KubeRay of another cluster never submitted the driver",
        scene=scene().spec(startupDeadlineSeconds=90).child(1, "Running", is_elsewhere=True),
        seconds=90,
        expected=over("SubmissionFailed"),
        failure=(Reason.SUBMISSION_FAILED, "not submitted the driver"),
    ),
    Case(
        name="a node is being made again before the driver was submitted",
        scene=scene()
        .spec(startupDeadlineSeconds=90)
        .child(1, "Running")
        .nodes()
        .pod("node-2", group="infer", ready=False, phase="Pending"),
        seconds=90,
        expected=over("StartupDeadlineExceeded"),
        failure=(Reason.STARTUP_DEADLINE_EXCEEDED, "2 of 3 nodes are ready."),
    ),
    Case(
        name="a node is missing again before the driver was submitted",
        scene=scene().spec(startupDeadlineSeconds=90).child(1, "Running").nodes().pod("node-2", group="infer", ready=False, waiting=PULL),
        seconds=90,
        expected=over("StartupDeadlineExceeded"),
        failure=(Reason.STARTUP_DEADLINE_EXCEEDED, "2 of 3 nodes are ready. Pod node-2"),
    ),
    Case(name="the driver is training", scene=scene().running(), expected=RUNS),
    Case(
        name="a node that was there is not ready",
        scene=scene().running().pod("node-2", group="infer", ready=False),
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="the node of the driver does not answer",
        scene=scene().running().pod("head", head=True, ready=False),
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
        message="Attempt 1 is training. Head pod head is not ready: its node may have stopped answering.",
    ),
    Case(
        name="a spec that became invalid keeps its child",
        scene=scene().running().invalid(),
        expected=RUNS | {"Accepted": "False SpecInvalid"},
    ),
    Case(
        name="a changed spec keeps its child, and the message names what changed",
        scene=scene().stored(attempt=1).running().changed("podTemplate", "head"),
        expected=RUNS | {"Accepted": "False SpecChanged"},
    ),
    Case(
        name="a spec that is as it was at the first attempt",
        scene=scene().stored(attempt=1).running().changed(),
        expected=RUNS,
    ),
    Case(
        name="nodes were not ready in time",
        scene=scene().spec(startupDeadlineSeconds=25).child(1, "Initializing").pod("n0", ready=False, waiting=PULL),
        seconds=25,
        expected=over("StartupDeadlineExceeded"),
        failure=(Reason.STARTUP_DEADLINE_EXCEEDED, "(25 s): 0 of 3 nodes are ready. Pod n0"),
        message="there-is-no-such-image",
    ),
    Case(
        name="resuming restarts the startup deadline",
        scene=scene().spec(startupDeadlineSeconds=25).stored(startTime="2026-01-31T12:00:50Z").child(1, "Initializing"),
        expected=waits("Starting"),
        actions={"next_check": at(75)},
    ),
    # --- ends of attempts
    Case(name="success", scene=scene().child(1, "Complete", job_status="SUCCEEDED"), expected=COMPLETED),
    Case(
        name="success overrides a recorded failure",
        scene=scene().failed(1).child(1, "Complete", job_status="SUCCEEDED"),
        expected=COMPLETED,
    ),
    Case(
        name="success overrides the active deadline",
        scene=scene().spec(activeDeadlineSeconds=10).stored(startTime="2026-01-31T12:00:00Z").child(1, "Complete", job_status="SUCCEEDED"),
        expected=COMPLETED,
    ),
    Case(
        name="the driver reports an error",
        scene=app_failed(failed_log(Reason.REWARD_INVALID, "RuntimeError: no answers", "reward-0")),
        expected=over("RewardInvalid"),
        failure=(Reason.REWARD_INVALID, "reward-0: RuntimeError: no answers"),
        message="RuntimeError: no answers",
    ),
    Case(
        name="a driver without a termination message",
        scene=app_failed("Job entrypoint command failed with exit code 3\nTraceback\nImportError: nope"),
        expected=over("DriverFailed"),
        failure=(Reason.DRIVER_FAILED, "exited with code 3 without reporting an error.\n"),
        message="ImportError: nope",
    ),
    Case(
        name="a lost worker whose pod was OOM-killed",
        scene=app_failed(failed_log(Reason.WORKER_LOST, "actor_train-0 is gone")).pod("n0", terminated=OOM, deleting=True),
        expected=over("OutOfMemory"),
        failure=(Reason.OUT_OF_MEMORY, "Pod n0, container ray terminated: OOMKilled, exit code 137. actor_train-0 is gone"),
    ),
    Case(
        name="a lost worker whose pod was evicted",
        scene=app_failed(failed_log(Reason.WORKER_LOST, "actor_train-0 is gone")).pod("n0", phase="Failed", terminated=("", "Evicted", -1)),
        expected=over("WorkerLost"),
        failure=(Reason.WORKER_LOST, "Pod n0 terminated: Evicted. actor_train-0 is gone"),
    ),
    Case(
        name="OOM-killed without a termination message",
        scene=app_failed("").pod("head", head=True, terminated=OOM),
        expected=over("OutOfMemory"),
        failure=(Reason.OUT_OF_MEMORY, "Pod head, container ray"),
    ),
    Case(
        name="KubeRay could not submit",
        scene=scene().child(1, "Failed", reason="SubmissionFailed", message="submitter pod: BackoffLimitExceeded"),
        expected=over("SubmissionFailed"),
        failure=(Reason.SUBMISSION_FAILED, "(SubmissionFailed).\nsubmitter pod"),
    ),
    Case(
        name="KubeRay's own deadline",
        scene=scene().child(1, "Failed", reason="DeadlineExceeded"),
        expected=over("DeadlineExceeded"),
        failure=(Reason.DEADLINE_EXCEEDED, "RayJob math-grpo-a1 ended as Failed"),
    ),
    Case(
        name="KubeRay's startup deadline",
        scene=scene().child(1, "Failed", reason="PreRunningDeadlineExceeded"),
        expected=over("StartupDeadlineExceeded"),
        failure=(Reason.STARTUP_DEADLINE_EXCEEDED, "PreRunningDeadlineExceeded"),
    ),
    Case(
        name="KubeRay lost the driver's status",
        scene=scene().child(1, "Failed", reason="JobDeploymentStatusTransitionGracePeriodExceeded", job_status="FAILED"),
        expected=over("HeadLost"),
        failure=(Reason.HEAD_LOST, "GracePeriodExceeded"),
    ),
    Case(
        name="KubeRay finds no job after its submitter ended",
        scene=scene().child(1, "Failed", reason="AppFailed", job_status="RUNNING", message="Ray job not found in RayCluster."),
        expected=over("HeadLost"),
        failure=(Reason.HEAD_LOST, "not found"),
    ),
    Case(
        name="stopped in the dashboard",
        scene=scene().child(1, "Complete", job_status="STOPPED"),
        expected=over("Stopped"),
        failure=(Reason.STOPPED, "stopped"),
    ),
    Case(
        name="rejected by KubeRay",
        scene=scene().restarts(3).child(1, "ValidationFailed", reason="ValidationFailed", message="name too long", cluster_name=""),
        expected=over("ChildRejected", Accepted="False ChildRejected"),
        failure=(Reason.CHILD_REJECTED, "name too long"),
    ),
    Case(
        name="the RayJob was deleted",
        scene=scene().stored(attempt=1),
        expected=over("ChildDeleted"),
        failure=(Reason.CHILD_DELETED, "was deleted externally"),
    ),
    Case(
        name="the RayJob is being deleted",
        scene=scene().child(1, "Running", job_status="RUNNING", deleting=True),
        expected=over("ChildDeleted"),
        failure=(Reason.CHILD_DELETED, "math-grpo-a1 was deleted"),
    ),
    Case(
        name="the head was replaced",
        scene=scene().stored(attempt=1, headPod=OLD_HEAD).running(),
        expected=over("HeadLost"),
        failure=(Reason.HEAD_LOST, "the replacement, pod head"),
    ),
    Case(
        name="the head of another cluster of the same RayJob, which Kueue stopped and resumed unseen, replaces no driver",
        scene=scene().queued().stored(attempt=1, headPod="math-grpo-a1-b-head-1a2b3").running(),
        expected=RUNS,
    ),
    Case(
        name="the clock of the head's node does not matter",
        scene=scene().stored(attempt=1, headPod="head").running().pod("head", head=True, created=at(500)),
        expected=RUNS,
    ),
    Case(
        name="the head of an earlier attempt does not matter",
        scene=scene().failed(1).stored(headPod=OLD_HEAD).restarts(1).running(2),
        expected=RUNS,
    ),
    Case(
        name="the head is drained",
        scene=scene().running().pod("head", head=True, disruption="EvictionByEvictionAPI: Eviction API: evicting", deleting=True),
        expected=waits("Restarting"),
        failure=(Reason.EVICTED, "The pod of the driver, head, is being evicted: EvictionByEvictionAPI: Eviction API: evicting"),
        actions={"next_check": at(60)},
        message="Attempt 2, which does not count as a restart, starts at 2026-01-31T12:01:10Z once RayJob math-grpo-a1 is gone.",
    ),
    Case(
        name="the head is deleted, or its node is gone",
        scene=scene().running().pod("head", head=True, deleting=True, deletion_time=at(180)),
        expected=waits("Restarting"),
        failure=(Reason.EVICTED, "The pod of the driver, head, is being deleted."),
        actions={"next_check": at(60)},
    ),
    Case(
        name="no disruption is tolerated",
        scene=scene().spec(failurePolicy={"maxDisruptions": 0}).running().pod("head", head=True, deleting=True),
        expected=over("Evicted"),
        failure=(Reason.EVICTED, "is being deleted"),
    ),
    Case(
        name="the driver reports its eviction",
        scene=app_failed(failed_log(Reason.EVICTED, "stopped after step 3 of 9, because the pod of actor_train-0 was asked to end")),
        expected=waits("Restarting", cluster="False Restarting"),
        failure=(Reason.EVICTED, "stopped after step 3 of 9"),
        actions={"next_check": at(60)},
    ),
    Case(
        name="a head that used too much memory is not evicted",
        scene=scene().running().pod("head", head=True, phase="Failed", terminated=OOM, deleting=True),
        expected=over("OutOfMemory"),
        failure=(Reason.OUT_OF_MEMORY, "OOMKilled"),
    ),
    Case(
        name="the head failed",
        scene=scene().running().pod("head", head=True, phase="Failed", terminated=("ray", "Error", 1)),
        expected=over("HeadLost"),
        failure=(Reason.HEAD_LOST, "Pod head, container ray terminated: Error, exit code 1"),
    ),
    Case(
        name="the head was OOM-killed",
        scene=scene().running().pod("head", head=True, terminated=OOM, terminated_at=at(50)),
        expected=over("OutOfMemory"),
        failure=(Reason.OUT_OF_MEMORY, "OOMKilled"),
    ),
    Case(
        name="a head restarted before the driver ran is healthy",
        scene=scene().running().pod("head", head=True, terminated=("ray", "Error", 1), terminated_at=at(10)),
        expected=RUNS,
    ),
    Case(
        name="the head of an earlier cluster is ignored",
        scene=scene().running().pod("other-head", head=True, cluster="older", created=at(50)),
        expected=RUNS,
    ),
    Case(
        name="a head that ends while the job is being suspended is not lost",
        scene=scene()
        .suspended()
        .child(1, "Running", job_status="RUNNING", job_started=at(30), suspend=True)
        .pod("head", head=True, phase="Failed"),
        expected=waits("Suspended", Suspended="False Suspended"),
    ),
    Case(
        name="rejected by KubeRay after its cluster was created",
        scene=scene().failed(1, Reason.STOPPED).restarts(1, rules=(("Stopped", "Restart"),)).child(1, "ValidationFailed"),
        seconds=500,
        expected=waits("Restarting"),
        actions={"delete_children": ("math-grpo-a1",)},
    ),
    Case(
        name="failed and replaced nodes are left to the driver",
        scene=scene().running().pod("node-0", phase="Failed", terminated=("ray", "Error", 1)).pod("node-1", created=at(50)),
        expected=RUNS,
    ),
    Case(
        name="the active deadline",
        scene=scene().restarts(5).spec(activeDeadlineSeconds=50).stored(attempt=1, startTime="2026-01-31T12:00:00Z").running(),
        seconds=50,
        expected=over("ActiveDeadlineExceeded"),
        failure=(Reason.ACTIVE_DEADLINE_EXCEEDED, "(50 s) since 2026-01-31T12:00:00Z"),
    ),
    Case(
        name="the active deadline between two attempts",
        scene=scene().restarts(5, 600).spec(activeDeadlineSeconds=110).failed(1).child(1, "Failed"),
        seconds=110,
        expected=over("ActiveDeadlineExceeded"),
        failure=(Reason.ACTIVE_DEADLINE_EXCEEDED, "Attempt 1 failed earlier: WorkerLost: it broke"),
    ),
]
