"""How a running vLLM 0.32 gives its memory back: sleep mode on CUDA, storages and packed copies on CPU.

Functions with a ``worker`` argument run inside every worker of the engine (``collective_rpc`` carries them there), the classes run in
the engine's thread. What is freed is counted from what is really let go, never from configured sizes.

CPU has no sleep mode in vLLM (``CPUWorker.sleep`` logs a warning and returns), so there:

- keys and values: vLLM's own way of taking them down (``clear_layer_kv_caches`` and the runner's list) and up again
  (``initialize_kv_cache_tensors``);
- weights: the storages of all parameters are resized to nothing and back, so that every reference to them stays good. The packed copies
  that the matrix kernels multiply with live in the closure ``layer.cpu_linear``; dropping it frees them, and the next update makes new
  ones (``weight_receiver``). Until then such a layer raises;
- not freed: buffers (rotary tables, masks), a few bytes per layer of oneDNN's bookkeeping, the runner's input tensors.

``CudaMemory`` and the functions named ``sleep_*`` have run on one GPU, not in CI. Read from the source:
a vLLM worker that falls asleep asserts that the device has not less free memory afterwards than before, whoever took it, so nothing else
may allocate on the device during that offload; and its memory cannot be exported by CUDA IPC.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.worker.utils import clear_layer_kv_caches

from rljob_runtime.errors import ModelError
from rljob_runtime.offload.memory import snapshot
from rljob_runtime.offload.states import MemorySnapshot, StateKind

if TYPE_CHECKING:
    from collections.abc import Sequence

Bytes = dict[StateKind, int]

GRACE_S = 30.0
"""Least time a worker gets for one part of a switch: given up half-way the engine would be lost."""

KIND_OF_TAG: Mapping[str, StateKind] = {"weights": StateKind.PARAMS, "kv_cache": StateKind.KV_CACHE}
"""vLLM's names of the memory that sleeps; its further tags (``runtime``, ``cudagraph``) count as ``OTHER``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one switch did, in bytes by kind."""

    copied_bytes: Bytes
    freed_bytes: Bytes
    """Given back, or taken again."""


class EngineMemory(Protocol):
    """Frees and restores; the caller has made sure that nothing runs and that the kinds are where they have to be."""

    def offload(self, kinds: Collection[StateKind], deadline: float) -> Moved:
        """Free the memory of ``kinds``; ``deadline`` is a ``time.monotonic`` value."""

    def load(self, kinds: Collection[StateKind], deadline: float) -> Moved:
        """Allocate it again."""

    def snapshot(self) -> MemorySnapshot:
        """Memory of all workers, summed."""


# -- CPU --------------------------------------------------------------------------------------------------------------------------

_freed_storages: WeakKeyDictionary[torch.nn.Module, list[tuple[torch.UntypedStorage, int]]] = WeakKeyDictionary()
"""By model: parameter storages without memory, and the sizes they go back to."""


class CpuMemory:
    """An engine whose device is the host's memory."""

    def __init__(self, core: Any, releases: bool) -> None:
        """Take over the memory of a started engine core.

        Args:
            core: the engine core's client.
            releases: memory will be offloaded, not only measured.

        Raises:
            ModelError: it will be, but vLLM took its second model runner, whose cache is set up in another way.
        """
        if releases and core.engine_core.vllm_config.use_v2_model_runner:
            raise ModelError("release: an engine on CPU gives memory back with vLLM's model runner V1 only; set VLLM_USE_V2_MODEL_RUNNER=0")
        self._core = core
        self._before = 0

    def offload(self, kinds: Collection[StateKind], deadline: float) -> Moved:
        """Free; see ``EngineMemory``. Weights are not copied anywhere."""
        freed: Bytes = {}
        if StateKind.KV_CACHE in kinds:
            freed[StateKind.KV_CACHE] = sum(_on_workers(self._core, free_cache, deadline))
        if StateKind.PARAMS in kinds:
            freed[StateKind.PARAMS] = sum(_on_workers(self._core, free_weights, deadline))
        _on_workers(self._core, return_pages, deadline)
        return Moved(copied_bytes={}, freed_bytes=freed)

    def load(self, kinds: Collection[StateKind], deadline: float) -> Moved:
        """Allocate; see ``EngineMemory``. The packed copies come with the update and are not counted here."""
        taken: Bytes = {}
        if StateKind.PARAMS in kinds:
            taken[StateKind.PARAMS] = sum(_on_workers(self._core, restore_weights, deadline))
        if StateKind.KV_CACHE in kinds:
            taken[StateKind.KV_CACHE] = sum(_on_workers(self._core, restore_cache, deadline))
        return Moved(copied_bytes={}, freed_bytes=taken)

    def snapshot(self) -> MemorySnapshot:
        """Memory of all workers; the device's share is weights, packed copies and cache as far as they are there."""
        total = _summed(_on_workers(self._core, cpu_snapshot, None))
        self._before, before = total.allocated_bytes, self._before
        return replace(total, peak_bytes=max(before, total.allocated_bytes))


