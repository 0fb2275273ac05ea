"""The shape that a partial pod template may have: what would break the generated pod is refused, the rest is passed on.

The operator merges lists of named objects by name, so names must be there; KubeRay starts Ray in the first container and appends its own
command, labels and environment, so those cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rljob_api import naming, paths
from rljob_api.errors import FieldError, did_you_mean
from rljob_api.errors import field_error as _error
from rljob_api.rules.secret_names import looks_secret, secret_problem

LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists whose entries are distinguished by a key; the operator merges them entry by entry."""
OVERWRITE_COMMAND = "ray.io/overwrite-container-cmd"
KUBERAY_INIT_CONTAINER = "wait-gcs-ready"
_ACCOUNT = ("serviceAccountName", "serviceAccount")
_TOP = ("metadata", "spec")
_METADATA = ("labels", "annotations")


def template_problems(parts: paths.Parts, template: Mapping[str, object] | None, *, is_head: bool) -> Iterator[FieldError]:
    """Every problem of one partial pod template.

    Args:
        parts: path of the template.
        template: the template; None has no problems.
        is_head: whether it is merged into the head's pod (too), which has an account of its own.
    """
    if template is None:
        return
    for key, value in template.items():
        if key not in _TOP:
            remedy = did_you_mean(key, _TOP) or "a pod template has metadata and spec"
            yield _error(paths.join((*parts, key)), None, "is not part of a pod template", remedy)
        elif not isinstance(value, Mapping):
            yield _error(paths.join((*parts, key)), value, "must be a section with keys", "indent its keys below it")
    yield from _metadata((*parts, "metadata"), _mapping(template.get("metadata")))
    spec = _mapping(template.get("spec"))
    yield from _pod((*parts, "spec"), spec, is_head=is_head)
    if "containers" in spec and spec["containers"] is None:
        problem = "would remove every container"
        yield _error(paths.join((*parts, "spec", "containers")), None, problem, f"remove the line, or list name: {naming.RAY_CONTAINER}")
    for field in ("containers", "initContainers"):
        yield from _containers((*parts, "spec", field), spec.get(field), field)


def list_problems(parts: paths.Parts, template: Mapping[str, object] | None) -> Iterator[FieldError]:
    """Lists of one partial pod template that cannot be merged with those of the generated pod."""
    spec = _mapping((template or {}).get("spec"))
    for field in ("volumes", "imagePullSecrets", "containers", "initContainers"):
        yield from _keyed((*parts, "spec", field), spec.get(field), field)
    for field in ("containers", "initContainers"):
        for index, container in _items(spec.get(field)):
            for inner in ("volumeMounts", "ports", "env"):
                yield from _keyed((*parts, "spec", field, index, inner), container.get(inner), inner)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _items(items: object) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Entries of a list with their index."""
    return ((index, _mapping(item)) for index, item in enumerate(items if isinstance(items, list) else []))


def _metadata(parts: paths.Parts, metadata: Mapping[str, object]) -> Iterator[FieldError]:
    for key, value in metadata.items():
        path = paths.join((*parts, key))
        if key not in _METADATA:
            remedy = did_you_mean(key, _METADATA) or "remove it, only labels and annotations are passed on"
            yield _error(path, None, "is set by KubeRay", remedy)
        elif not isinstance(value, Mapping):
            yield _error(path, value, "must be a section with keys", "indent its keys below it")
    for key, value in _mapping(metadata.get("labels")).items():
        if key in naming.RESERVED_LABELS or key.startswith(naming.RESERVED_LABEL_PREFIXES):
            yield _error(paths.join((*parts, "labels", key)), value, "is a label that the system sets", "use a prefix of your own")
    if OVERWRITE_COMMAND in _mapping(metadata.get("annotations")):
        problem = "would keep KubeRay from starting Ray"
        yield _error(paths.join((*parts, "annotations", OVERWRITE_COMMAND)), None, problem, "remove it")


def _pod(parts: paths.Parts, spec: Mapping[str, object], *, is_head: bool) -> Iterator[FieldError]:
    restart = spec.get("restartPolicy", "Never")
    if restart != "Never":
        problem = "would hide that a node failed; a failed attempt is followed by another as failurePolicy says"
        yield _error(paths.join((*parts, "restartPolicy")), restart, problem, "remove it")
    if is_head:
        for field in (*_ACCOUNT, "automountServiceAccountToken"):
            if field in spec:
                problem = "cannot be changed for the head, which writes progress under the job's own account"
                yield _error(paths.join((*parts, field)), spec[field], problem, "write spec.serviceAccount, or nodeGroups[].podTemplate")
        return
    for field in _ACCOUNT:
        yield from account_problems(paths.join((*parts, field)), spec.get(field))


def account_problems(path: str, name: object) -> Iterator[FieldError]:
    """A job must not run under an account that RLJob made for another one, which may write that one's progress."""
    if isinstance(name, str) and name.endswith(naming.access_name("")):
        yield _error(path, name, "is a name of the accounts that RLJob makes, each for one job", "use an account of your own")


