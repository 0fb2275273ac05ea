"""Installs CRDs and waits until the server serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.cluster.build import module_files
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.versions import KUBERAY_CRDS
from e2e.cluster.wait import wait_until

RLJOB_CRD = REPOSITORY / "crds" / "rljobs.rljob.dev.yaml"

_ESTABLISHED_DEADLINE_S = 300.0


def install(kubectl: Kubectl, files: list[Path]) -> None:
    """Apply CRD files and wait until all are established.

    Raises:
        ClusterError: a file is missing, or the server refuses one, or does not serve it within 60 s.
    """
    absent = [str(file) for file in files if not file.exists()]
    if absent:
        raise ClusterError(f"no such CRD file: {', '.join(absent)}. Remedy: python -m e2e.cluster build, or make generate for RLJob's own")
    names = kubectl.apply(*files)

    def check() -> str | None:
        answer = kubectl.json("get", *names)
        waiting = [item["metadata"]["name"] for item in answer.get("items", [answer]) if not established(item)]
        return f"{', '.join(waiting)} not established" if waiting else None

    wait_until("CRDs to be served", check, deadline_s=_ESTABLISHED_DEADLINE_S, poll_s=0.5)


def established(crd: dict[str, Any]) -> bool:
    """Whether the server serves it; ``kubectl wait`` fails on one so new that it has no conditions yet."""
    conditions = crd.get("status", {}).get("conditions") or []
    return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)


def install_all(kubectl: Kubectl) -> None:
    """Apply KubeRay's CRDs and RLJob's own.

    Raises:
        ClusterError: see :func:`install`.
    """
    install(kubectl, [*module_files(KUBERAY_CRDS), RLJOB_CRD])