def cpu_snapshot(worker: Any) -> MemorySnapshot:
    """Memory of one CPU worker."""
    model = worker.model_runner.model
    held = sum(_sizes([*_storages(_parameters(model)), *_storages(worker.model_runner.kv_caches)])) + sum(_packed(model).values())
    return snapshot(torch.device("cpu"), 0, resident_bytes=held)


def free_cache(worker: Any) -> int:
    """Let go of keys and values; bytes freed."""
    runner = worker.model_runner
    storages = list(_storages(runner.kv_caches))
    held = sum(_sizes(storages))
    runner.kv_caches.clear()
    clear_layer_kv_caches(runner.compilation_config.static_forward_context.values())
    # Should a view of the cache survive somewhere, its memory goes all the same.
    for storage in storages:
        storage.resize_(0)
    return held


def restore_cache(worker: Any) -> int:
    """Allocate keys and values as at the start, all zeros; bytes taken."""
    runner = worker.model_runner
    runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)
    return sum(_sizes(_storages(runner.kv_caches)))


def free_weights(worker: Any) -> int:
    """Free parameters, their packed copies, and what an update that broke off had kept; bytes freed of parameters and copies."""
    model = worker.model_runner.model
    freed = 0
    for layer, packed_bytes in _packed(model).items():
        freed += packed_bytes
        layer.cpu_linear = _refuse_without_weights
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    kept = _freed_storages.setdefault(model, [])
    for storage in _storages(_parameters(model)):
        if storage.nbytes() and storage.resizable():
            kept.append((storage, storage.nbytes()))
            freed += storage.nbytes()
            storage.resize_(0)
    return freed


def restore_weights(worker: Any) -> int:
    """Allocate the parameters again, with whatever the memory holds; bytes taken."""
    taken = 0
    for storage, size_bytes in _freed_storages.pop(worker.model_runner.model, []):
        storage.resize_(size_bytes)
        taken += size_bytes
    return taken


def return_pages(worker: Any) -> None:
    """Have the C library give freed pages back to the system: it keeps blocks below 32 MiB for itself otherwise."""
    del worker
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _refuse_without_weights(*_: object) -> NoReturn:
    """Stands in for the matrix product of a layer whose weights are away."""
    raise RuntimeError("this layer's weights were offloaded and no update has brought them back")


