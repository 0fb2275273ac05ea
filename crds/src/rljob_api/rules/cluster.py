"""Rules about what a job says of itself to Kubernetes: account, labels, resources, the cache of models.

Part of :mod:`rljob_api.validation`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator

from rljob_api import naming, paths
from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.quantities import parse
from rljob_api.rules.pod_template import OVERWRITE_COMMAND, account_problems
from rljob_api.rules.pods import OWN_MOUNTS
from rljob_api.v1alpha1.nodes import Head, NodeGroup
from rljob_api.v1alpha1.pods import NodeResources
from rljob_api.v1alpha1.rljob import RLJobSpec

_INSTEAD = {
    naming.QUEUE_LABEL: "write spec.queue.name",
    naming.QUEUE_PRIORITY_LABEL: "write spec.queue.priorityClass",
}
"""Labels that a field of the spec writes."""
PLAIN_RESOURCES, HUGE_PAGES = ("cpu", "memory", "ephemeral-storage"), "hugepages-"
"""Resources of a container that have no prefix of their own, and what huge pages begin with."""
MIN_MEMORY_BYTES = 1 << 20
"""Less than this is a slip of the pen: no container runtime starts a container with it."""
MAX_SPEC_BYTES = 192 * 1024
"""The spec is an annotation of the head pod, and Kubernetes takes 256 KiB for all annotations of an object."""


def _account(spec: RLJobSpec) -> Iterator[FieldError]:
    account = spec.service_account
    if account is None:
        return
    path = "spec.serviceAccount"
    yield from account_problems(f"{path}.name", account.name)
    if account.name is not None and account.annotations:
        problem = f"are for the account that RLJob makes, and name says that {account.name} exists"
        yield _error(f"{path}.annotations", None, problem, "annotate that account yourself, or remove name")


def _multi_kueue(spec: RLJobSpec) -> Iterator[FieldError]:
    if spec.queue is not None and spec.queue.multi_kueue and (spec.service_account is None or spec.service_account.name is None):
        problem = "runs the job on another cluster, where the account that RLJob makes does not exist"
        yield _error("spec.queue.multiKueue", True, problem, "set serviceAccount.name to an account that exists there")


def _metadata(spec: RLJobSpec) -> Iterator[FieldError]:
    for key, value in spec.metadata.labels.items():
        path = paths.join(("spec", "metadata", "labels", key))
        if key in _INSTEAD:
            yield _error(path, value, "is written by another field", _INSTEAD[key])
        elif key.startswith("ray.io/") and key not in naming.SCHEDULER_LABELS:
            problem = (
                f"is a label of KubeRay's own; of those that start with ray.io/ only {', '.join(naming.SCHEDULER_LABELS)} are settings"
            )
            yield _error(path, value, problem, "remove it")
        elif key in naming.OWN_LABELS or (key.startswith(naming.RESERVED_LABEL_PREFIXES) and not key.startswith("ray.io/")):
            yield _error(path, value, "is a label that the system sets", "use a prefix of your own")
    for key in spec.metadata.annotations:
        path = paths.join(("spec", "metadata", "annotations", key))
        if key == OVERWRITE_COMMAND:
            yield _error(path, None, "would keep KubeRay from starting Ray", "remove it")
        elif key in naming.DISRUPTION_ANNOTATIONS and spec.do_not_disrupt:
            yield _error(path, None, "is written by spec.doNotDisrupt", "remove one of them")


def _resources(spec: RLJobSpec) -> Iterator[FieldError]:
    places: list[tuple[paths.Parts, Head | NodeGroup]] = [(("spec", "head"), spec.head)]
    places += [(("spec", "nodeGroups", index), group) for index, group in enumerate(spec.node_groups)]
    for parts, place in places:
        resources, here = place.resources, (*parts, "resources")
        limits = resources.all_limits
        if isinstance(place, NodeGroup) and place.device_resource != "cpu":
            device, sections = place.device_resource, (("requests", resources.requests), ("limits", resources.limits))
            for section, given in sections:
                if device in given:
                    problem = f"is the group's deviceResource, of which it asks for devicesPerNode {place.devices_per_node}"
                    yield _error(paths.join((*here, section, device)), given[device], problem, "remove it")
        for name, request in resources.all_requests.items():
            if name in limits and parse(request) > parse(limits[name]):
                path = paths.join((*here, "requests", name)) if name in resources.requests else paths.join((*here, name))
                problem = f"is more than the limit of {name}, {limits[name]}"
                yield _error(path, request, problem, f"raise limits.{name}, or lower the request")


def _other_resources(spec: RLJobSpec) -> Iterator[FieldError]:
    """What the API server refuses of resources that cannot be overcommitted (``ValidateResourceRequirements`` of Kubernetes 1.36).

    It takes such a RayJob, and then none of its pods.
    """
    for parts, resources in _resources_of(spec):
        limits = resources.all_limits
        for section, given in (("requests", resources.requests), ("limits", resources.limits)):
            for name, value in given.items():
                path, is_huge = paths.join((*parts, section, name)), name.startswith(HUGE_PAGES)
                if name in PLAIN_RESOURCES:
                    continue
                if "/" not in name and not is_huge:
                    remedy = f"write {', '.join(PLAIN_RESOURCES)}, or a name with a prefix, such as rdma/ib; devices are in devicesPerNode"
                    yield _error(path, value, "is not a resource of a container", remedy)
                elif section == "requests" and parse(value) != parse(limits.get(name, "0")):
                    problem = f"differs from the limit of {name}, {limits.get(name, 'which is missing')}: Kubernetes wants both equal"
                    yield _error(path, value, problem, "write it below limits, and nothing below requests")
                elif not is_huge and parse(value) % 1:
                    yield _error(path, value, "is not a whole number, and such a resource cannot be divided", "write a whole number")
                elif is_huge and not {"cpu", "memory"} & {*limits, *resources.all_requests}:
                    yield _error(path, value, "needs cpu or memory beside it", "set resources.memory")


def _memory_sizes(spec: RLJobSpec) -> Iterator[FieldError]:
    """Quantities of memory that are none: 0, a number without a unit, or ``m``, which is a thousandth, where Mi was meant."""
    sizes: list[tuple[paths.Parts, str | None]] = []
    for parts, resources in _resources_of(spec):
        named = {"memory": resources.memory, "sharedMemory": resources.shared_memory}
        sizes += [((*parts, name), value) for name, value in named.items()]
        sizes.append(((*parts, "limits", "memory"), resources.limits.get("memory")))
        request = resources.requests.get("memory")
        sizes.append(((*parts, "requests", "memory"), None if request is not None and not parse(request) else request))  # 0 reserves none
    sizes += [(("spec", "nodeGroups", index, "deviceMemory"), group.device_memory) for index, group in enumerate(spec.node_groups)]
    sizes.append((("spec", "modelCache", "sizeLimit"), None if spec.model_cache is None else spec.model_cache.size_limit))
    for path, value in sizes:
        if value is not None and (num_bytes := parse(value)) < MIN_MEMORY_BYTES:
            number = re.match(r"\+?([0-9.]+)", value)
            example = f"{number[1]}Gi" if number is not None and num_bytes else "16Gi"
            problem = f"is {float(num_bytes):g} bytes"
            yield _error(paths.join(path), value, problem, f"write a quantity with its unit, for example {example}, or remove it")


def _no_cpu(spec: RLJobSpec) -> Iterator[FieldError]:
    """Ray counts the CPUs of a node by its request, or else its limit; none of its workers needs so few. The head has none."""
    for index, group in enumerate(spec.node_groups):
        parts, resources = ("spec", "nodeGroups", index, "resources"), group.resources
        given: list[tuple[paths.Parts, str | None]] = [((*parts, "cpu"), resources.cpu)]
        given += [((*parts, section, "cpu"), getattr(resources, section).get("cpu")) for section in ("requests", "limits")]
        for path, value in given:
            if value is not None and not parse(value):
                remedy = 'write a quantity above 0, for example "4", or remove it'
                yield _error(paths.join(path), value, "leaves no CPU, and Ray starts no worker there", remedy)


def _shared_memory(spec: RLJobSpec) -> Iterator[FieldError]:
    """/dev/shm counts against the container's memory: files that fill it kill the pod before it is full."""
    for parts, resources in _resources_of(spec):
        shared, limit = resources.shared_memory, resources.memory_limit
        if shared is not None and limit is not None and parse(shared) > parse(limit):
            problem = f"is more than the memory limit of the pod, {limit}, against which it counts"
            yield _error(paths.join((*parts, "sharedMemory")), shared, problem, f"use at most {limit}, or raise memory")


