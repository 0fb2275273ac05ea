"""Which clusters tests may change things in."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from e2e.cluster.errors import ContextRefusedError

OWN_CONTEXT = "rljob-e2e"
ALLOWED_CONTEXTS = (OWN_CONTEXT, "kind-*", "k3d-*", "minikube")
CONTEXTS_VARIABLE = "RLJOB_E2E_CONTEXTS"


def require_allowed_context(kubeconfig: Path, *, environment: Mapping[str, str] | None = None) -> str:
    """The file's current context, if tests may use it: they make and delete namespaces, CRDs and cluster roles.

    Allowed are :data:`ALLOWED_CONTEXTS` and the names, separated by commas, in ``$RLJOB_E2E_CONTEXTS`` (exact names, no patterns:
    a star there could let in everything).

    Args:
        kubeconfig: one file.
        environment: where to read the variable; the process's own when None.

    Raises:
        ContextRefusedError: the context is not allowed, or the file names none, or cannot be read.
    """
    try:
        document = yaml.safe_load(kubeconfig.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ContextRefusedError(f"{kubeconfig}: cannot be read as a kubeconfig: {error}") from error
    current = document.get("current-context") if isinstance(document, dict) else None
    if not isinstance(current, str) or not current:
        raise ContextRefusedError(f"{kubeconfig}: has no current-context. Remedy: kubectl config use-context NAME")
    added = (os.environ if environment is None else environment).get(CONTEXTS_VARIABLE, "")
    exact = [name.strip() for name in added.split(",") if name.strip()]
    if current in exact or any(fnmatch.fnmatchcase(current, pattern) for pattern in ALLOWED_CONTEXTS):
        return current
    raise ContextRefusedError(
        f"{kubeconfig}: the current context is {current!r}, and tests may only use {', '.join([*ALLOWED_CONTEXTS, *exact])}: they make and "
        f"delete namespaces, CRDs and cluster roles. Remedy: if this cluster is for tests, export {CONTEXTS_VARIABLE}={current}"
    )
