"""Image archives in the cache, and the buildah command that makes them."""

from __future__ import annotations

import os
from pathlib import Path

from e2e.cluster import shell
from e2e.cluster.paths import cache_root

_BUILDAH_ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
_TIMEOUT_S = 3600.0


def buildah(*arguments: str | Path, cwd: Path | None = None, show: bool = False) -> str:
    """Run buildah without a daemon and without namespaces of its own, which also works inside a container.

    Raises:
        CommandError: it failed.
    """
    return shell.run(["buildah", *arguments], env=_BUILDAH_ENVIRONMENT, cwd=cwd, timeout_s=_TIMEOUT_S, show=show)


def path(name: str, key: str) -> Path:
    """Where the archive of an image with this content lies."""
    return cache_root() / "archives" / f"{name}-{key}.tar"


def export(image: str, archive: Path) -> None:
    """Write an image into the cache, and drop archives of older content of the same name: the runtime's takes gigabytes.

    Raises:
        CommandError: buildah has no such image.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(f".{archive.name}.{os.getpid()}")
    # zstd 1: half the time of gzip, about the same size.
    buildah("push", "--quiet", "--compression-format", "zstd", "--compression-level", "1", image, f"oci-archive:{unfinished}:{image}")
    unfinished.rename(archive)
    name = archive.name.rpartition("-")[0]
    for older in archive.parent.glob(f"{name}-*.tar"):
        if older != archive and older.name.rpartition("-")[0] == name:
            older.unlink(missing_ok=True)
