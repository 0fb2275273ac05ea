"""The store in which images are built, and the programs that work on it."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster import shell
from e2e.cluster.errors import ClusterError, CommandError

_ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
_TIMEOUT_S = 3600.0


def buildah(*arguments: str | Path) -> str:
    """Run buildah without a daemon and without namespaces of its own, which also works inside a container.

    Raises:
        CommandError: it failed.
    """
    return shell.run(["buildah", *arguments], env=_ENVIRONMENT, timeout_s=_TIMEOUT_S)


def skopeo(*arguments: str | Path) -> str:
    """Run skopeo, which copies out of the store.

    Raises:
        CommandError: it failed.
    """
    return shell.run(["skopeo", "--insecure-policy", *arguments], env=_ENVIRONMENT, timeout_s=_TIMEOUT_S)


def exists(name: str) -> bool:
    """Whether there is such an image."""
    try:
        buildah("images", "--json", name)
    except CommandError:
        return False
    return True


def find(name: str) -> tuple[str, str]:
    """Id and full name of an image.

    Raises:
        ClusterError: there is none, or it has only another name's tag.
    """
    try:
        found = json.loads(buildah("images", "--json", name))
    except CommandError as error:
        raise ClusterError(
            f"buildah has no image {name!r}. Remedy: python -m e2e.cluster image operator|runtime; list: buildah images"
        ) from error
    names = [
        full for full in found[0].get("names") or [] if full == name or full.endswith(f"/{name}") or full == f"localhost/{name}:latest"
    ]
    if not names:
        raise ClusterError(
            f"image {name!r} has no name of its own in buildah's store; give it a tag: buildah tag {name} localhost/NAME:TAG"
        )
    return str(found[0]["id"]), str(names[0])


def others_of(name: str) -> list[str]:
    """Names of the same repository with other tags."""
    repository = name.rpartition(":")[0]
    names = [old for entry in json.loads(buildah("images", "--json")) for old in entry.get("names") or []]
    return [old for old in names if old.rpartition(":")[0] == repository and old != name]
