"""Pod templates of the head and the worker nodes.

They satisfy the "restricted" Pod Security Standard and have a read-only root file system. podTemplate can change anything except the
labels by which the operator finds the pods.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rljob_api import naming
from rljob_api.v1alpha1.nodes import EnvVar, Head, NodeGroup
from rljob_api.v1alpha1.rljob import RLJob
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
_SPEC_VOLUME, _STORAGE_VOLUME, _SHARED_MEMORY_VOLUME = "rljob-spec", "storage", "shared-memory"
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
            # By default Ray kills a driver 3 seconds after asking it to stop; a checkpoint takes longer.
            _variable("RAY_JOB_STOP_WAIT_TIME_S", str(TERMINATION_GRACE_S - STOP_MARGIN_S)),
        ],
    )
    spec, container = template["spec"], template["spec"]["containers"][0]
    spec["serviceAccountName"] = naming.access_name(job.key.name)
    spec["automountServiceAccountToken"] = True
    spec["volumes"].append({"name": _SPEC_VOLUME, "configMap": {"name": naming.rayjob_name(job.key.name, attempt)}})
    container["volumeMounts"].append({"name": _SPEC_VOLUME, "mountPath": posixpath.dirname(naming.SPEC_FILE), "readOnly": True})
    return _merged(template, (resolved.spec.pod_template, head.pod_template), pod_labels(job, attempt))


def worker_template(job: JobView, resolved: RLJob, attempt: int, group: NodeGroup, first_rank: int) -> Manifest:
    """Pod template of the nodes of a group."""
    index = {"name": ENV_REPLICA_INDEX, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{REPLICA_LABEL}']"}}}
    template = _template(job, resolved, attempt, place=group, image=group.image or str(resolved.spec.image), env=[index])
    spec, container = template["spec"], template["spec"]["containers"][0]
    spec["automountServiceAccountToken"] = False
    container["args"] = [literal(rank_prelude(first_rank, group.nodes))]
    if group.devices_per_node and group.device_resource != "cpu":
        container["resources"].setdefault("limits", {})[group.device_resource] = str(group.devices_per_node)
    return _merged(template, (resolved.spec.pod_template, group.pod_template), pod_labels(job, attempt))


def _template(job: JobView, resolved: RLJob, attempt: int, *, place: Head | NodeGroup, image: str, env: Sequence[Manifest]) -> Manifest:
    """The common part of all pod templates."""
    volumes, mounts = _volumes(resolved, place)
    container = {
        "name": naming.RAY_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": _environment(job, resolved, env, place.env),
        "resources": _resources(place),
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"exec": {"command": list(PRE_STOP)}}},
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
    if place.node_selector:
        spec["nodeSelector"] = dict(place.node_selector)
    if place.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in place.tolerations]
    if place.affinity:
        spec["affinity"] = dict(place.affinity)
    return {"metadata": {"labels": pod_labels(job, attempt)}, "spec": spec}


def _resources(place: Head | NodeGroup) -> Manifest:
    """Resources of the Ray container. No CPU limit: it would throttle the pod even when cores are idle."""
    cpu, memory = place.resources.cpu, place.resources.memory
    requests = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value is not None}
    resources: dict[str, dict[str, str]] = {}
    if requests:
        resources["requests"] = requests
    if memory is not None:
        resources["limits"] = {"memory": memory}
    return resources


def _volumes(resolved: RLJob, place: Head | NodeGroup) -> tuple[list[Manifest], list[Manifest]]:
    volumes: list[Manifest] = [{"name": name, "emptyDir": {}} for name in _EMPTY_VOLUMES]
    mounts: list[Manifest] = [{"name": name, "mountPath": path} for name, path in _EMPTY_VOLUMES.items()]
    if place.resources.shared_memory is not None:
        volumes.append({"name": _SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": place.resources.shared_memory}})
        mounts.append({"name": _SHARED_MEMORY_VOLUME, "mountPath": naming.SHARED_MEMORY_FOLDER})
    storage = resolved.spec.storage
    if storage is not None:
        volumes.append({"name": _STORAGE_VOLUME, "persistentVolumeClaim": {"claimName": storage.claim_name}})
        sub_path = {"subPath": storage.sub_path} if storage.sub_path else {}
        mounts.append({"name": _STORAGE_VOLUME, "mountPath": storage.mount_path, **sub_path})
    return volumes, mounts


def _environment(job: JobView, resolved: RLJob, own: Iterable[Manifest], users: Iterable[EnvVar]) -> list[Manifest]:
    """Environment variables: ours, then the user's, which override ours of the same name."""
    storage = resolved.spec.storage
    root = posixpath.normpath(storage.mount_path) if storage is not None else posixpath.join(naming.TEMPORARY_FOLDER, "rljob")
    variables = [
        _variable("HOME", naming.HOME_FOLDER),
        _variable("USER", "rljob"),
        # Ray would hide devices from workers without a Ray GPU of their own; the driver sets the visible devices of each worker.
        _variable("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1"),
        _variable(naming.ENV_RUN_FOLDER, posixpath.join(root, job.key.name)),
        _variable(naming.ENV_STORAGE_SHARED, "1" if storage is not None else "0"),
        *own,
    ]
    merged: list[Manifest] = merge({"env": variables}, {"env": [_from_user(variable) for variable in users]})["env"]
    return merged


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": literal(value)}


def _from_user(variable: EnvVar) -> Manifest:
    reference = variable.secret_key_ref
    if reference is not None:
        return {"name": variable.name, "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}
    return _variable(variable.name, variable.value or "")


def _merged(template: Manifest, overlays: Iterable[Mapping[str, Any] | None], labels: Mapping[str, str]) -> Manifest:
    for overlay in overlays:
        template = merge(template, overlay or {})
    # Validation rejects these labels in a podTemplate, but a null for labels or metadata would still remove them.
    return merge(template, {"metadata": {"labels": dict(labels)}})
