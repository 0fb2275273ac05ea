"""Rules about what only Kubernetes honors: environment, scheduling, storage and pod templates.

Part of :mod:`rljob_api.validation`. The same manifest gets the same verdict everywhere, so a local run, which ignores these settings,
checks them too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rljob_api import naming, paths
from rljob_api.errors import FieldError, did_you_mean
from rljob_api.errors import field_error as _error
from rljob_api.rules.pod_template import list_problems, template_problems
from rljob_api.rules.secret_names import looks_secret, secret_problem
from rljob_api.v1alpha1.base import LABEL_KEY_PATTERN
from rljob_api.v1alpha1.nodes import DeviceType, Head, NodeGroup
from rljob_api.v1alpha1.pods import EnvFromSource, EnvVar, EnvVarSource
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import Reason

MIN_RAY_VERSION = (2, 53)
"""First version with the path of the readiness probe; token authentication, which every dashboard has, is older."""
_TOLERATION = {"key", "operator", "value", "effect", "tolerationSeconds"}
_OPERATORS = ("Exists", "Equal")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_AFFINITY = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_CANNOT_TRAIN = "on which neither training nor engines of RLJob run: they need PyTorch's CUDA or ROCm"
_OTHER_ACCELERATORS = {
    "aws.amazon.com/neuron": f"AWS Trainium or Inferentia devices, {_CANNOT_TRAIN}",
    "google.com/tpu": f"TPU chips, {_CANNOT_TRAIN}",
    "habana.ai/": f"Gaudi devices, {_CANNOT_TRAIN}",
    "gpu.intel.com/": f"Intel GPUs, {_CANNOT_TRAIN}",
    "huawei.com/": f"Ascend devices, {_CANNOT_TRAIN}",
    "nvidia.com/mig-": "slices of GPUs (MIG): a process can use only one of them, and NCCL connects none",
}
"""Prefix of a device resource -> why it cannot be used. MIG: NVIDIA's user guide, "Application considerations"."""
OWN_MOUNTS = (naming.TEMPORARY_FOLDER, naming.HOME_FOLDER, naming.SHARED_MEMORY_FOLDER, posixpath.dirname(naming.SPEC_FILE))


def environments(spec: RLJobSpec) -> Iterator[tuple[str, Sequence[EnvVar]]]:
    """Every list of environment variables and its path."""
    yield "spec.head.env", spec.head.env
    yield from ((f"spec.nodeGroups[{index}].env", group.env) for index, group in enumerate(spec.node_groups))
    yield from ((f"spec.components[{index}].env", component.env) for index, component in enumerate(spec.components))


def _variables(spec: RLJobSpec) -> Iterator[FieldError]:
    for path, env in environments(spec):
        for index, variable in enumerate(env):
            yield from _variable(f"{path}[{index}]", variable, is_component=path.startswith("spec.components"))


def _variable(path: str, variable: EnvVar, *, is_component: bool) -> Iterator[FieldError]:
    name = variable.name
    if name.startswith(naming.RESERVED_ENV_PREFIX) or name in naming.RESERVED_ENV:
        yield _error(f"{path}.name", name, "is set by the system", "remove it, or choose another name")
    source = variable.value_from
    if variable.value is None and source is None:
        yield _error(path, None, f"{name} has neither value nor valueFrom", 'add one of them; value: "" makes it empty')
    if variable.value is not None and source is not None:
        yield _error(path, None, f"{name} has both value and valueFrom", "remove one of them")
    elif variable.value and looks_secret(name):
        yield secret_problem(f"{path}.value", name, f"valueFrom: {{secretKeyRef: {{name: my-secret, key: {name}}}}}")
    if source is None:
        return
    if is_component:
        problem = f"{name} cannot come from elsewhere here, a worker shares its pod with others"
        yield _error(f"{path}.valueFrom", None, problem, "move it to the env of the component's nodeGroups")
    yield from _one_of(f"{path}.valueFrom", source)


def _one_of(path: str, source: EnvVarSource | EnvFromSource) -> Iterator[FieldError]:
    """Exactly one source must be named."""
    names = {name: str(info.alias) for name, info in type(source).model_fields.items() if name != "prefix"}
    given = [alias for name, alias in names.items() if getattr(source, name) is not None]
    if len(given) != 1:
        problem = f"has both {' and '.join(given)}" if given else "names no source"
        yield _error(path, None, problem, f"give exactly one of {', '.join(names.values())}")


