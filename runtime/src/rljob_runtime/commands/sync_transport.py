"""Which transport weights take and why it may not be the fastest one, for ``rljob plan``."""

from __future__ import annotations

from collections import Counter

from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import chosen_backend, engine_nodes, engines_elsewhere
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
    most = max(Counter(engine_nodes(plan)).values())
    copies = "" if most == 1 else f", and take the memory of {most} updates on a node instead of one"
    return (
        f"{chosen} ({by}). The weights leave the sender's node {len(elsewhere)} times, once for each node with engines; "
        f"TCP would send them once{copies}."
    )
