"""vLLM's worker end of an update: packed buckets into the running model, by vLLM's own weight-transfer protocol.

vLLM calls ``start_weight_update``, ``update_weights`` once per bucket, ``finish_weight_update`` in every worker. With tensor parallel
workers in processes of their own, ``register`` runs there through the entry point ``vllm.general_plugins``.

The layerwise reload of vLLM re-creates each layer, loads it, packs it for the kernels and copies it into the original storage, so that
CUDA graphs stay valid and the order of buckets does not matter.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rljob_runtime.cpu_products import lacks_half_products
from rljob_runtime.engine.vllm.drafted import repair_drafted_sampling
from rljob_runtime.engine.vllm.layer_group import LayerGroup, group_of
from rljob_runtime.engine.vllm.load_record import LoadPlan, LoadRecorder, Path, fingerprint_of
from rljob_runtime.engine.vllm.packed_weights import has_packed_copy, multiply_halves_in_float32, repack_experts, repack_shared_weights
from rljob_runtime.engine.vllm.rotary import repair_rotary
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.lone_groups import share_loop_of_lone_groups
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.assembly import shorten
from rljob_runtime.weightsync.copies import Kept
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.packing import as_byte_tensor, unpack
from rljob_runtime.weightsync.parcel import Remote, view
from rljob_runtime.weightsync.patching import ChangeWriter, Region, write_whole
from rljob_runtime.weightsync.shared_memory import SharedBytes
from rljob_runtime.weightsync.staging import staging_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    from rljob_runtime.weightsync.parcel import Payload

logger = logging.getLogger(__name__)

NOT_WRITTEN = "changes written into parameters left other bits than a load of the weights does in"
"""How a failed comparison is known where an error comes as text alone."""
BACKEND = "rljob"
"""The name under which vLLM knows this receiver (``weight_transfer_config={"backend": "rljob"}``)."""


_count_loaded = layerwise.get_numel_loaded
_materialize_layer = layerwise.materialize_layer
_thread = threading.local()
"""``recorder``: of a load that this thread makes and that is recorded."""


def _recorder() -> LoadRecorder | None:
    return getattr(_thread, "recorder", None)


_counts: WeakKeyDictionary[object, dict[Hashable, tuple[int, object]]] = WeakKeyDictionary()
"""By layer, or by the loader that belongs to none."""


def count_once(loader: Callable[..., object], given: inspect.BoundArguments) -> tuple[int, object]:
    """vLLM's ``get_numel_loaded``: how many numbers a weight loader takes of a tensor, and what it returns.

    vLLM finds out by a trial run of the loader, which is a quarter of the reload of a small model. It follows from shapes, so that the
    first update tells it of all later ones. Loaders that are rebuilt for each reload are tried each time.
    """
    if (recorder := _recorder()) is not None:
        return recorder.trial(_count_loaded, loader, given)
    owner: object = loader
    function: object = loader
    if isinstance(loader, MethodType):
        owner, function = loader.__self__, loader.__func__
    elif loader is not layerwise.default_weight_loader:
        return _count_loaded(loader, given)
    known = _counts.setdefault(owner, {})
    key = (function, tuple((name, _shown(value)) for name, value in given.arguments.items()))
    try:
        found = known.get(key)
    except TypeError:  # an argument that has no hash
        return _count_loaded(loader, given)
    if found is None:
        found = known[key] = _count_loaded(loader, given)
    return found


def _shown(value: object) -> object:
    """What an argument has to do with the count; of a parameter also how it is cut, which is in its plain attributes."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = tuple((name, found) for name, found in sorted(vars(value).items()) if isinstance(found, int | str | None))
    return type(value), value.shape, plain


def materialize(layer: torch.nn.Module, info: Any) -> None:
    """vLLM's ``materialize_layer``, seen by a recorder."""
    _materialize_layer(layer, info)
    if (recorder := _recorder()) is not None:
        recorder.materialized(layer)