def _whole_sources(spec: RLJobSpec) -> Iterator[FieldError]:
    """Variables from whole Secrets and ConfigMaps."""
    places: list[tuple[str, Head | NodeGroup]] = [("spec.head", spec.head)]
    places += [(f"spec.nodeGroups[{index}]", group) for index, group in enumerate(spec.node_groups)]
    for path, place in places:
        for index, source in enumerate(place.env_from):
            yield from _one_of(f"{path}.envFrom[{index}]", source)


def _devices(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, group in enumerate(spec.node_groups):
        path, resource = f"spec.nodeGroups[{index}]", group.device_resource
        if resource != "cpu" and not ("/" in resource and re.fullmatch(LABEL_KEY_PATTERN, resource)):
            remedy = "write cpu, or a name such as nvidia.com/gpu as the node's allocatable resources show it"
            yield _error(f"{path}.deviceResource", resource, "is not the name of a device resource", remedy)
        family = next((words for prefix, words in _OTHER_ACCELERATORS.items() if resource.startswith(prefix)), None)
        if family is not None and group.device_type is not DeviceType.CPU:
            remedy = "use NVIDIA or AMD GPUs, for example nvidia.com/gpu; deviceType: CPU computes on the node's cores instead"
            yield _error(f"{path}.deviceResource", resource, f"counts {family}", remedy)
        if resource == "cpu" and group.device_type is DeviceType.CUDA:
            problem = "contradicts deviceResource cpu, whose devices are the node's cores"
            yield _error(f"{path}.deviceType", "CUDA", problem, "remove it, or write the accelerator's deviceResource")
        if group.device_memory is not None and not group.devices_per_node:
            problem = "has no effect, devicesPerNode is 0"
            yield _error(f"{path}.deviceMemory", group.device_memory, problem, "remove it, or set devicesPerNode")
        if group.name in naming.RESERVED_GROUP_NAMES:
            problem = f"is one of the names that KubeRay, Kueue and Ray keep for themselves: {', '.join(naming.RESERVED_GROUP_NAMES)}"
            yield _error(f"{path}.name", group.name, problem, f"choose another name, for example {group.name}-0")


def _ray_version(spec: RLJobSpec) -> Iterator[FieldError]:
    text = spec.ray_version
    if text is None:
        return
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\.\d{1,4})?", text)
    lowest = ".".join(str(number) for number in MIN_RAY_VERSION)
    if match is None:
        yield _error("spec.rayVersion", text, "is not a version number", f'write it as "{lowest}.0", or leave it out')
    elif (int(match[1]), int(match[2])) < MIN_RAY_VERSION:
        problem = f"is older than {lowest}, the first Ray with the health check of readiness probes, /api/healthz"
        yield _error("spec.rayVersion", text, problem, f"use an image with Ray {lowest} or newer")


def _scheduling(spec: RLJobSpec) -> Iterator[FieldError]:
    places: list[tuple[paths.Parts, Head | NodeGroup]] = [(("spec", "head"), spec.head)]
    places += [(("spec", "nodeGroups", index), group) for index, group in enumerate(spec.node_groups)]
    for parts, place in places:
        for index, toleration in enumerate(place.tolerations):
            yield from _toleration((*parts, "tolerations", index), toleration)
        for key, value in (place.affinity or {}).items():
            path = paths.join((*parts, "affinity", key))
            if key not in _AFFINITY:
                yield _error(path, None, "is not a kind of affinity", did_you_mean(key, _AFFINITY) or f"known are {', '.join(_AFFINITY)}")
            elif not isinstance(value, Mapping):
                yield _error(path, value, "must be a section with keys", "indent its keys below it")


