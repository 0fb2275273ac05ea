"""What a scenario does and sees: RLJobs and their conditions, and KubeRay's part on RayJobs, RayClusters and pods."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml

from e2e.objects import AlreadyExistsError, NotThereError, Objects
from tests.integration.kube_api import ApiServer
from tests.support.pace import HANG_S

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class World:
    """One namespace of one API server."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self._objects = Objects(api.kubeconfig)

    # what a user does

    def kubectl(self, *args: str, input: str | None = None) -> str:
        return self.api.kubectl("-n", self.namespace, *args, input=input)

    def apply(self, manifest: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump(dict(manifest)))

    def job(self, name: str, **spec: Any) -> None:
        """examples/quickstart.yaml under this name, with fields of the spec replaced."""
        manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
        manifest["metadata"]["name"] = name
        manifest["spec"] |= spec
        self.apply(manifest)

    def patch(self, kind: str, name: str, change: Mapping[str, Any], *flags: str) -> None:
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change), *flags)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            return self._objects.get(kind, name, self.namespace)
        except NotThereError:
            return None

    def list(self, kind: str, job: str) -> list[dict[str, Any]]:
        """Objects of the job; ``kind``: plurals, comma-separated."""
        return [found for plural in kind.split(",") for found in self._objects.items(plural, f"rljob.dev/job={job}", self.namespace)]

    def status(self, name: str) -> dict[str, Any]:
        return (self.get("rljob", name) or {}).get("status", {})

    def conditions(self, name: str) -> dict[str, str]:
        """Type -> "Status/Reason"."""
        return {c["type"]: f"{c['status']}/{c['reason']}" for c in self.status(name).get("conditions", [])}

    def message(self, name: str, condition: str) -> str:
        return next(c["message"] for c in self.status(name)["conditions"] if c["type"] == condition)

    def until(self, what: str, probe: Callable[[], T], timeout_s: float = HANG_S) -> T:
        deadline = time.monotonic() + timeout_s
        while not (answer := probe()):
            assert time.monotonic() < deadline, (
                f"{what}: not within {timeout_s:.0f} s; last {answer!r}\n{self.kubectl('get', 'rlj,rayjobs', '-o', 'yaml')[-6000:]}"
            )
            time.sleep(0.1)
        return answer

    def until_condition(self, name: str, condition: str, wanted: str, timeout_s: float = HANG_S) -> None:
        self.until(f"{condition} becomes {wanted}", lambda: self.conditions(name).get(condition) == wanted, timeout_s)

    def until_child(self, name: str) -> dict[str, Any]:
        return self.until(f"RayJob {name}", lambda: self.get("rayjob", name))

    # KubeRay's part

    def rayjob_status(self, name: str, **status: Any) -> None:
        """What KubeRay would write into a RayJob's status."""
        self._status("rayjob", name, status)

    def _status(self, kind: str, name: str, status: Mapping[str, Any]) -> None:
        self._objects.merge(kind, name, {"status": status}, self.namespace, "status")

    def cluster(self, rayjob: str, cluster: str) -> None:
        """Make a RayCluster for a RayJob as KubeRay does and name it in the RayJob's status."""
        parent = self.until_child(rayjob)
        labels = parent["metadata"]["labels"]
        self._objects.create(
            {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "metadata": {"name": cluster, "labels": labels, "ownerReferences": [owner(parent)]},
                "spec": parent["spec"]["rayClusterSpec"],
            },
            self.namespace,
        )
        self.rayjob_status(rayjob, jobDeploymentStatus="Initializing", rayClusterName=cluster)

    def pod(self, name: str, rayjob: str, cluster: str, group: str, phase: str = "Running", ready: bool = True, **status: Any) -> None:
        """Make a pod as KubeRay does, and its status as the kubelet does."""
        parent = self.until_child(rayjob)
        labels = parent["metadata"]["labels"] | {
            "ray.io/cluster": cluster,
            "ray.io/group": group,
            "ray.io/node-type": "head" if group == "headgroup" else "worker",
            "ray.io/is-ray-node": "yes",
        }
        container = {"name": "ray", "image": "example.com/rljob-runtime:test"}
        metadata = {"name": name, "labels": labels, "ownerReferences": [owner(parent)]}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        with contextlib.suppress(AlreadyExistsError):  # only its status is new
            self._objects.create(document, self.namespace)
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        self._status("pod", name, {"phase": phase, "conditions": conditions, **status})

    def runs(self, rayjob: str, cluster: str = "c1") -> None:
        """A whole start: cluster, head, one ready node, driver running."""
        self.cluster(rayjob, cluster)
        self.pod(f"{cluster}-head", rayjob, cluster, "headgroup")
        self.pod(f"{cluster}-w0", rayjob, cluster, "local")
        self.rayjob_status(rayjob, **RUNNING, rayJobInfo={"startTime": now_text()})

    def pods_gone(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(NotThereError):
                self._objects.delete("pod", name, self.namespace, grace_s=0)


def owner(parent: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": parent["apiVersion"],
        "kind": parent["kind"],
        "name": parent["metadata"]["name"],
        "uid": parent["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