def register() -> None:
    """Make the receiver known to vLLM in this process, and repair what it gets wrong or slow on CPU; repeated calls do nothing."""
    layerwise.get_numel_loaded = count_once
    layerwise.materialize_layer = materialize
    share_loop_of_lone_groups()
    if current_platform.is_cpu():
        repair_drafted_sampling()
        repair_rotary()
        if lacks_half_products():
            multiply_halves_in_float32()
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, BucketReceiver.__name__)
    except ValueError as exc:
        if "already registered" not in str(exc):
            raise


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Nothing to agree on: buckets arrive with the call itself."""


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):
    """One packed bucket; ``last`` asks for the check that nothing is missing."""

    bucket: Bucket
    payload: Payload
    last: bool


class BucketReceiver(WeightTransferEngine[ReceiverInit, BucketUpdate]):
    """Loads packed buckets into one worker's model."""

    init_info_cls = ReceiverInit
    update_info_cls = BucketUpdate

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        """Remember which parameters the loaders fill; afterwards the CPU kernels replace weights by packed copies."""
        super().__init__(config, vllm_config, device, model)
        self._required = frozenset(name for name, _ in model.named_parameters())
        self._loaded: set[str] = set()
        self._adapters: dict[str, torch.Tensor] | None = None if vllm_config.lora_config is None else {}
        """What came of an update of adapters; None: updates bring weights."""
        self._staging = staging_for(device)
        self._records = False
        self._proves = False
        """Whether what would be written of the open update is remembered while it is loaded."""
        self._proves_next = False
        self._part: frozenset[str] | None = None
        """Checkpoint tensors that the next update loads; None: all."""
        self._loading: torch.nn.Module | LayerGroup = model
        self.plan: LoadPlan | None = None
        """How the model's loaders fill its parameters, once a load was recorded."""
        self._layers: dict[str, torch.nn.Module] = {}
        """By name, of the plan."""
        self._writers: dict[int, tuple[Bucket, ChangeWriter]] = {}
        """By bucket."""
        self.written: dict[str, list[int]] = {}
        """What changes left in the parameters, see :func:`compare_bits`."""

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Prepare every layer for loading, also after an update that broke off half-way.

        vLLM leaves layers that were only partly loaded as they are when a new update starts, counts the old pieces again and would
        finish such a layer before all of the new pieces came. So what they hold is dropped here.
        """
        if self._adapters is not None:
            self._adapters.clear()
            return
        self._loaded.clear()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        _thread.recorder = None
        part, self._part, self._loading = self._part, None, self.model
        if part is not None and self.plan is not None:
            self._loading = group_of(self.model, {layer for name in part for layer in self.plan.layers[name]})
        live = self._live_tensors()
        initialize_layerwise_reload(self._loading)
        if not isinstance(self._loading, LayerGroup):
            # Layers are as before their processing now: what that added, such as the scales of fp8 weights, is in no checkpoint.
            self._required &= frozenset(name for name, _ in self.model.named_parameters())
        if self._records:
            self._records, _thread.recorder = False, LoadRecorder(self.model, live, has_packed_copy)
        self._proves, self._proves_next = self._proves_next, False
        if self._proves:
            self.written = {}

    def _live_tensors(self) -> list[torch.Tensor]:
        """What the model computes with, also where an update that broke off has replaced it by tensors to load into."""
        found = [*self.model.parameters(), *self.model.buffers()]
        for layer in self.model.modules():
            replaced = get_layerwise_info(layer).kernel_tensors
            if replaced is not None:
                found += [*replaced[0].values(), *replaced[1].values()]
        return [tensor for tensor in found if not tensor.is_meta]

    def record_next(self) -> None:
        """Watch the next update, which is a whole one, and find out how the loaders fill the parameters."""
        self._records = True

    def prove_next(self) -> None:
        """Remember what would be written of the next update, which is a whole one, for :func:`compare_bits`."""
        self._proves_next = True

    def load_next(self, names: frozenset[str]) -> None:
        """The next update brings these checkpoint tensors alone: all of the layers that they fill."""
        self._part = names

    def receive_weights(self, update_info: BucketUpdate) -> None:
        """Load one bucket: one copy to the device, then views of it through the model's own loader; adapters wait for the end.

        Raises:
            WeightSyncError: with ``last`` when parameters of the model were in no bucket.
        """
        data = self.bytes_of(update_info.payload)
        if self._adapters is not None:
            self._adapters |= {name: tensor.clone() for name, tensor in unpack(update_info.bucket, data)}
            return
        data = data.to(self.device)
        if self._proves:
            self.written |= self._source_bits(update_info.bucket, data)
        loaded: set[str] | None
        recorder = _recorder()
        if recorder is None:
            loaded = self.model.load_weights(unpack(update_info.bucket, data))
        else:
            with recorder.watching(), recorder.loading(update_info.bucket, data):
                loaded = self.model.load_weights(unpack(update_info.bucket, data))
        if self._is_filled_again(update_info.payload):
            self._keep_pieces(data)
        # Models without bookkeeping return None; the names of the manifest were checked before.
        self._loaded |= self._required if loaded is None else loaded
        if update_info.last and (missing := sorted(self._required - self._loaded)):
            raise WeightSyncError(f"the model's loader got no data for {shorten(missing)}; send a full update")

    def fetch(self, payload: Remote) -> torch.Tensor:
        """What this process has to get by itself."""
        return payload.fetch(self.vllm_config.parallel_config.rank, self.device)

    def bytes_of(self, payload: Payload) -> torch.Tensor:
        """On the device where this process gets them by itself or reads them in shared memory, on the host otherwise."""
        if isinstance(payload, Remote):
            return self.fetch(payload)
        if self._staging is not None and isinstance(payload, SharedBytes):
            return self._staging.onto(payload)
        return as_byte_tensor(view(payload))

    def changes_of(self, payload: Payload) -> torch.Tensor:
        """What came, where it is not a whole bucket."""
        if isinstance(payload, Kept):
            return payload.fetch_arriving(self.vllm_config.parallel_config.rank, self.device)
        return self.bytes_of(payload)

    def _is_filled_again(self, payload: Payload) -> bool:
        """Whether the model's loader sees memory that the next bucket may come to."""
        return payload.lent if isinstance(payload, Remote) else self.device.type == "cpu" and isinstance(payload, SharedBytes)

    def _keep_pieces(self, data: torch.Tensor) -> None:
        """Copy what layers wait with for the rest of theirs: the next bucket may come to the same memory."""
        memory = data.untyped_storage().data_ptr()
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for name, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == memory:
                        bound.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        """Pack what was loaded for the kernels and put it into the original storage; adapters wait for :func:`install_received`."""
        if self._adapters is not None:
            return
        recorder = _recorder()
        with nullcontext() if recorder is None else recorder.watching():
            finalize_layerwise_reload(self._loading, self.model_config)
            repack_shared_weights(self._loading)
            if self.device.type == "cpu":
                repack_experts(self._loading)
        if recorder is not None:
            _thread.recorder, self.plan = None, recorder.plan()
            self._layers = dict(self.model.named_modules())
            self._writers.clear()

    def write_whole(self, bucket: Bucket, payload: Payload) -> None:
        """Write a bucket's exact tensors into the parameters, after a load was recorded."""
        places = {name: [(self._parameter(path), region) for path, region in found] for name, found in self._places(bucket)}
        write_whole(places, bucket, self.bytes_of(payload).to(self.device))

    def write_changes(self, bucket: Bucket, payload: Payload) -> None:
        """The same of what changed in it."""
        known, writer = self._writers.get(bucket.index, (None, None))
        if writer is None or known != bucket:
            writer = ChangeWriter(bucket, [(name, region) for name, found in self._places(bucket) for _, region in found])
            self._writers[bucket.index] = bucket, writer
        parameters = [self._parameter(path) for _, found in self._places(bucket) for path, _ in found]
        writer.write(parameters, self.changes_of(payload))

    def _places(self, bucket: Bucket) -> list[tuple[str, tuple[tuple[Path, Region], ...]]]:
        assert self.plan is not None
        return [(slot.name, self.plan.places[slot.name]) for slot in bucket.slots if slot.name in self.plan.places]

    def _parameter(self, path: Path) -> torch.Tensor:
        """As it is now: a load may have replaced it."""
        layer, name = path
        found: torch.Tensor = getattr(self._layers[layer], name)
        return found.detach()

    def write_constants(self) -> None:
        """Write what loaders fill with one number."""
        assert self.plan is not None
        for path, region, value in self.plan.constants:
            region.in_target(self._parameter(path)).fill_(value)

    def exact_bits(self) -> dict[str, list[int]]:
        """Fingerprints of all that exact tensors have in the parameters, by tensor."""
        assert self.plan is not None
        return {
            tensor: [fingerprint_of(region.in_target(self._parameter(path))) for path, region in found]
            for tensor, found in self.plan.places.items()
        }

    def _source_bits(self, bucket: Bucket, data: torch.Tensor) -> dict[str, list[int]]:
        """The same of a bucket's exact tensors, as they are on their way to the parameters."""
        assert self.plan is not None
        found = self.plan.places
        return {
            name: [fingerprint_of(region.in_source(tensor)) for _, region in found[name]]
            for name, tensor in unpack(bucket, data)
            if name in found
        }

    def take_adapters(self) -> dict[str, torch.Tensor]:
        """All that the last update brought; they are the caller's now."""
        taken, self._adapters = self._adapters or {}, {}
        return taken

    def free(self, holdings: Holdings) -> None:
        """Free what this process holds of a transport, page-locked mappings among it."""
        holdings.free()
        if self._staging is not None and holdings.segments is not None:
            self._staging.forget(holdings.segments)

    def shutdown(self) -> None:
        """Let go of shared memory."""
        if self._staging is not None:
            self._staging.close()


