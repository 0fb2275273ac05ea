"""Where a chosen ``weightSync.backend`` needs trainer and engines to be."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.adapters import serves_adapters
from rljob_api.errors import FieldError, field_error
from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import (
    all_on_accelerators,
    chosen_senders,
    engines_elsewhere,
    loads_whole_updates,
    neighbors,
    shared_with_senders,
)
from rljob_api.v1alpha1.operations import Senders, SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec

_PLACED = (SyncBackend.SHARED_MEMORY, SyncBackend.NCCL, SyncBackend.IPC)


def depends_on_places(spec: RLJobSpec) -> bool:
    """Whether the backend works in some placements only."""
    return spec.weight_sync.backend in _PLACED and not spec.validates_only


def problems(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Why the backend cannot connect the processes of a plan."""
    if depends_on_places(spec):
        yield from _shared_memory(spec, plan)
        yield from _between_devices(spec, plan)


def _shared_memory(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Shared memory ends at the node, and its segments are used again during an update."""
    if spec.weight_sync.backend is not SyncBackend.SHARED_MEMORY:
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


def _between_devices(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """NCCL and IPC need devices that they can reach, and engines that take each bucket on theirs."""
    backend = spec.weight_sync.backend
    if backend is SyncBackend.SHARED_MEMORY:
        return
    path = "spec.weightSync.backend"
    if whole := loads_whole_updates(spec):
        problem = f"hands every bucket to the processes of an engine, and {whole}'s engine, SGLang, takes a whole update"
        yield field_error(path, backend.value, problem, "write Auto, TCP or ObjectStore")
    if serves_adapters(spec):
        problem = "moves weights between devices, and engines take the adapters that they serve from host memory"
        yield field_error(path, backend.value, problem, "write Auto, TCP or ObjectStore, or weightSync.adapters: Merged")
    if backend is SyncBackend.NCCL:
        yield from _nccl(spec, plan, path)
    else:
        yield from _ipc(spec, plan, path)


def _nccl(spec: RLJobSpec, plan: Plan, path: str) -> Iterator[FieldError]:
    value = SyncBackend.NCCL.value
    if not all_on_accelerators(spec, plan):
        yield field_error(
            path, value, "connects CUDA devices, and trainer or engines compute on others", "write Auto, or TCP between hosts"
        )
    elif shared := shared_with_senders(plan, chosen_senders(spec, plan)):
        numbers = ", ".join(map(str, shared))
        problem = f"needs devices of their own for the ranks that send, and engines are on their devices {numbers} as well"
        yield field_error(path, value, problem, "write Auto, IPC where a trainer rank is on every device of the engines, or TCP")


def _ipc(spec: RLJobSpec, plan: Plan, path: str) -> Iterator[FieldError]:
    value = SyncBackend.IPC.value
    ranks = neighbors(spec, plan)
    lonely = [engine for engine, found in enumerate(ranks) if None in found]
    if lonely:
        without = f"{len(lonely)} of {len(ranks)} have devices without one, engine {lonely[0]} first"
        problem = f"needs a trainer rank on every device of the engines; {without}"
        yield field_error(path, value, problem, "place the trainer on all devices of the rollout, or write Auto")
    if spec.weight_sync.senders is not Senders.FIRST:
        problem = "has no effect with IPC: every rank hands its buckets to the engines on its device"
        yield field_error("spec.weightSync.senders", spec.weight_sync.senders.value, problem, "remove it")
