"""What the scenarios of e2e and ``bench.chaos`` read from the environment, for a cluster that is up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from e2e.cluster import build, control_plane, images
from e2e.cluster.state import StateFolder


def variables(folder: StateFolder, say: build.Say = build.silent) -> dict[str, str]:
    """Names and values; images whose content has changed are built and put on the node.

    Raises:
        ClusterError: the cluster is not up, or an image cannot be built.
    """
    folder.require()
    return {
        "KUBECONFIG": str(folder.kubeconfig),
        "RLJOB_E2E_OPERATOR_IMAGE": images.image("operator", folder, say),
        "RLJOB_E2E_RUNTIME_IMAGE": images.image("runtime", folder, say),
        "RLJOB_E2E_AUDIT_LOG": str(control_plane.audit_log(folder)),
        "RLJOB_E2E_KUBECTL": str(build.binary("kubectl")),
        "RLJOB_E2E_HELM": str(build.binary("helm")),
    }


def as_shell(values: Mapping[str, str]) -> str:
    """Commands that a shell evaluates."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
