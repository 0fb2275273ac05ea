"""Stops what a cluster started and removes what it made; from its state only, so that it works after a crash and a second time.

Steps do not depend on each other's success: each is tried, and what failed is reported together at the end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from e2e.cluster import cgroups, kueue, network, node, process, procfs, shell
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import state_root
from e2e.cluster.procfs import ProcessIdentity
from e2e.cluster.state import State, StateFolder, all_folders

# Whoever restarts things before the things. containerd too: its containers outlive it, and then nothing changes its notes any more.
_STOP_FIRST = ("kueue", "ray-operator", "kube-scheduler", "kube-controller-manager", "coredns", "kube-proxy", "kubelet", "containerd")
_GRACE_S = 10.0
_LOCK_DEADLINE_S = 120.0
_UMOUNT_TIMEOUT_S = 30.0
_CONTAINERS_DEADLINE_S = 20.0
_KEPT_LOG_BYTES = 1024 * 1024

_CNI_RESULTS = Path("/var/lib/cni/results")
_CONTAINER_LOG_LINKS = Path("/var/log/containers")
_SHARED_FOLDERS = (
    _CNI_RESULTS, _CNI_RESULTS.parent, _CONTAINER_LOG_LINKS, Path("/run/containerd/s"), Path("/run/containerd"),
    node.FIXED_FILES[0].parent, node.FIXED_FILES[0].parent.parent, *list(kueue.FIXED_FILES[0].parents)[:3],
)  # fmt: skip
"""Folders with fixed names that containerd, CNI and the kubelet make; removed when empty."""


def down(folder: StateFolder, *, keep_logs: Path | None = None) -> bool:
    """Stop and remove one cluster.

    Args:
        folder: its state folder.
        keep_logs: put the last MiB of each log there.

    Returns:
        Whether there was anything.

    Raises:
        ClusterError: something could not be stopped or removed; the state stays, so that it can be tried again.
    """
    with folder.lock(deadline_s=_LOCK_DEADLINE_S):
        existed = folder.path.exists()
        if keep_logs is not None and existed:
            _copy_logs(folder, keep_logs)
        remove(folder)
        folder.remove_lock_file()
    return existed


def remove(folder: StateFolder) -> None:
    """Stop and remove one cluster whose lock the caller holds; nothing if there is none.

    Raises:
        ClusterError: see :func:`down`.
    """
    state = folder.load()
    if state is not None:
        _undo(folder, state)
    if folder.path.exists():
        shutil.rmtree(folder.path)


def down_abandoned() -> list[str]:
    """Stop clusters whose holder (a test run) is gone; returns their names.

    Raises:
        ClusterError: see :func:`down`.
    """
    stopped = []
    for folder in all_folders(state_root()):
        state = folder.load()
        if state is not None and state.holder is not None and not state.holder.alive():
            down(folder)
            stopped.append(folder.path.name)
    return stopped


def _undo(folder: StateFolder, state: State) -> None:
    steps: list[tuple[str, Callable[[], None]]] = [
        ("processes that use containers", lambda: _stop_named(state, _STOP_FIRST)),
        ("shim sockets", lambda: _remove_shim_sockets(folder)),
        ("containers", lambda: _stop_containers(state)),
        ("the rest of the processes", lambda: _stop_rest(state)),
        ("mounts", lambda: _unmount(folder.path)),
        ("control groups", lambda: cgroups.remove(state.cgroups)),
        ("network", lambda: network.delete(bridge=state.bridge, nft_tables=state.nft_tables, sysctls=dict(state.sysctls))),
        ("files with fixed places", lambda: _remove_scattered_files(folder, state)),
    ]
    failures = []
    for what, step in steps:
        try:
            step()
        except (ClusterError, OSError) as error:
            failures.append(f"{what}: {error}")
    if failures:
        raise ClusterError(f"{folder.path.name} is not down completely; its state stays in {folder.path}:\n" + "\n".join(failures))


def _stop_named(state: State, names: tuple[str, ...]) -> None:
    process.stop([record.identity for record in state.processes if record.name in names], grace_s=_GRACE_S)


def _stop_rest(state: State) -> None:
    """API server and etcd, the last started first; then whatever carries the cluster's token and no record names."""
    for record in reversed(state.processes):
        process.stop([record.identity], grace_s=_GRACE_S)
    process.stop(_marked(state), grace_s=_GRACE_S)


def _marked(state: State) -> list[ProcessIdentity]:
    return procfs.with_environment(f"{process.TOKEN_VARIABLE}={state.token}")


def _stop_containers(state: State) -> None:
    """End every container: it is a child of a shim, which containerd started with the token in its environment, and which outlives it."""
    recorded = {record.identity for record in state.processes}
    end_s = time.monotonic() + _CONTAINERS_DEADLINE_S
    while shims := [marked for marked in _marked(state) if marked not in recorded]:
        if time.monotonic() > end_s:
            raise ClusterError(f"containers still start after {_CONTAINERS_DEADLINE_S:g} s, under shims {[shim.pid for shim in shims]}")
        process.stop(procfs.descendants(shims), grace_s=0)
        process.stop(shims, grace_s=0)


def _remove_shim_sockets(folder: StateFolder) -> None:
    """Their place is fixed; the task's folder says which one is whose."""
    for note in (folder.path / "containerd" / "state").glob("io.containerd.runtime.v2.task/*/*/address"):
        address = note.read_text().strip().removeprefix("unix://")
        if address.startswith("/run/containerd/s/"):
            Path(address).unlink(missing_ok=True)


def _unmount(below: Path) -> None:
    """Detach every mount below a folder, the deepest first."""
    for target in sorted(mounts_below(Path("/proc/self/mountinfo").read_text(), below), reverse=True):
        shell.run(["umount", "--lazy", target], timeout_s=_UMOUNT_TIMEOUT_S)


def mounts_below(mountinfo: str, below: Path) -> list[str]:
    """Mount points strictly below a folder, from the text of /proc/PID/mountinfo; once for each mount, stacked ones repeat."""
    points = [line.split(" ")[4].encode().decode("unicode_escape") for line in mountinfo.splitlines()]
    return [point for point in points if point.startswith(f"{below}/")]


def _remove_scattered_files(folder: StateFolder, state: State) -> None:
    if state.bridge is None:
        return  # no node, so nothing of the kind was made
    for result in _CNI_RESULTS.glob("*"):
        if f"{folder.path}/" in result.read_text(errors="replace"):  # the path of the pod's network namespace
            result.unlink(missing_ok=True)
    for link in _CONTAINER_LOG_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(folder.path):
            link.unlink(missing_ok=True)
    for file in (*node.FIXED_FILES, *kueue.FIXED_FILES):
        file.unlink(missing_ok=True)
    for shared in _SHARED_FOLDERS:
        if shared.is_dir() and not any(shared.iterdir()):
            shared.rmdir()


def _copy_logs(folder: StateFolder, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in sorted(folder.logs.glob("*.log")):
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - _KEPT_LOG_BYTES))
            (target / log.name).write_bytes(source.read())
