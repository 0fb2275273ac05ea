"""The KubeRay RayJob of an attempt.

KubeRay makes no policy decisions: no retries, no deadlines, no autoscaling. It creates the pods, submits the driver to the head, and
deletes the pods when the driver has exited.
"""

from __future__ import annotations

import json
import shlex

from rljob_api import naming
from rljob_api.quantities import rounded_down, rounded_up
from rljob_api.v1alpha1.nodes import NodeGroup
from rljob_api.v1alpha1.pods import NodeResources
from rljob_api.v1alpha1.rljob import RLJob
from rljob_operator.desired import pods
from rljob_operator.desired.metadata import attempt_labels, child_metadata
from rljob_operator.model import JobView, Manifest

MULTI_KUEUE = "kueue.x-k8s.io/multikueue"
"""Controller of RayJobs that run on another cluster."""
ENTRYPOINT = ("python", "-m", "rljob_runtime.entry.kubernetes")
WITHOUT_LOG_MONITOR = {"include-log-monitor": "no"}
"""Of every node, as on embedded clusters: workers write their own logs, and no driver asks for them. KubeRay 1.6 leaves out what is "false"
(convertParamMap of its pod.go)."""
WITHOUT_AUTOSCALER = {"no-monitor": "true"}
"""Of the head, likewise: the nodes never change. Each of the two processes imports Ray for nothing, and keeps 80 MB."""
RAY_SHM_THRESHOLD_BYTES = 10**10
"""A /dev/shm of at least this size limits the object store that Ray makes by itself (REQUIRE_SHM_SIZE_THRESHOLD of Ray 2.60)."""
MIN_STORE_BYTES = 75 << 20
"""Ray refuses a smaller object store."""


def ray_job(job: JobView, resolved: RLJob, attempt: int, dashboard_host: str) -> Manifest:
    """Build the RayJob; it is created suspended only if a queue has to admit it. KubeRay reaches the driver through the dashboard."""
    spec, queue = resolved.spec, resolved.spec.queue
    labels = spec.metadata.labels | attempt_labels(job, attempt)
    if queue is not None:
        labels[naming.QUEUE_LABEL] = queue.name
        if queue.priority_class is not None:
            labels[naming.QUEUE_PRIORITY_LABEL] = queue.priority_class
    metadata = child_metadata(job, naming.rayjob_name(job.key.name, attempt), labels)
    if spec.metadata.annotations:
        metadata["annotations"] = dict(spec.metadata.annotations)
    first_ranks = [sum(group.nodes for group in spec.node_groups[:index]) for index in range(len(spec.node_groups))]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": shlex.join(ENTRYPOINT),
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 0,
            **({"suspend": True} if queue is not None else {}),
            **({"managedBy": MULTI_KUEUE} if queue is not None and queue.multi_kueue else {}),
            "rayClusterSpec": {
                "rayVersion": spec.ray_version,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": {
                        "num-cpus": "0",
                        "num-gpus": "0",
                        "dashboard-host": dashboard_host,
                        **WITHOUT_LOG_MONITOR,
                        **WITHOUT_AUTOSCALER,
                        **_object_store(spec.head.resources),
                    },
                    "template": pods.head_template(job, resolved, attempt),
                },
                "workerGroupSpecs": [
                    _worker_group(job, resolved, attempt, group, first_rank)
                    for group, first_rank in zip(spec.node_groups, first_ranks, strict=True)
                ],
            },
        },
    }


def _worker_group(job: JobView, resolved: RLJob, attempt: int, group: NodeGroup, first_rank: int) -> Manifest:
    return {
        "groupName": group.name,
        "replicas": group.nodes,
        "minReplicas": group.nodes,
        "maxReplicas": group.nodes,
        "numOfHosts": 1,
        **({"labels": dict(group.labels)} if group.labels else {}),
        "rayStartParams": ray_start_params(group),
        "template": pods.worker_template(job, resolved, attempt, group, first_rank),
    }


def ray_start_params(group: NodeGroup) -> dict[str, str]:
    """Ray start parameters of a group. All resources are explicit, so that KubeRay infers nothing from resource names."""
    resource = naming.ray_resource(group.device_resource)
    is_gpu = resource == "GPU"
    params = {"num-gpus": str(group.devices_per_node if is_gpu else 0), **WITHOUT_LOG_MONITOR, **_object_store(group.resources)}
    if group.resources.cpu_request is not None:
        params["num-cpus"] = str(rounded_up(group.resources.cpu_request))
    custom = {naming.HARDWARE_RESOURCE: 1} if group.hardware is not None else {}
    if group.devices_per_node and not is_gpu:
        custom[resource] = group.devices_per_node
    if custom:
        # Single quotes: KubeRay inserts the value verbatim into a shell line, and strips the quotes before parsing it as JSON.
        params["resources"] = f"'{json.dumps(custom)}'"
    return params


def _object_store(resources: NodeResources) -> dict[str, str]:
    """The size of Ray's object store, where Ray would make one larger than a small /dev/shm and put it on the pod's disk instead."""
    if resources.shared_memory is None:
        return {}
    size_bytes = rounded_down(resources.shared_memory)
    shared_bytes = size_bytes * 9 // 10
    if size_bytes * 95 // 100 >= RAY_SHM_THRESHOLD_BYTES or shared_bytes < MIN_STORE_BYTES:  # Ray leaves 5 % free
        return {}
    limit = resources.memory_limit
    wanted_bytes = shared_bytes if limit is None else min(shared_bytes, rounded_down(limit) * 3 // 10)  # Ray's own share of memory
    return {"object-store-memory": str(max(wanted_bytes, MIN_STORE_BYTES))}
