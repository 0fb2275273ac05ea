"""What KubeRay 1.6.2 and the kubelet do with a RayJob, as far as the tests need it.

Sources: KubeRay's CRD (tests/data/kuberay), ``controllers/ray/utils/validation.go`` and ``controllers/ray/common/pod.go``; Kubernetes'
``third_party/forked/golang/expansion/expand.go``.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA = Path(__file__).parents[3] / "data" / "kuberay" / "rayjob.schema.json"
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(closed(json.loads(SCHEMA.read_text())))


def closed(node: Any) -> Any:
    """The schema as JSON schema, objects closed to keys that the API server would drop or refuse."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    copy = {key: closed(child) for key, child in node.items()}
    if node.get("x-kubernetes-int-or-string") is True:
        copy.pop("anyOf", None)
        copy["type"] = ["integer", "string"]
    elif isinstance(node.get("properties"), dict) and node.get("x-kubernetes-preserve-unknown-fields") is not True:
        copy["additionalProperties"] = False
    return copy


def schema_problems(manifest: Mapping[str, Any]) -> list[str]:
    """Everything the CRD's schema refuses, and entries of list-maps that have the same key."""
    found = [f"{error.json_path}: {error.message}" for error in validator().iter_errors(manifest)]
    return found + [f"{path}: two entries {key}" for path, key in repeated(json.loads(SCHEMA.read_text()), manifest)]


def repeated(schema: Mapping[str, Any], value: Any, path: str = "$", root: Mapping[str, Any] | None = None) -> Iterator[tuple[str, tuple]]:
    root = root or schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if isinstance(value, dict):
        for key, child in value.items():
            if key in schema.get("properties", {}):
                yield from repeated(schema["properties"][key], child, f"{path}.{key}", root)
    if isinstance(value, list):
        keys = [tuple(item.get(name) for name in schema.get("x-kubernetes-list-map-keys", ())) for item in value if isinstance(item, dict)]
        yield from ((path, key) for key in sorted({key for key in keys if key and keys.count(key) > 1}, key=str))
        for index, item in enumerate(value):
            yield from repeated(schema["items"], item, f"{path}[{index}]", root)


def rule_problems(manifest: Mapping[str, Any]) -> list[str]:
    """What KubeRay's own validation, which the schema does not express, refuses about a RayJob as RLJob writes them."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    cluster = spec["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    groups = [("head", head), *((worker["groupName"], worker) for worker in workers)]
    head_env = {variable["name"] for variable in head["template"]["spec"]["containers"][0].get("env", [])}
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    broken = {
        "name": len(name) > 47 or not DNS_1035.fullmatch(name),
        "suspend needs shutdownAfterJobFinishes": spec.get("suspend", False) and not shuts_down,
        "TTL needs shutdownAfterJobFinishes": spec.get("ttlSecondsAfterFinished", 0) > 0
        and not spec.get("shutdownAfterJobFinishes", False),
        "no clusterSelector": "clusterSelector" in spec,
        "no deletionStrategy": "deletionStrategy" in spec,
        "backoffLimit": spec.get("backoffLimit", 0) < 0,
        "upgradeStrategy is forbidden under a RayJob": "upgradeStrategy" in cluster,
        "autoscaling is refused by Kueue": cluster.get("enableInTreeAutoscaling", False),
        "Kueue's group count": len(workers) > 17,
        "group called head": any(worker["groupName"] == "head" for worker in workers),
        "group names are unique": len({worker["groupName"] for worker in workers}) != len(workers),
        "token needs Ray 2.52": cluster["authOptions"]["mode"] == "token" and version(cluster["rayVersion"]) < (2, 52, 0),
        "variables of fault tolerance": bool(head_env & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}),
        "variable of the autoscaler": "RAY_enable_autoscaler_v2" in head_env,
    }
    return [rule for rule, is_broken in broken.items() if is_broken] + [text for group in groups for text in group_problems(*group)]


def group_problems(name: str, group: Mapping[str, Any]) -> Iterator[str]:
    params = group["rayStartParams"]
    if not group["template"]["spec"]["containers"]:
        yield f"{name}: no container"
    if "labels" in params:
        yield f"{name}: labels in rayStartParams"
    if group.get("resources") and set(params) & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield f"{name}: resources beside rayStartParams"
    if not all(isinstance(value, str) for value in params.values()):
        yield f"{name}: a start parameter that is not text"
    if not all(LABEL_KEY.fullmatch(key) and len(value) <= 63 for key, value in group.get("labels", {}).items()):
        yield f"{name}: not a label"
    if name != "head":
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{name}: replicas {group['minReplicas']} {group['replicas']} {group['maxReplicas']}"
        if "idleTimeoutSeconds" in group:
            yield f"{name}: idleTimeoutSeconds"


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def start_line(group: Mapping[str, Any], *, is_head: bool = False) -> str:
    """What KubeRay hands to ``/bin/bash -c --`` in the first container, before the kubelet expands it."""
    container, params = group["template"]["spec"]["containers"][0], dict(group["rayStartParams"])
    if group.get("labels"):
        params["labels"] = ",".join(f"{key}={value}" for key, value in sorted(group["labels"].items()))
    flags = "".join(flag(key, value) for key, value in sorted(params.items()))
    command = f"ulimit -n 65536; ray start {'--head ' if is_head else ''}{flags} --block"
    own = "".join(f" {word} " for word in [*container.get("command", []), *container.get("args", [])])
    assert "ray start" not in own, "KubeRay would not add its own command"
    return f"{own} && {command}" if own else command


def flag(option: str, value: str) -> str:
    """A start parameter on the command line (``convertParamMap``): a switch is there or not, whatever its name."""
    if value.lower() in ("true", "false") and option not in ("log-color", "include-dashboard"):
        return f" --{option} " if value.lower() == "true" else ""
    return f" --{option}={value} "


def expand(text: str, env: Mapping[str, str]) -> str:
    """The kubelet's expansion of args and values: ``$(NAME)`` when NAME is known, ``$$`` is ``$``, the rest stays."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def pod_security_problems(template: Mapping[str, Any]) -> Iterator[str]:
    """What the Pod Security level "restricted" refuses, and a root file system that can be written."""
    spec = template["spec"]
    pod = spec.get("securityContext", {})
    if pod.get("runAsNonRoot") is not True or pod.get("runAsUser") == 0:
        yield "runs as root"
    if pod.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    yield from (field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    yield from (f"volume {volume['name']}" for volume in spec.get("volumes", []) if not set(volume) - {"name"} <= allowed)
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{container['name']}: allowPrivilegeEscalation"
        if context.get("capabilities", {}).get("drop") != ["ALL"] or set(context["capabilities"].get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"{container['name']}: capabilities"
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: readOnlyRootFilesystem"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{container['name']}: hostPort"
