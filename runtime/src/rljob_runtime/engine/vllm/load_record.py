"""How a model's own weight loaders copy checkpoint tensors into its parameters, seen during one whole load.

::

    loader(param, view of a checkpoint tensor)   ── trial run that vLLM makes on the meta device ──> Region
    processing for kernels                       ── what it reads of a parameter has a copy elsewhere ──> the layer is loaded as a whole
    parameters after the load                    ── bits compared with those of the checkpoint ──> proof

A tensor whose numbers are converted, computed with, or packed for kernels is not exact, and with it all tensors of its layer: these are
loaded again where something changed in them. Everything here errs on that side.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rljob_runtime.records import Bucket, TensorSlot
from rljob_runtime.weightsync.assembly import shorten
from rljob_runtime.weightsync.packing import DTYPE_BYTES
from rljob_runtime.weightsync.parcel import fingerprint
from rljob_runtime.weightsync.patching import Region

Path = tuple[str, str]
"""Name of a layer, and of a parameter or buffer in it."""
COPY = torch.ops.aten.copy_.default
CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Where the numbers of each checkpoint tensor go."""

    places: Mapping[str, tuple[tuple[Path, Region], ...]]
    """Of exact tensors; none where this process has no part of a tensor."""
    layers: Mapping[str, frozenset[str]]
    """Of every tensor, the names of the layers that its loaders fill, and of those that share parameters with them."""
    reloaded: frozenset[str]
    """Tensors that have to be loaded, all of their layers."""
    refused: str | None = None
    """Why all tensors have to be loaded; None: the rest holds."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why tensors are not exact, by name of the layer."""
    constants: tuple[tuple[Path, Region, float], ...] = ()
    """What loaders fill with one number, as the end of a padded vocabulary."""
    is_complete: bool = False
    """Whether exact tensors and constants fill all parameters, so that nothing of what these had before is needed."""

    @property
    def reloaded_fraction(self) -> float:
        """Share of the tensors that have to be loaded."""
        return 1.0 if self.refused is not None else len(self.reloaded) / max(1, len(self.layers))

    @property
    def limits(self) -> str | None:
        """What has to be loaded and why, for the log; None where nothing has to."""
        if self.refused is not None:
            return f"sparse updates are loaded as whole ones: {self.refused}"
        if not self.reloaded:
            return None
        why = shorten(sorted(f"{layer}.{reason}" for layer, reason in self.reasons.items())) or "they are copied past their weight loaders"
        return f"sparse updates load {len(self.reloaded)} of {len(self.layers)} tensors as whole ones where they change: {why}"


def joined(plans: Sequence[LoadPlan | None]) -> LoadPlan:
    """What holds for all workers of an engine, without places; None: a worker has recorded nothing."""
    found = [plan for plan in plans if plan is not None]
    refused = (
        "a worker has recorded nothing" if len(found) < len(plans) else next((p.refused for p in found if p.refused is not None), None)
    )
    layers: dict[str, frozenset[str]] = {}
    for plan in found:
        layers |= {name: own | layers.get(name, frozenset()) for name, own in plan.layers.items()}
    reloaded = closed({name for plan in found for name in plan.reloaded}, layers)
    reasons = {layer: why for plan in found for layer, why in plan.reasons.items()}
    complete = refused is None and all(plan.is_complete for plan in found)
    return LoadPlan(places={}, layers=layers, reloaded=reloaded, refused=refused, reasons=reasons, is_complete=complete)