def start_recorded(worker: Any) -> None:
    """Start an update, a whole one, which is watched; see :mod:`~rljob_runtime.engine.vllm.load_record`."""
    worker.weight_transfer_engine.record_next()
    start_update(worker)


def start_proven(worker: Any) -> None:
    """Start an update, a whole one, of which :func:`compare_bits` compares what it leaves with what would have been written."""
    worker.weight_transfer_engine.prove_next()
    start_update(worker)


def start_partial(worker: Any, names: frozenset[str]) -> None:
    """Start an update of some checkpoint tensors."""
    worker.weight_transfer_engine.load_next(names)
    start_update(worker)


def plan_of(worker: Any) -> LoadPlan | None:
    """What the recorded update showed, without the places in this worker."""
    plan: LoadPlan | None = worker.weight_transfer_engine.plan
    return None if plan is None else replace(plan, places={}, constants=())


def write_bucket(worker: Any, bucket: Bucket, payload: Payload, is_whole: bool) -> None:
    """Write a bucket's exact tensors into the parameters, all of them or what changed; a worker that fetches it may keep a copy."""
    engine = worker.weight_transfer_engine
    (engine.write_whole if is_whole else engine.write_changes)(bucket, payload)


def write_constants(worker: Any) -> None:
    """Write what is in parameters, and in no bucket."""
    worker.weight_transfer_engine.write_constants()


