"""Which transport weights take and why it may not be the fastest one, for ``rljob plan``."""

from __future__ import annotations

from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import chosen_backend, engines_elsewhere
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec


def sync_transport(spec: RLJobSpec, plan: Plan) -> str | None:
    """One or two sentences; None where nothing is synced."""
    if not plan.with_role(Role.TRAINER) or not plan.with_role(Role.ROLLOUT):
        return None
    chosen = chosen_backend(spec, plan)
    by = "selected by weightSync.backend Auto" if spec.weight_sync.backend is SyncBackend.AUTO else "weightSync.backend"
    if chosen is not SyncBackend.OBJECT_STORE:
        return f"{chosen} ({by}); it is tested when the run starts, and ObjectStore used if the test fails."
    elsewhere = engines_elsewhere(plan)[1]
    if len(elsewhere) < 2:
        return f"{chosen} ({by})."
    return (
        f"{chosen} ({by}). The weights leave the sender's node {len(elsewhere)} times, once for each node with engines; "
        "TCP would send them once."
    )
