"""Writes kubeconfig files for this cluster's own users."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import yaml

from e2e.cluster.guard import OWN_CONTEXT
from e2e.cluster.pki import Identity, Pki


def write(path: Path, *, server: str, pki: Pki, identity: Identity) -> None:
    """Write a kubeconfig with everything inside, readable by its owner only.

    Args:
        path: the file; replaced in one step.
        server: URL of the API server.
        pki: where the certificates lie.
        identity: who this is for.
    """
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": OWN_CONTEXT,
        "clusters": [{"name": OWN_CONTEXT, "cluster": {"server": server, "certificate-authority-data": _encoded(pki.ca)}}],
        "users": [
            {
                "name": identity.common_name,
                "user": {
                    "client-certificate-data": _encoded(pki.certificate(identity)),
                    "client-key-data": _encoded(pki.key(identity)),
                },
            }
        ],
        "contexts": [{"name": OWN_CONTEXT, "context": {"cluster": OWN_CONTEXT, "user": identity.common_name}}],
    }
    unfinished = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        yaml.safe_dump(document, handle, sort_keys=False)
    unfinished.rename(path)


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")
