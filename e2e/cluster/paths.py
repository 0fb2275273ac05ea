"""Where things lie: the checkout, the cache that outlives clusters, and the state that does not."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = Path(__file__).resolve().parent / "tools"
"""One Go module per program, so that their dependencies stay apart."""

CACHE_VARIABLE = "RLJOB_E2E_CACHE"
STATE_VARIABLE = "RLJOB_E2E_STATE"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def cache_root() -> Path:
    """Binaries and CRDs, keyed by content, and unpacked images: ``$RLJOB_E2E_CACHE``, else ``rljob-e2e`` in the user's cache folder."""
    explicit = os.environ.get(CACHE_VARIABLE)
    if explicit:
        return Path(explicit).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob-e2e"


@contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """One process at a time per cache; a second one waits and then finds everything made."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def state_root() -> Path:
    """Parent of all state folders: ``$RLJOB_E2E_STATE``, else a folder of this user below ``/var/tmp``.

    Not ``/tmp``: images and volumes are gigabytes, and ``/tmp`` may be memory.
    """
    explicit = os.environ.get(STATE_VARIABLE)
    return Path(explicit).absolute() if explicit else Path("/var/tmp") / f"rljob-e2e-{os.geteuid()}"


def state_folder(name: str) -> Path:
    """State folder of the cluster called ``name``.

    Raises:
        ClusterError: the name cannot be a folder's name.
    """
    if not _NAME.fullmatch(name):
        raise ClusterError(f"cluster name {name!r}: use at most 32 lower-case letters, digits and inner dashes")
    return state_root() / name
