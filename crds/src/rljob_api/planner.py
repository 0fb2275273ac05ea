"""The one planner: spec in, plan out. Pure: no clock, no environment, no machine, no I/O.

::

    mode: Auto ─> rljob_api.auto makes it explicit ─> rljob_api.planning ─> Plan

Called by the CLI, the operator, the local run and the driver inside the pods, which all must agree.

Invariants: PLAN-PURE the same spec gives the same plan everywhere. UNIT-EXISTS no process on a device that does not exist,
none twice in a process. A process never spans two nodes. Time and memory grow with nodes + processes + their devices.
"""

from __future__ import annotations

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.planning import explicit
from rljob_api.planning.nodes import too_many
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import PlacementChoice
from rljob_api.v1alpha1.rljob import RLJobSpec


def plan(spec: RLJobSpec) -> Plan:
    """Place every process of a job.

    Raises:
        SpecInvalidError: with every placement problem of the spec.
    """
    result = plan_or_errors(spec)
    if isinstance(result, Plan):
        return result
    raise SpecInvalidError(result)


def plan_or_errors(spec: RLJobSpec) -> Plan | list[FieldError]:
    """Like :func:`plan`, but returns the problems, in spec order."""
    if all(component.placement.mode is not PlacementChoice.AUTO for component in spec.components):
        return explicit.plan_or_errors(spec)
    errors = explicit.spec_errors(spec)
    if any(too_many(spec.node_groups)):
        return errors
    from rljob_api import auto  # seldom needed, and brings the memory estimate along

    resolved = auto.resolve(spec)
    return [*errors, *resolved] if isinstance(resolved, list) else explicit.plan_or_errors(resolved)