def remember_bits(worker: Any) -> None:
    """Keep what identifies the numbers of all exact tensors in the parameters."""
    worker.weight_transfer_engine.written = worker.weight_transfer_engine.exact_bits()


def compare_bits(worker: Any) -> None:
    """Compare the parameters with what was remembered of them.

    Raises:
        WeightSyncError: they differ.
    """
    engine = worker.weight_transfer_engine
    now, engine.written, before = engine.exact_bits(), {}, engine.written
    if found := sorted(name for name, bits in now.items() if bits != before[name]):
        raise WeightSyncError(f"{NOT_WRITTEN} {shorten(found)}")


def fetch_tests(worker: Any, tests: tuple[Remote, ...]) -> None:
    """Fetch, in a process of the engine, what is not loaded.

    Raises:
        CorruptedWeightsError, WeightSyncError, DeadlineError: as of ``Remote.fetch``.
    """
    for test in tests:
        worker.weight_transfer_engine.fetch(test)


def leave_transport(worker: Any, holdings: Holdings) -> None:
    """Free what a process holds of a transport."""
    worker.weight_transfer_engine.free(holdings)


def start_update(worker: Any) -> None:
    """vLLM's ``start_weight_update``, also if the last update failed on other ranks only.

    vLLM closes an update only on ranks where it failed, and refuses to start while one is open.
    """
    held = getattr(worker, "worker", worker)  # vLLM's wrapper passes on what is read, not what is written
    if held._weight_update_active:
        held._weight_update_active = False
        held.weight_transfer_engine.reset_weight_update_target()
    worker.start_weight_update()


def attempted(worker: Any, call: str | Callable[..., object], arguments: tuple[object, ...]) -> str | None:
    """Call a method of a worker, or a function with it; what went wrong as text, None where nothing did.

    vLLM's executor stops at the first rank with an error and leaves the answers of later ranks in their queues, so that each later call
    would take the answer to the one before it. So an error is an answer here.
    """
    try:
        if isinstance(call, str):
            getattr(worker, call)(*arguments)
        else:
            call(worker, *arguments)
    except Exception as error:  # the caller raises it
        logger.exception("%s of a weight update failed", call if isinstance(call, str) else call.__name__)
        return f"{type(error).__name__}: {error}"
    return None