def _resources_of(spec: RLJobSpec) -> Iterator[tuple[paths.Parts, NodeResources]]:
    yield ("spec", "head", "resources"), spec.head.resources
    for index, group in enumerate(spec.node_groups):
        yield ("spec", "nodeGroups", index, "resources"), group.resources


def _model_cache(spec: RLJobSpec) -> Iterator[FieldError]:
    cache = spec.model_cache
    if cache is None:
        return
    path = "spec.modelCache"
    kinds = {"claimName": cache.claim_name, "hostPath": cache.host_path, "sizeLimit": cache.size_limit}
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) > 1:
        yield _error(
            path, None, f"has both {' and '.join(given)}", "give one of them: where models lie, or how large a volume of the pod's own is"
        )
    mount = posixpath.normpath(cache.mount_path)
    storage = None if spec.storage is None else posixpath.normpath(spec.storage.mount_path)
    hidden = [own for own in (*OWN_MOUNTS, storage) if own is not None and (own == mount or own.startswith(mount.rstrip("/") + "/"))]
    if hidden:
        problem = f"would hide {', '.join(hidden)}, which the pod needs"
        yield _error(f"{path}.mountPath", cache.mount_path, problem, "choose a folder of its own, for example /cache")
    owners = [("spec.head.env", spec.head.env), *((f"spec.nodeGroups[{i}].env", group.env) for i, group in enumerate(spec.node_groups))]
    for where, variables in owners:
        for index, variable in enumerate(variables):
            if variable.name == naming.ENV_MODEL_CACHE:
                problem = f"would lead past spec.modelCache, which is at {cache.mount_path}"
                yield _error(f"{where}[{index}].name", variable.name, problem, "remove one of them")


def _size(spec: RLJobSpec) -> Iterator[FieldError]:
    num_bytes = len(spec.model_dump_json(by_alias=True, exclude_defaults=True).encode())
    if num_bytes > MAX_SPEC_BYTES:
        problem = f"is {num_bytes:,} bytes without defaults; at most {MAX_SPEC_BYTES:,} fit on the head pod, which carries it"
        yield _error("spec", None, problem, "move long texts (templates, prompts, code) to files on spec.storage, and name those")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _account,
    _multi_kueue,
    _metadata,
    _resources,
    _other_resources,
    _memory_sizes,
    _no_cpu,
    _shared_memory,
    _model_cache,
    _size,
)
"""Rules between fields, each independent of the others."""
