"""Pod templates of the head and the worker nodes.

They satisfy the "restricted" Pod Security Standard and have a read-only root file system. podTemplate can change anything except the
labels by which the operator finds the pods.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rljob_api import naming
from rljob_api.v1alpha1.base import SpecModel
from rljob_api.v1alpha1.nodes import Head, NodeGroup
from rljob_api.v1alpha1.pods import EnvVar, ModelCache
from rljob_api.v1alpha1.rljob import RLJob
from rljob_operator.desired import resolved_spec
from rljob_operator.desired.access import account_name
from rljob_operator.desired.merge import merge
from rljob_operator.desired.metadata import pod_labels
from rljob_operator.desired.prelude import ENV_REPLICA_INDEX, REPLICA_LABEL, literal, rank_prelude
from rljob_operator.model import JobView, Manifest

USER_ID = 1000
TERMINATION_GRACE_S = 120
"""Time to write a final checkpoint."""
STOP_MARGIN_S = 10
"""Part of it that is reserved for Ray's own shutdown."""
PRE_STOP = ("python", "-m", "rljob_runtime.entry.pre_stop")
HEAD_REQUESTS = {"cpu": "250m", "memory": "1Gi"}
"""What the head requests where the spec says nothing: a pod without requests is the first one evicted."""
RAY_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
"""Written out because KubeRay gives the head's Service the ports of its container, and its own ones only where the container names none."""
READINESS = {
    "httpGet": {"path": "/api/healthz", "port": 52365},
    "initialDelaySeconds": 1,
    "periodSeconds": 2,
    "timeoutSeconds": 5,
    "failureThreshold": 10,
}
"""KubeRay's own readiness probe of a head, but asked from the start and every 2 s: KubeRay's starts 10 s after the container and asks
every 5 s, and KubeRay submits the driver once all pods are ready. A pod that does not answer, because it is busy or cut off, is not ready
after 50 s, as with KubeRay's: the kubelet waits out each timeout before it asks again. KubeRay adds its own liveness probe in any case."""
_SPEC_VOLUME, _STORAGE_VOLUME, _CACHE_VOLUME, _SHARED_MEMORY_VOLUME = "rljob-spec", "storage", "model-cache", "shared-memory"
_EMPTY_VOLUMES = {"tmp": naming.TEMPORARY_FOLDER, "home": naming.HOME_FOLDER}


def head_template(job: JobView, resolved: RLJob, attempt: int) -> Manifest:
    """Pod template of the Ray head, which runs the driver; the only pod with the service account token and the spec."""
    head = resolved.spec.head
    template = _template(
        job,
        resolved,
        attempt,
        place=head,
        image=str(resolved.spec.image),
        env=[
            _variable(naming.ENV_NAMESPACE, job.key.namespace),
            _variable(naming.ENV_JOB, job.key.name),
            _variable(naming.ENV_ATTEMPT, str(attempt)),
            *([_variable(naming.ENV_HAS_STARTED, "1")] if job.status.get("progress") else []),
            # By default Ray kills a driver 3 seconds after asking it to stop; a checkpoint takes longer.
            _variable("RAY_JOB_STOP_WAIT_TIME_S", str(TERMINATION_GRACE_S - STOP_MARGIN_S)),
        ],
    )
    spec, container = template["spec"], template["spec"]["containers"][0]
    spec["serviceAccountName"] = account_name(job, resolved)
    spec["automountServiceAccountToken"] = True
    container["ports"] = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in RAY_HEAD_PORTS.items()]
    if resolved.spec.report.metrics_endpoint:
        container["ports"].append({"name": naming.METRICS_PORT_NAME, "containerPort": naming.METRICS_PORT, "protocol": "TCP"})
    folder, file = posixpath.split(naming.SPEC_FILE)
    annotation = {"fieldPath": f"metadata.annotations['{naming.SPEC_ANNOTATION}']"}
    spec["volumes"].append({"name": _SPEC_VOLUME, "downwardAPI": {"items": [{"path": file, "fieldRef": annotation}]}})
    container["volumeMounts"].append({"name": _SPEC_VOLUME, "mountPath": folder, "readOnly": True})
    merged = _merged(template, (resolved.spec.pod_template, head.pod_template))
    return merge(merged, {"metadata": {"annotations": {naming.SPEC_ANNOTATION: resolved_spec.text(job, resolved)}}})


def worker_template(job: JobView, resolved: RLJob, attempt: int, group: NodeGroup, first_rank: int) -> Manifest:
    """Pod template of the nodes of a group."""
    index = {"name": ENV_REPLICA_INDEX, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{REPLICA_LABEL}']"}}}
    template = _template(job, resolved, attempt, place=group, image=group.image or str(resolved.spec.image), env=[index])
    spec, container = template["spec"], template["spec"]["containers"][0]
    spec["automountServiceAccountToken"] = False
    if resolved.spec.service_account is not None:
        spec["serviceAccountName"] = account_name(job, resolved)
    if group.runtime_class_name is not None:
        spec["runtimeClassName"] = group.runtime_class_name
    container["args"] = [literal(rank_prelude(first_rank, group.nodes))]
    if group.devices_per_node and group.device_resource != "cpu":
        container["resources"].setdefault("limits", {})[group.device_resource] = str(group.devices_per_node)
    return _merged(template, (resolved.spec.pod_template, group.pod_template))


def _template(job: JobView, resolved: RLJob, attempt: int, *, place: Head | NodeGroup, image: str, env: Sequence[Manifest]) -> Manifest:
    """The common part of all pod templates."""
    volumes, mounts = _volumes(resolved, place)
    container = {
        "name": naming.RAY_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": _environment(job, resolved, env, place.env),
        **({"envFrom": [_as_written(source) for source in place.env_from]} if place.env_from else {}),
        "resources": _resources(place),
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"exec": {"command": list(PRE_STOP)}}},
        "readinessProbe": READINESS,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,  # they would add variables for every Service of the namespace, whose names may clash
        "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    for field, name in (("priorityClassName", resolved.spec.priority_class_name), ("schedulerName", resolved.spec.scheduler_name)):
        if name is not None:
            spec[field] = name
    if resolved.spec.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret.name} for secret in resolved.spec.image_pull_secrets]
    if place.node_selector:
        spec["nodeSelector"] = dict(place.node_selector)
    if place.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in place.tolerations]
    if place.affinity:
        spec["affinity"] = dict(place.affinity)
    return {"metadata": _metadata(job, resolved, attempt), "spec": spec}


