"""Brings clusters up, whole or the API server alone, step by step with the time each takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.cluster import (
    build,
    cgroups,
    cleanup,
    containerd,
    control_plane,
    crds,
    images,
    kuberay,
    kueue,
    network,
    node,
    node_images,
    packages,
    ports,
)
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.procfs import ProcessIdentity
from e2e.cluster.state import State, StateFolder
from e2e.cluster.versions import Mode

_LOCK_DEADLINE_S = 600.0


def api(folder: StateFolder, *, with_crds: bool, holder: ProcessIdentity | None = None, say: build.Say = build.silent) -> None:
    """Start etcd, API server and controller manager on free loopback ports; nothing if they run already.

    Args:
        folder: where.
        with_crds: also install KubeRay's CRDs and RLJob's own.
        holder: process without which the cluster is of no use; :func:`~e2e.cluster.cleanup.down_abandoned` stops it afterwards.
        say: gets one line per step.

    Raises:
        ClusterError: not built, or something did not become ready.
    """
    packages.require(packages.API_PROGRAMS, say)
    build.require_built(Mode.API)
    with folder.lock(deadline_s=_LOCK_DEADLINE_S):
        if not runs_already(folder, Mode.API):
            folder.create(State(mode=Mode.API, holder=holder, ports=ports.choose(control_plane.API_PORTS)))
            _timed("API server", lambda: control_plane.start_api(folder, control_plane.LOOPBACK_ONLY), say)
        if with_crds:
            _timed("CRDs", lambda: crds.install_all(Kubectl(kubeconfig=folder.kubeconfig)), say)


def up(folder: StateFolder, *, say: build.Say = build.silent) -> None:
    """Start a whole cluster with one node, virtual devices, KubeRay and Kueue; nothing if it runs already.

    Raises:
        ClusterError: not root, something is missing, not built, or did not become ready.
    """
    packages.require_root()
    packages.require(packages.CLUSTER_PROGRAMS, say)
    build.require_built(Mode.CLUSTER)
    with folder.lock(deadline_s=_LOCK_DEADLINE_S):
        if runs_already(folder, Mode.CLUSTER):
            return
        node.require_no_other_kubelet()
        pause = images.pause(say)
        names = (*control_plane.API_PORTS, "kube-scheduler", *node.PORTS, *kuberay.PORTS, *kueue.PORTS)
        folder.create(State(mode=Mode.CLUSTER, ports=ports.choose(names, address="0.0.0.0"), cgroups=cgroups.to_be_made()))
        _timed("network", lambda: network.create(folder), say)
        _timed("images", lambda: node_images.begin_with_stock(containerd.of_node(folder).place), say)
        _timed("containerd", lambda: containerd.start_containerd(folder, pause), say)
        _timed("API server", lambda: control_plane.start_api(folder, control_plane.FOR_PODS), say)
        _timed("scheduler", lambda: control_plane.start_scheduler(folder), say)
        _timed("node", lambda: node.start_node(folder), say)
        _timed("KubeRay", lambda: kuberay.start_kuberay(folder), say)
        _timed("Kueue", lambda: kueue.start_kueue(folder), say)
        _timed("devices", lambda: node.wait_for_devices(folder), say)


def runs_already(folder: StateFolder, mode: Mode) -> bool:
    """Whether the same thing is up and well; what is left of one that has died whole (the machine restarted) is removed.

    Raises:
        ClusterError: something else is there, or parts of it have died.
    """
    state = folder.load()
    if state is None:
        return False
    if not any(record.identity.alive() for record in state.processes):
        cleanup.remove(folder)
        return False
    remedy = f"Remedy: python -m e2e.cluster down --name {folder.path.name}"
    if state.mode is not mode:
        raise ClusterError(f"{folder.path.name!r} is up in mode {state.mode}, not {mode}. {remedy}")
    dead = [record.name for record in state.processes if not record.identity.alive()]
    if dead or not folder.kubeconfig.exists():
        raise ClusterError(f"{folder.path.name!r} is half up: {', '.join(dead) or 'everything'} does not run. {remedy}")
    return True


def _timed(what: str, step: Callable[[], None], say: build.Say) -> None:
    started_s = time.monotonic()
    step()
    say(f"{what}: {time.monotonic() - started_s:.1f} s")
