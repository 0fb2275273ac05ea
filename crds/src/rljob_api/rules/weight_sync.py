"""Rules about the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError, field_error
from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import engines_elsewhere, loads_whole_updates
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec


def _shared_memory(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Shared memory ends at the node, and its segments are used again during an update."""
    if spec.weight_sync.backend is not SyncBackend.SHARED_MEMORY or spec.validates_only:
        return
    home, others = engines_elsewhere(plan)
    if others:
        nodes = ", ".join(map(str, others))
        yield field_error(
            "spec.weightSync.backend",
            SyncBackend.SHARED_MEMORY.value,
            f"needs one node: the trainer's rank 0 is on node {home}, engines are also on node {nodes}",
            "write Auto or ObjectStore, or place all engines on the node of rank 0",
        )
    if whole := loads_whole_updates(spec):
        yield field_error(
            "spec.weightSync.backend",
            SyncBackend.SHARED_MEMORY.value,
            f"hands weights over bucket by bucket, and {whole}'s engine, SGLang, takes a whole update",
            "write Auto or ObjectStore",
        )


PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_shared_memory,)
"""Rules that need to know where processes are."""
