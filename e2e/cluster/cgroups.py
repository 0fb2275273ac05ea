"""The control groups that a kubelet makes for its pods."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from e2e.cluster.errors import ClusterError

_ROOT = Path("/sys/fs/cgroup")
_NAME = "kubepods"
_DEADLINE_S = 60.0
_POLL_S = 0.1


def to_be_made(root: Path = _ROOT) -> tuple[str, ...]:
    """Where a kubelet will make its group: below each hierarchy (version 1) or the only one (version 2); those that exist are left out."""
    unified = (root / "cgroup.controllers").exists()
    hierarchies = [root] if unified else [path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()]
    return tuple(str(path / _NAME) for path in hierarchies if not (path / _NAME).exists())


def remove(groups: Iterable[str]) -> None:
    """Remove these groups with all below them; the kernel needs a moment after the last process.

    Raises:
        ClusterError: a group is still in use at the deadline.
    """
    end_s = time.monotonic() + _DEADLINE_S
    for group in map(Path, groups):
        while group.exists():
            try:
                _remove_tree(group)
            except OSError as error:
                if time.monotonic() > end_s:
                    raise ClusterError(f"{error.filename}: cannot be removed after {_DEADLINE_S:g} s: {error.strerror}") from error
                time.sleep(_POLL_S)


def _remove_tree(group: Path) -> None:
    for child in group.iterdir():
        if child.is_dir():
            _remove_tree(child)
    group.rmdir()
