"""Where a process waits to become an engine in the place of a lost one. Pure."""

from __future__ import annotations

from rljob_api.planning import environment
from rljob_api.planning.plan import Plan, PlannedProcess
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import StandbyProcesses


def standby_places(spec: RLJobSpec, plan: Plan) -> tuple[tuple[str, int], ...]:
    """Component and node rank of every standby process, in the order of the plan.

    With ``Auto`` only where the loss of an engine stops all generation, because responses have nowhere to go on: the job's only engine, and
    engines that share devices, which are replaced while all of them wait. Not beside CPU devices: importing the engine takes
    seconds of the very cores that compute.
    """
    wanted = spec.rollout.standby_processes
    if wanted is StandbyProcesses.NEVER or spec.rollout.max_engine_restarts == 0:
        return ()
    rollouts = plan.with_role(Role.ROLLOUT)
    is_only = sum(component.world_size for component in rollouts) == 1
    places = dict.fromkeys(
        (component.name, process.node_rank)
        for component in rollouts
        for process in component.processes
        if wanted is StandbyProcesses.PER_NODE or ((is_only or component.shares_devices_with) and _on_accelerator(spec, plan, process))
    )
    return tuple(places)


def _on_accelerator(spec: RLJobSpec, plan: Plan, process: PlannedProcess) -> bool:
    return environment.device_type(environment.node_group(spec, plan, process)) is not DeviceType.CPU
