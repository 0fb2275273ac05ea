"""The volume that jobs of a namespace write to, and a pod that reads it for the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.environment import needed
from e2e.jobs import CLAIM
from e2e.kubectl import Kubectl


class Volume:
    """Reads run folders on the shared volume through a pod that mounts it, which works on every cluster."""

    POD = "inspector"

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def files(self, folder: str) -> list[str]:
        """Relative paths of all files below a run folder, or a folder in it; empty if the folder does not exist."""
        found = self.kubectl(
            "exec", self.POD, "--", "sh", "-c", f"cd /volume/{self.kubectl.namespace}/{folder} 2>/dev/null && find . -type f || true"
        )
        return sorted(line.removeprefix("./") for line in found.splitlines())

    def read(self, path: str) -> str:
        return self.kubectl("exec", self.POD, "--", "cat", f"/volume/{self.kubectl.namespace}/{path}")

    def texts(self, folder: str, tests: str) -> list[str]:
        """Contents of all files below a folder that match find's ``tests``; a file that a running job removes meanwhile is empty."""
        show = """sh -c 'cat "$1" 2>/dev/null; printf "\\0"' _ {} \\;"""
        script = f"cd /volume/{self.kubectl.namespace}/{folder} && find . -type f \\( {tests} \\) -exec {show} || true"
        return self.kubectl("exec", self.POD, "--", "sh", "-c", script).split("\0")[:-1]


@contextmanager
def shared_volume(kubectl: Kubectl) -> Iterator[Volume]:
    """A ReadWriteMany claim in kubectl's namespace: of a PersistentVolume on a folder of the node, or of a storage class."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""},
    }
    storage_class = os.environ.get("RLJOB_E2E_STORAGE_CLASS")
    folder = None
    if storage_class:
        claim["spec"]["storageClassName"] = storage_class
    else:
        folder = Path(tempfile.mkdtemp(prefix="rljob-e2e-volume-"))
        folder.chmod(0o777)
        claim["spec"]["volumeName"] = kubectl.namespace
        kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": kubectl.namespace},
                "spec": {
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteMany"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(folder)},
                    "claimRef": {"namespace": kubectl.namespace, "name": CLAIM},
                },
            }
        )
    kubectl.apply(claim, inspector_pod())
    kubectl("wait", "--for=condition=Ready", f"pod/{Volume.POD}", "--timeout=60s", timeout_s=90)
    yield Volume(kubectl)
    kubectl("delete", "pod", Volume.POD, "--grace-period=0", "--force")
    if folder:
        kubectl("delete", "pvc", CLAIM, "--wait=false")
        kubectl("delete", "pv", kubectl.namespace, "--wait=false")
        shutil.rmtree(folder)


def inspector_pod() -> dict[str, object]:
    """A restricted pod with the volume at /volume."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": Volume.POD},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "shell",
                    "image": needed("RLJOB_E2E_OPERATOR_IMAGE"),
                    "command": ["sleep", "3600"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "work", "mountPath": "/volume"}],
                }
            ],
            "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }
