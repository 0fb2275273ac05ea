"""What should exist for one attempt of an RLJob: pure functions from spec, attempt and settings to plain manifests.

::

    RLJob ── ServiceAccount, Role, RoleBinding, NetworkPolicy   <job>-rljob       the same for every attempt
         └── ConfigMap, RayJob                                  <job>-a<attempt>  made once, never changed

Called by the reconciler, which creates in the order given and never updates: the RayJob comes last, so that whatever it needs is there.
"""

from __future__ import annotations

from rljob_api.validation import CheckedJob
from rljob_operator.desired import access, network, rayjob, specmap
from rljob_operator.model import JobView, Manifest
from rljob_operator.settings import Settings

__all__ = ["attempt_objects"]


def attempt_objects(job: JobView, checked: CheckedJob, attempt: int, settings: Settings) -> tuple[Manifest, ...]:
    """Every child of an attempt, in the order in which they are created.

    Args:
        job: owner of all objects.
        checked: its spec without problems, and the plan.
        attempt: counted from 1.
        settings: image and Ray version for what the spec leaves open, and whether to make a NetworkPolicy.

    Raises:
        ValueError: the attempt has no valid name, see :func:`rljob_api.naming.rayjob_name`.
    """
    resolved = specmap.resolve(checked.job, settings)
    return (
        access.service_account(job),
        access.role(job),
        access.role_binding(job),
        *((network.network_policy(job, settings),) if settings.network_policy else ()),
        specmap.config_map(job, resolved, attempt),
        rayjob.ray_job(job, resolved, attempt),
    )