def _keyed(parts: paths.Parts, items: object, field: str) -> Iterator[FieldError]:
    """A list must hold objects that carry the key by which they are merged, each once."""
    key = LIST_KEYS[field]
    if items is None:
        return
    if not isinstance(items, list):
        yield _error(paths.join(parts), items, "must be a list", "start every entry with a dash")
        return
    seen: dict[object, int] = {}
    for index, item in enumerate(items):
        value = item.get(key) if isinstance(item, Mapping) else None
        if not isinstance(value, (str, int)) or value == "":
            yield _error(paths.join((*parts, index)), None, f"has no {key}, by which it is merged with what is generated", f"add {key}")
        elif value in seen:
            path = paths.join((*parts, index, key))
            yield _error(path, value, f"is already the {key} of {field}[{seen[value]}]", "give every entry its own")
        else:
            seen[value] = index


def _containers(parts: paths.Parts, items: object, field: str) -> Iterator[FieldError]:
    for index, container in _items(items):
        name, here = container.get("name"), (*parts, index)
        if field == "containers" and index == 0 and isinstance(name, str) and name != naming.RAY_CONTAINER:
            problem = f"is not {naming.RAY_CONTAINER}: KubeRay starts Ray in the first container"
            yield _error(paths.join((*here, "name")), name, problem, f"begin the list with name: {naming.RAY_CONTAINER}, others follow it")
        if field == "containers" and name == naming.RAY_CONTAINER:
            for key in ("command", "args"):
                if key in container:
                    problem = f"cannot be set for {naming.RAY_CONTAINER}: KubeRay starts Ray there, under the node's rank"
                    remedy = "remove it; set-up belongs into the image or initContainers"
                    yield _error(paths.join((*here, key)), container[key], problem, remedy)
            security = _mapping(container.get("securityContext"))
            if security.get("privileged") is True and security.get("allowPrivilegeEscalation") is not True:
                problem = "contradicts allowPrivilegeEscalation, which is false unless it is set"
                remedy = "write allowPrivilegeEscalation: true beside it"
                yield _error(paths.join((*here, "securityContext", "privileged")), True, problem, remedy)
        if field == "initContainers" and name == KUBERAY_INIT_CONTAINER:
            yield _error(paths.join((*here, "name")), name, "is the name of KubeRay's own", "choose another name")
        yield from _env((*here, "env"), container.get("env"))


def _env(parts: paths.Parts, items: object) -> Iterator[FieldError]:
    for index, variable in _items(items):
        name = str(variable.get("name", ""))
        if name.startswith(naming.RESERVED_ENV_PREFIX) or name in naming.RESERVED_ENV:
            yield _error(paths.join((*parts, index, "name")), name, "is set by the system", "remove it, or choose another name")
        if variable.get("value") and looks_secret(name):
            remedy = f"valueFrom: {{secretKeyRef: {{name: my-secret, key: {name}}}}}"
            yield secret_problem(paths.join((*parts, index, "value")), name, remedy)