def _metadata(job: JobView, resolved: RLJob, attempt: int) -> Manifest:
    """Labels and annotations of a pod; those of KubeRay's schedulers it puts there itself."""
    own = resolved.spec.metadata
    labels = {key: value for key, value in own.labels.items() if key not in naming.SCHEDULER_LABELS} | pod_labels(job, attempt)
    annotations = {key: value for key, value in own.annotations.items() if not key.startswith("ray.io/")}
    if resolved.spec.do_not_disrupt:
        annotations |= naming.DISRUPTION_ANNOTATIONS
    return {"labels": labels, **({"annotations": annotations} if annotations else {})}


def _resources(place: Head | NodeGroup) -> Manifest:
    """Resources of the Ray container. No CPU limit unless asked for: it would throttle the pod even when cores are idle."""
    requests, limits = place.resources.all_requests, place.resources.all_limits
    if isinstance(place, Head):
        requests = {name: value for name, value in HEAD_REQUESTS.items() if name not in limits} | requests
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _volumes(resolved: RLJob, place: Head | NodeGroup) -> tuple[list[Manifest], list[Manifest]]:
    volumes: list[Manifest] = [{"name": name, "emptyDir": {}} for name in _EMPTY_VOLUMES]
    mounts: list[Manifest] = [{"name": name, "mountPath": path} for name, path in _EMPTY_VOLUMES.items()]
    shared_memory = _shared_memory(place)
    if shared_memory is not None:
        volumes.append({"name": _SHARED_MEMORY_VOLUME, "emptyDir": shared_memory})
        mounts.append({"name": _SHARED_MEMORY_VOLUME, "mountPath": naming.SHARED_MEMORY_FOLDER})
    cache = resolved.spec.model_cache
    if cache is not None:
        volumes.append({"name": _CACHE_VOLUME, **_cache_source(cache)})
        mounts.append({"name": _CACHE_VOLUME, "mountPath": cache.mount_path})
    storage = resolved.spec.storage
    if storage is not None:
        volumes.append({"name": _STORAGE_VOLUME, "persistentVolumeClaim": {"claimName": storage.claim_name}})
        sub_path = {"subPath": storage.sub_path} if storage.sub_path else {}
        mounts.append({"name": _STORAGE_VOLUME, "mountPath": storage.mount_path, **sub_path})
    return volumes, mounts


def _shared_memory(place: Head | NodeGroup) -> Manifest | None:
    """The emptyDir at /dev/shm; None leaves it to KubeRay, which makes it as large as the memory limit, else the memory request."""
    if place.resources.shared_memory is not None:
        return {"medium": "Memory", "sizeLimit": place.resources.shared_memory}
    if isinstance(place, Head) and "memory" not in place.resources.all_requests | place.resources.all_limits:
        return {"medium": "Memory"}  # the small default request says nothing about how much Ray's object store needs
    return None


def _cache_source(cache: ModelCache) -> Manifest:
    if cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache.host_path is not None:
        # Directory: a folder that the kubelet made would belong to root, and user 1000 could not write there.
        return {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    return {"emptyDir": {} if cache.size_limit is None else {"sizeLimit": cache.size_limit}}


def _environment(job: JobView, resolved: RLJob, own: Iterable[Manifest], users: Iterable[EnvVar]) -> list[Manifest]:
    """Environment variables: ours, then the user's, which override ours of the same name."""
    storage, cache = resolved.spec.storage, resolved.spec.model_cache
    root = posixpath.normpath(storage.mount_path) if storage is not None else posixpath.join(naming.TEMPORARY_FOLDER, "rljob")
    variables = [
        _variable("HOME", naming.HOME_FOLDER),
        _variable("USER", "rljob"),
        # Ray would hide devices from workers without a Ray GPU of their own; the driver sets the visible devices of each worker.
        _variable("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1"),
        _variable(naming.ENV_RUN_FOLDER, posixpath.join(root, job.key.namespace, job.key.name)),
        _variable(naming.ENV_STORAGE_SHARED, "1" if storage is not None else "0"),
        *([] if cache is None else [_variable(naming.ENV_MODEL_CACHE, posixpath.normpath(cache.mount_path))]),
        *own,
    ]
    merged: list[Manifest] = merge({"env": variables}, {"env": [_from_user(variable) for variable in users]})["env"]
    return merged


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": literal(value)}


def _from_user(variable: EnvVar) -> Manifest:
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": _as_written(variable.value_from)}
    return _variable(variable.name, variable.value or "")


def _as_written(model: SpecModel) -> Manifest:
    """A section in Kubernetes' own words, without what the user left out."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def _merged(template: Manifest, overlays: Iterable[Mapping[str, Any] | None]) -> Manifest:
    labels = {key: template["metadata"]["labels"][key] for key in (naming.JOB_LABEL, naming.ATTEMPT_LABEL)}
    for overlay in overlays:
        template = merge(template, overlay or {})
    # Validation rejects these labels in a podTemplate, but a null for labels or metadata would still remove them.
    return merge(template, {"metadata": {"labels": labels}})