def closed(names: Collection[str], layers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Tensors that have to be loaded together with some, because a layer is loaded as a whole."""
    by_layer: dict[str, set[str]] = defaultdict(set)
    for name, own in layers.items():
        for layer in own:
            by_layer[layer].add(name)
    found, waiting = set(names), list(names)
    while waiting:
        for layer in layers.get(waiting.pop(), ()):
            waiting += by_layer[layer] - found
            found |= by_layer[layer]
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    name: str
    region: Region
    proof: int
    """Fingerprint of the source."""


def storage_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory from others', also on the meta device, as long as it is there."""
    return tensor.untyped_storage()._cdata


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return storage_of(tensor), int(tensor.storage_offset())


def _tensors(*values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_view(func: Any, given: tuple[Any, ...], answer: object) -> bool:
    """Whether an operator only looked at the same memory in another way; some copy where they must, as ``contiguous`` does."""
    returns = func._schema.returns
    if not returns or any(found.alias_info is None or found.alias_info.is_write for found in returns):
        return False
    return {storage_of(tensor) for tensor in _tensors(answer)} <= {storage_of(tensor) for tensor in _tensors(given)}


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator writes to."""
    names = [argument.name for argument in func._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return _tensors([given.get(name) for name in names])


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    layout = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other)]
    return layout[0] == layout[1]


class _Source:
    """The bucket that is being loaded."""

    def __init__(self, bucket: Bucket, data: torch.Tensor) -> None:
        self.storage = storage_of(data)
        self._data = data
        self._slots = sorted(bucket.slots, key=lambda slot: slot.offset_bytes)

    def place(self, view: torch.Tensor) -> tuple[TensorSlot, int] | None:
        """The tensor of which ``view`` is a part, and its first number there; None where it is not one part of one tensor."""
        begin = view.storage_offset() * view.element_size() - self._data.storage_offset()
        end = begin + (1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))) * view.element_size()
        for slot in self._slots:
            if slot.offset_bytes <= begin and end <= slot.offset_bytes + slot.size_bytes:
                if str(view.dtype) != f"torch.{slot.dtype}" or (begin - slot.offset_bytes) % DTYPE_BYTES[slot.dtype]:
                    return None
                return slot, (begin - slot.offset_bytes) // DTYPE_BYTES[slot.dtype]
        return None

    def names(self, views: Collection[torch.Tensor]) -> set[str]:
        """Tensors that begin or end in the memory of views of this bucket."""
        found = set()
        for view in views:
            begin = view.storage_offset() * view.element_size() - self._data.storage_offset()
            found |= {slot.name for slot in self._slots if slot.offset_bytes <= begin < slot.offset_bytes + max(slot.size_bytes, 1)}
        return found


class _LoaderTrace(TorchDispatchMode):
    """What one call of a weight loader does with one parameter."""

    def __init__(self, target: torch.Tensor, source: _Source) -> None:
        super().__init__()
        self._target, self._source = target, source
        self._storage = storage_of(target)
        self.copied: list[_Copied] = []
        self.constant: list[tuple[Region, float]] = []
        self.fault: str | None = None
        """Why it is no plain copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if not _is_view(func, args, answer):
            with _disable_current_modes():
                self._see(func, args, kwargs or {})
        return answer

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        written = [tensor for tensor in _written(func, args, kwargs) if storage_of(tensor) == self._storage]
        if func is COPY and written:
            if not (storage_of(args[1]) == self._storage and _same_view(args[0], args[1])):
                self._copy(args[0], args[1])
        elif func in CONSTANTS and written:
            region = self._region(args[0], 0, args[0].contiguous().stride())
            if region is None:
                self.fault = f"{func} of overlapping numbers"
            else:
                self.constant.append((region, float(args[1]) if len(args) > 1 else 0.0))
        elif written or any(storage_of(tensor) in (self._storage, self._source.storage) for tensor in _tensors(args, kwargs)):
            self.fault = f"its loader computes {func}"

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        place = self._source.place(source) if storage_of(source) == self._source.storage and source.numel() else None
        if place is None or source.dtype != target.dtype or source.shape != target.shape:
            if target.numel():
                self.fault = f"its loader copies {source.dtype}{tuple(source.shape)}, which is no part of a tensor, to {target.dtype}"
            return
        slot, first = place
        region = self._region(target, first, source.stride())
        if region is None:
            self.fault = "its loader copies overlapping numbers"
            return
        proof = fingerprint_of(source.as_strided(region.shape, region.source_strides))
        self.copied.append(_Copied(name=slot.name, region=region, proof=proof))

    def _region(self, target: torch.Tensor, first: int, strides: tuple[int, ...]) -> Region | None:
        offset = int(target.storage_offset()) - int(self._target.storage_offset())
        return Region.of(target.shape, first, strides, offset, target.stride()) if offset >= 0 else None


def fingerprint_of(view: torch.Tensor) -> int:
    """Of the bits of a view's numbers, in their order."""
    return fingerprint(view.contiguous().reshape(-1).view(torch.uint8))


class _ReadWatch(TorchDispatchMode):
    """Which parameters are read after loaders filled them: something that follows from their numbers lies elsewhere then."""

    def __init__(self, live: Collection[torch.Tensor]) -> None:
        super().__init__()
        self._live = list(live)  # their memory stays theirs
        self._kernel = {storage_of(tensor) for tensor in live}
        self._loading: set[int] = set()
        self.traced: set[int] = set()
        """Memory that loaders were seen to fill."""
        self.read: set[int] = set()
        self.source: _Source | None = None
        self.direct: set[str] = set()
        """Checkpoint tensors that were copied past all loaders."""

    def loading(self, tensors: Collection[torch.Tensor]) -> None:
        """Memory that loaders are about to fill."""
        fresh = {storage_of(tensor) for tensor in tensors} - self._kernel
        self._loading |= fresh
        self.read -= fresh

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if not _is_view(func, args, answer):
            given = {storage_of(tensor) for tensor in _tensors(args, kwargs)}
            self._loading -= {storage_of(tensor) for tensor in _tensors(answer)} - given  # memory that was another's before
            if func is COPY:
                self._copy(args[0], args[1])
            elif func not in CONSTANTS:
                self.read |= given & (self._kernel | self._loading)
        return answer

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        into, out_of = storage_of(target), storage_of(source)
        if into == out_of and _same_view(target, source):
            return
        if into in self._kernel and into not in self.traced:
            if self.source is not None and out_of == self.source.storage:
                self.direct |= self.source.names([source])
            if out_of not in self._loading or out_of in self.read or not _same_view(target, source):
                self.read.add(into)
        elif out_of in self._kernel | self._loading:
            self.read.add(out_of)


class LoadRecorder:
    """Watches one whole load of a model; to be made while its layers are ready to be loaded, on the meta device."""

    def __init__(
        self, model: torch.nn.Module, live: Collection[torch.Tensor], has_copy: Callable[[torch.nn.Module], bool] = lambda layer: False
    ) -> None:
        """Begin to watch.

        Args:
            model: what is loaded.
            live: parameters and buffers that it computes with, which the load fills in the end.
            has_copy: whether a layer is known to compute with something else than its parameters.
        """
        self._model = model
        self._has_copy = has_copy
        self._targets: dict[int, tuple[torch.Tensor, Path]] = {
            id(tensor): (tensor, (layer_name, name))
            for layer_name, layer in model.named_modules()
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
            if tensor is not None
        }
        self._watch = _ReadWatch(live)
        self._source: _Source | None = None
        self._copied: dict[Path, list[_Copied]] = defaultdict(list)
        self._constant: dict[Path, list[tuple[Region, float]]] = defaultdict(list)
        self._layers: dict[str, set[str]] = defaultdict(set)
        """By checkpoint tensor, the layers whose loaders saw it."""
        self._faults: dict[str, str] = {}
        """By layer."""
        self._names: set[str] = set()
        self._refused: str | None = None
        if any(hasattr(layer, "kv_lora_rank") and hasattr(layer, "kv_b_proj") for layer in model.modules()):
            self._refused = "latent attention (MLA) computes with products of kv_b_proj, which only a whole load renews"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all that happens between the first bucket and the last step of processing.

        Below autograd, because its fallback for operators without tensors among their results hides them from modes.
        """
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), self._watch:
            yield

    @contextmanager
    def loading(self, bucket: Bucket, data: torch.Tensor) -> Iterator[None]:
        """Around the load of a bucket, shape (bucket.size_bytes,) uint8."""
        self._source = self._watch.source = _Source(bucket, data)
        self._names |= {slot.name for slot in bucket.slots}
        try:
            yield
        finally:
            self._source = self._watch.source = None

    def materialized(self, layer: torch.nn.Module) -> None:
        """A layer got memory that loaders fill."""
        self._watch.loading([t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None])

    def trial(self, run: Callable[..., tuple[int, object]], loader: Any, given: inspect.BoundArguments) -> tuple[int, object]:
        """A loader's trial run, ``run(loader, given)``, on the meta device."""
        if self._refused is not None:  # nothing that is seen would be of use
            return run(loader, given)
        found = [self._targets[id(value)] for value in given.arguments.values() if id(value) in self._targets]
        source = self._source
        if len(found) != 1 or source is None:
            self._refused = f"a weight loader ({getattr(loader, '__qualname__', loader)}) fills no single parameter of the model"
            return run(loader, given)
        target, path = found[0]
        views = [v for v in _tensors(list(given.arguments.values())) if v is not target and v.numel() and storage_of(v) == source.storage]
        others = [v for v in _tensors(list(given.arguments.values())) if v is not target and storage_of(v) != source.storage and v.numel()]
        if others:
            self._refused = f"the loader of {'.'.join(path)} gets numbers that were computed from the checkpoint's"
        for name in source.names(views):
            self._layers[name].add(path[0])
        self._watch.traced.add(storage_of(target))
        trace = _LoaderTrace(target, source)
        with trace:
            answer = run(loader, given)
        if trace.fault is not None:
            self._faults[path[0]] = f"{path[1]}: {trace.fault}"
        self._copied[path] += trace.copied
        self._constant[path] += trace.constant
        return answer

    def plan(self) -> LoadPlan:
        """What was seen, compared with the parameters as the load left them."""
        if self._refused is not None:
            return LoadPlan(places={}, layers={}, reloaded=frozenset(), refused=self._refused)
        layers = dict(self._model.named_modules())
        for meta, path in self._targets.values():
            if path in self._copied and path[0] not in self._faults and (fault := self._fault(meta, path, layers[path[0]])) is not None:
                self._faults[path[0]] = f"{path[1]}: {fault}"
        shared = self._shared(layers)
        groups = {name: frozenset(other for own in self._layers[name] for other in shared.get(own, {own})) for name in self._names}
        reloaded = closed({name for name, own in groups.items() if own & self._faults.keys()} | self._watch.direct, groups)
        places: dict[str, list[tuple[Path, Region]]] = {name: [] for name in self._names - reloaded}
        for path, copies in self._copied.items():
            for copied in copies:
                if copied.name in places:
                    places[copied.name].append((path, copied.region))
        exact = {name: tuple(found) for name, found in places.items()}
        constants = tuple((path, region, value) for path, found in self._constant.items() for region, value in found)
        return LoadPlan(
            places=exact,
            layers=groups,
            reloaded=reloaded,
            reasons=dict(self._faults),
            constants=constants,
            is_complete=not reloaded and self._is_complete(layers, constants),
        )

    def _is_complete(self, layers: Mapping[str, torch.nn.Module], constants: Sequence[tuple[Path, Region, float]]) -> bool:
        """Whether every parameter is filled; what several layers share is filled by one of them."""
        filled: dict[tuple[int, int], int] = defaultdict(int)
        for (layer, name), copies in self._copied.items():
            filled[_memory_of(getattr(layers[layer], name))] += sum(copied.region.numel for copied in copies)
        for (layer, name), region, value in constants:
            live = getattr(layers[layer], name).detach()
            if not bool((region.in_target(live) == value).all()):
                return False
            filled[_memory_of(live)] += region.numel
        return all(filled[_memory_of(live)] >= live.numel() for live in self._model.parameters())

    def _shared(self, layers: Mapping[str, torch.nn.Module]) -> dict[str, set[str]]:
        """Layers that share a parameter, by each of their names."""
        owners: dict[int, set[str]] = defaultdict(set)
        for name, layer in layers.items():
            for tensor in layer._parameters.values():
                if tensor is not None and tensor.numel():
                    owners[storage_of(tensor)].add(name)
        found: dict[str, set[str]] = {}
        for group in owners.values():
            for name in group:
                found.setdefault(name, set()).update(group)
        return found

    def _fault(self, meta: torch.Tensor, path: Path, layer: torch.nn.Module) -> str | None:
        """Why a parameter is not what loaders copied."""
        live = getattr(layer, path[1], None)
        if live is None or (live.shape, live.stride(), live.dtype) != (meta.shape, meta.stride(), meta.dtype):
            return "it is kept in another form"
        if storage_of(live) in self._watch.read or self._has_copy(layer):
            return "other memory follows from it"
        copies, constant = self._copied[path], self._constant[path]
        covered = torch.zeros(live.untyped_storage().nbytes() // live.element_size(), dtype=torch.bool, device=live.device)
        for region in (*(copied.region for copied in copies), *(region for region, _ in constant)):
            if region.target_offset < 0 or region.in_target(_at(covered, live)).any():
                return "loaders write the same numbers twice"
            region.in_target(_at(covered, live)).fill_(True)
        declared = getattr(meta, "weight_loader_numel", meta.numel())
        if sum(c.region.numel for c in copies) + sum(region.numel for region, _ in constant) < declared:
            return "parts of it are not loaded"
        if any(fingerprint_of(copied.region.in_target(live.detach())) != copied.proof for copied in copies):
            return "its numbers are not the checkpoint's"
        return None


def _at(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flags from the first number of a parameter on."""
    return flags[like.storage_offset() :]
