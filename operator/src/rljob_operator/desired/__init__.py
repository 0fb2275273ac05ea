"""Desired child objects of one attempt of an RLJob: pure functions from spec, attempt and settings to plain manifests.

::

    RLJob ── ServiceAccount, Role, RoleBinding, NetworkPolicy   <job>-rljob       the same for every attempt
         └── RayJob                                             <job>-a<attempt>  created once, never updated

The RayJob comes last, so that everything it needs exists when the reconciler creates it.
"""

from __future__ import annotations

from rljob_api.validation import CheckedJob
from rljob_operator.desired import access, disruption, network, rayjob, resolved_spec
from rljob_operator.model import JobView, Manifest
from rljob_operator.settings import Settings

__all__ = ["attempt_objects"]


def attempt_objects(job: JobView, checked: CheckedJob, attempt: int, settings: Settings) -> tuple[Manifest, ...]:
    """All children of an attempt, in creation order.

    Args:
        job: owner of all objects.
        checked: its validated spec and the plan.
        attempt: attempt number, from 1.
        settings: default image and Ray version, whether to create a NetworkPolicy, and the address of dashboards.

    Raises:
        ValueError: there is no valid name for the attempt; see :func:`rljob_api.naming.rayjob_name`.
    """
    resolved = resolved_spec.resolve(checked.job, job.status, settings)
    return (
        *access.service_account(job, resolved),
        access.role(job),
        access.role_binding(job, resolved),
        *((network.network_policy(job, settings),) if settings.network_policy else ()),
        *disruption.disruption_budget(job, resolved),
        rayjob.ray_job(job, resolved, attempt, settings.listen_address),
    )
