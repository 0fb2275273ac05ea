"""Rules about the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.adapters import SERVED_RANKS
from rljob_api.errors import FieldError, field_error
from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import engines_elsewhere, loads_whole_updates
from rljob_api.v1alpha1.operations import AdapterSync, SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec

_PATH = "spec.weightSync.adapters"


def _served_adapters(spec: RLJobSpec) -> Iterator[FieldError]:
    """An engine serves what vLLM can."""
    if spec.weight_sync.adapters is not AdapterSync.SERVED or spec.validates_only:
        return
    served, lora = AdapterSync.SERVED.value, spec.model.lora
    if lora is None:
        yield field_error(_PATH, served, "needs adapters, and spec.model.lora is not set", "set model.lora, or write Merged")
    elif lora.rank > SERVED_RANKS[-1]:
        problem = f"needs model.lora.rank of at most {SERVED_RANKS[-1]}, vLLM's largest; it is {lora.rank}"
        yield field_error(_PATH, served, problem, "lower the rank, or write Merged")
    if whole := loads_whole_updates(spec):
        yield field_error(_PATH, served, f"needs vLLM, and {whole}'s engine is SGLang", "write Merged, or engine.type: VLLM")
    if spec.weight_sync.delta is not None:
        problem = "sends adapters alone, of which every number changes; spec.weightSync.delta would send only what changed"
        yield field_error(_PATH, served, problem, "remove weightSync.delta, or write Merged")


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


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_served_adapters,)
"""Rules between fields, each independent of the others."""
PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_shared_memory,)
"""Rules that need to know where processes are."""
