"""Processes of a job that wait to take the place of lost engines: one for a component on a node, for all its engines there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rljob_api.naming import standby_name
from rljob_api.planning.plan import Plan
from rljob_api.planning.standby import standby_places
from rljob_api.v1alpha1 import RLJobSpec
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.standby import Standby, StartsStandby
from rljob_runtime.job.supervision import replacement_limits


def standby_processes(
    spec: RLJobSpec, plan: Plan, component: str, workers: Sequence[WorkerSpec], cluster: StartsStandby, notify: Callable[[str], None]
) -> dict[int, Standby]:
    """Those of one component by node rank; none is started yet.

    A process waits with the settings of the component's first worker on its node, the numbers of its devices included: what looks at
    them while it is imported finds devices that are there. It creates nothing on them.

    Args:
        spec: of the job.
        plan: of the job.
        component: its name.
        workers: how its workers are started, by rank.
        cluster: starts the processes.
        notify: takes a line for users.
    """
    limits = replacement_limits(spec)
    if limits.max_restarts == 0:
        return {}
    first = {worker.node_rank: worker for worker in reversed(workers)}
    return {
        node: Standby(replace(first[node], name=standby_name(component, node)), cluster, timeout_s=limits.start_timeout_s, notify=notify)
        for name, node in standby_places(spec, plan)
        if name == component
    }