def _toleration(parts: paths.Parts, toleration: Mapping[str, object]) -> Iterator[FieldError]:
    for key in toleration:
        if key not in _TOLERATION:
            remedy = did_you_mean(key, _TOLERATION) or f"known are {', '.join(sorted(_TOLERATION))}"
            yield _error(paths.join((*parts, key)), None, "is not a field of a toleration", remedy)
    operator, effect = toleration.get("operator", "Equal"), toleration.get("effect")
    if operator not in _OPERATORS:
        yield _error(paths.join((*parts, "operator")), operator, "is not an operator of a toleration", "write Exists or Equal")
    if effect is not None and effect not in _EFFECTS:
        remedy = did_you_mean(str(effect), _EFFECTS) or f"write one of {', '.join(_EFFECTS)}"
        yield _error(paths.join((*parts, "effect")), effect, "is not an effect of a taint", remedy)
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        problem = "is only for effect NoExecute, which evicts after that time"
        yield _error(paths.join((*parts, "tolerationSeconds")), toleration["tolerationSeconds"], problem, "remove it, or write NoExecute")
    if operator == "Exists" and toleration.get("value"):
        problem = "has no meaning with operator Exists, which tolerates every value"
        yield _error(paths.join((*parts, "value")), toleration["value"], problem, "remove it, or write operator: Equal")
    if operator == "Equal" and not toleration.get("key"):
        yield _error(paths.join(parts), None, "names no key", "add key, or write operator: Exists to tolerate everything")


def _storage(spec: RLJobSpec) -> Iterator[FieldError]:
    storage = spec.storage
    if storage is None:
        return
    mount = posixpath.normpath(storage.mount_path)
    hidden = [own for own in OWN_MOUNTS if own == mount or own.startswith(mount.rstrip("/") + "/")]
    if hidden:
        problem = f"would hide {', '.join(hidden)}, which the pod needs"
        yield _error("spec.storage.mountPath", storage.mount_path, problem, "choose a folder of its own, for example /storage")
    if storage.sub_path.startswith("/") or ".." in storage.sub_path.split("/"):
        problem = "leaves the volume: it must be a folder below the volume's root"
        yield _error("spec.storage.subPath", storage.sub_path, problem, "write a relative path without ..")
    folder = spec.checkpoint.path
    if folder is not None and not posixpath.normpath(folder).startswith(mount.rstrip("/") + "/"):
        problem = f"lies outside of the volume, which is mounted at storage.mountPath {storage.mount_path}: it would be lost with the pods"
        remedy = f"write a folder below {storage.mount_path}, or remove it: the run folder with its checkpoints lies on the volume anyway"
        yield _error("spec.checkpoint.path", folder, problem, remedy)


def _failure_rules(spec: RLJobSpec) -> Iterator[FieldError]:
    ends = [reason.value for reason in Reason if reason.ends_attempt]
    seen: dict[str, int] = {}
    for index, rule in enumerate(spec.failure_policy.rules):
        path = f"spec.failurePolicy.rules[{index}].reason"
        if rule.reason not in ends:
            remedy = did_you_mean(rule.reason, ends) or f"write one of {', '.join(ends)}"
            yield _error(path, rule.reason, "is not a reason for which an attempt ends", remedy)
        elif rule.reason in seen:
            problem = f"never counts, rules[{seen[rule.reason]}] is about the same reason and comes first"
            yield _error(path, rule.reason, problem, "remove one of them")
        seen.setdefault(rule.reason, index)


def _templates(spec: RLJobSpec) -> Iterator[tuple[paths.Parts, Mapping[str, object] | None, bool]]:
    """Every pod template: its path, and whether it is merged into the head's pod (too)."""
    yield ("spec", "podTemplate"), spec.pod_template, True
    yield ("spec", "head", "podTemplate"), spec.head.pod_template, True
    for index, group in enumerate(spec.node_groups):
        yield ("spec", "nodeGroups", index, "podTemplate"), group.pod_template, False


def _pod_templates(spec: RLJobSpec) -> Iterator[FieldError]:
    for parts, template, is_head in _templates(spec):
        yield from template_problems(parts, template, is_head=is_head)


def _template_lists(spec: RLJobSpec) -> Iterator[FieldError]:
    for parts, template, _ in _templates(spec):
        yield from list_problems(parts, template)


FORM_RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_template_lists,)
"""Rules without which no pods can be made of a spec."""
RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _variables,
    _whole_sources,
    _devices,
    _ray_version,
    _scheduling,
    _storage,
    _failure_rules,
    *FORM_RULES,
    _pod_templates,
)
"""Rules between fields, each independent of the others."""