def _parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All parameters, also those that an update which broke off has put aside."""
    for layer in model.modules():
        aside = get_layerwise_info(layer).kernel_tensors
        if aside is not None:
            yield from aside[0].values()
        yield from layer.parameters(recurse=False)


def _storages(tensors: Collection[torch.Tensor] | Iterator[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Memory behind tensors, each piece once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if not tensor.is_meta}
    return list(found.values())


def _sizes(storages: Collection[torch.UntypedStorage]) -> list[int]:
    """Bytes of each."""
    return [storage.nbytes() for storage in storages]


def _packed(model: torch.nn.Module) -> dict[Any, int]:
    """Layers that multiply with a packed copy of their weight, and the bytes of that copy.

    A oneDNN handler does not tell its size; it packs a matrix of n x k values of the layer's dtype, padding aside.
    """
    own = {storage._cdata for storage in _storages(_parameters(model))}
    found: dict[Any, int] = {}
    for layer in model.modules():
        for cell in getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ():
            held = cell.cell_contents
            if isinstance(held, ops.CPUDNNLGEMMHandler):
                found[layer] = held.n * held.k * layer.weight.dtype.itemsize
            elif isinstance(held, torch.Tensor) and held.untyped_storage()._cdata not in own:
                found[layer] = held.untyped_storage().nbytes()
    return found


# -- CUDA -------------------------------------------------------------------------------------------------------------------------


class CudaMemory:
    """An engine on CUDA; it can offload if it was started with vLLM's sleep mode, and be measured in any case."""

    def __init__(self, core: Any, copy_weights: bool) -> None:
        """Take over the memory of a started engine core.

        Args:
            core: the engine core's client.
            copy_weights: keep them in host memory (sleep level 1) instead of dropping them (level 2, which keeps the buffers).
        """
        self._core = core
        self._level = 1 if copy_weights else 2

    def offload(self, kinds: Collection[StateKind], deadline: float) -> Moved:
        """Free; see ``EngineMemory``. vLLM frees the cache alone or together with the weights.

        The executor is asked itself to drop the cache alone: the core's ``release_kv_cache_memory`` refuses while it has ended requests
        to report to the workers, which it does with the next step.
        """
        before = self._awake(deadline)
        if StateKind.PARAMS in kinds:
            self._core.sleep(self._level, "keep")
        else:
            self._core.engine_core.pause_scheduler("keep")
            self._core.engine_core.model_executor.discard(("kv_cache",))
            _on_workers(self._core, return_cached_blocks, deadline)
        return self._moved(before, self._awake(deadline))

    def load(self, kinds: Collection[StateKind], deadline: float) -> Moved:
        """Allocate; see ``EngineMemory``. vLLM schedules again once both tags are awake."""
        before = self._awake(deadline)
        for tag, kind in KIND_OF_TAG.items():  # weights first
            if kind in kinds:
                self._core.wake_up([tag])
        return self._moved(self._awake(deadline), before)

    def snapshot(self) -> MemorySnapshot:
        """Memory of all workers."""
        return _summed(_on_workers(self._core, sleep_snapshot, None))

    def _moved(self, more: Bytes, less: Bytes) -> Moved:
        """The difference of two states; what is never copied at this level only counts as freed."""
        moved = {kind: size - less.get(kind, 0) for kind, size in more.items() if size != less.get(kind, 0)}
        dropped = {StateKind.KV_CACHE} if self._level == 1 else {StateKind.KV_CACHE, StateKind.PARAMS}
        return Moved(copied_bytes={kind: size for kind, size in moved.items() if kind not in dropped}, freed_bytes=moved)

    def _awake(self, deadline: float) -> Bytes:
        """Bytes on the device by kind, over all workers."""
        total: Bytes = {}
        for row in _on_workers(self._core, sleep_awake_bytes, deadline):
            for kind, size in row.items():
                total[kind] = total.get(kind, 0) + size
        return total


def return_cached_blocks(worker: Any) -> None:
    """Give the device what torch keeps for later, as vLLM's own sleep does; activations and buckets of an update among it."""
    gc.collect()
    torch.accelerator.empty_cache()


def sleep_awake_bytes(worker: Any) -> Bytes:
    """Bytes that vLLM's sleep-mode allocator has on the device, by kind."""
    del worker
    total: Bytes = {}
    for allocation in _sleep_allocations():
        if not allocation.is_asleep:
            kind = KIND_OF_TAG.get(allocation.tag, StateKind.OTHER)
            total[kind] = total.get(kind, 0) + allocation.handle[1]
    return total


def sleep_snapshot(worker: Any) -> MemorySnapshot:
    """Memory of one CUDA worker: torch counts sleeping allocations as allocated, so they are taken off.

    They are whole segments, of which torch counts only what tensors take: an engine that sleeps has nothing allocated, not less.
    """
    allocations = _sleep_allocations() if worker.vllm_config.model_config.enable_sleep_mode else []
    asleep = sum(allocation.handle[1] for allocation in allocations if allocation.is_asleep)
    backup = sum(a.cpu_backup_tensor.untyped_storage().nbytes() for a in allocations if a.cpu_backup_tensor is not None)
    memory = snapshot(worker.device, backup)
    return replace(memory, allocated_bytes=max(0, memory.allocated_bytes - asleep), reserved_bytes=memory.reserved_bytes - asleep)


def _sleep_allocations() -> list[Any]:
    """Everything vLLM's sleep-mode allocator of this process manages."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    return list(allocator.pointer_to_data.values())


# -- both -------------------------------------------------------------------------------------------------------------------------


def _on_workers(core: Any, function: Callable[[Any], Any], deadline: float | None) -> Sequence[Any]:
    """Run a function in every worker and give all results; a switch that began gets ``GRACE_S`` to come to its end."""
    left_s = None if deadline is None else max(GRACE_S, deadline - time.monotonic())
    results: Sequence[Any] = core.collective_rpc(function, left_s)
    return results


def _summed(parts: Sequence[MemorySnapshot]) -> MemorySnapshot:
    """Several workers as one."""
    return MemorySnapshot(
        allocated_bytes=sum(part.allocated_bytes for part in parts),
        reserved_bytes=sum(part.reserved_bytes for part in parts),
        peak_bytes=sum(part.peak_bytes for part in parts),
        host_rss_bytes=sum(part.host_rss_bytes for part in parts),
        pinned_bytes=sum(part.pinned_bytes for part in parts),
    )
