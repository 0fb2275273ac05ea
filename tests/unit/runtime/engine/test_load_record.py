"""What a recorded load says of a model's loaders: exact ones by region, others loaded with all of their layer; on a model of plain torch.

The loaders do what vLLM's do: fused projections cut for a rank, rows of a padded vocabulary, stacked experts, packing for kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from rljob_runtime.engine.vllm.load_record import LoadPlan, LoadRecorder, closed, joined
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.delta import DeltaEncoder
from rljob_runtime.weightsync.packing import as_byte_tensor, pack, plan_buckets, unpack
from rljob_runtime.weightsync.patching import Places, different, write_changes

RANKS, HIDDEN, HEADS, MLP, EXPERTS, VOCAB, PADDED = 2, 8, 4, 6, 3, 10, 12
Loader = Callable[..., None]


class Layer(nn.Module):
    """Parameters with loaders, and what is done once they are filled."""

    def __init__(self, process: Callable[[Layer], None] | None = None, **parameters: tuple[tuple[int, ...], Loader]) -> None:
        super().__init__()
        self.process = process
        for name, (shape, loader) in parameters.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            parameter.load = loader  # type: ignore[attr-defined]
            setattr(self, name, parameter)


def whole(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)


def rows_of(part: int, rank: int) -> Loader:
    """One of several matrices stacked in a parameter, of which a rank has its rows."""

    def load(param: torch.Tensor, loaded: torch.Tensor) -> None:
        size = loaded.shape[0] // RANKS
        param.data.narrow(0, part * size, size).copy_(loaded.narrow(0, rank * size, size))

    return load


def columns(rank: int) -> Loader:
    def load(param: torch.Tensor, loaded: torch.Tensor) -> None:
        size = loaded.shape[1] // RANKS
        param.data.copy_(loaded.narrow(1, rank * size, size))

    return load


def padded(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param[: loaded.shape[0]].data.copy_(loaded)
    param[loaded.shape[0] :].data.fill_(0)


def expert(index: int, part: int) -> Loader:
    def load(param: torch.Tensor, loaded: torch.Tensor) -> None:
        param.data[index].narrow(0, part * MLP, MLP).copy_(loaded)

    return load


def transposed(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded.t())


def shifted(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded + 1)


def number(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.fill_(loaded.item())


def copied(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded.contiguous().clone())


class Model(nn.Module):
    """Layers by name, and which parameter the tensors of a checkpoint go to by which loader."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.embed = Layer(weight=((PADDED, HIDDEN), padded))
        self.head = Layer()
        self.head.weight = self.embed.weight  # tied
        self.qkv = Layer(weight=((3 * HEADS // RANKS, HIDDEN), whole), bias=((3 * HEADS // RANKS,), whole))
        self.down = Layer(weight=((HIDDEN, MLP // RANKS), columns(rank)))
        self.experts = Layer(w13=((EXPERTS, 2 * MLP, HIDDEN), whole))
        self.norm = Layer(weight=((HIDDEN,), whole))
        self.into: dict[str, tuple[str, str, Loader, tuple[int, ...]]] = {
            "embed_tokens.weight": ("embed", "weight", padded, (VOCAB, HIDDEN)),
            "down_proj.weight": ("down", "weight", columns(rank), (HIDDEN, MLP)),
            "norm.weight": ("norm", "weight", whole, (HIDDEN,)),
        }
        for part, name in enumerate("qkv"):
            self.into[f"{name}_proj.weight"] = ("qkv", "weight", rows_of(part, rank), (HEADS, HIDDEN))
            self.into[f"{name}_proj.bias"] = ("qkv", "bias", rows_of(part, rank), (HEADS,))
        for index in range(EXPERTS):
            for part, name in enumerate(("gate", "up")):
                self.into[f"experts.{index}.{name}_proj.weight"] = ("experts", "w13", expert(index, part), (MLP, HIDDEN))

    def manifest(self) -> WeightManifest:
        return plan_buckets([(name, "bfloat16", shape) for name, (_, _, _, shape) in self.into.items()], 10_000)

    def random(self, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=random).bfloat16() for name, (_, _, _, shape) in self.into.items()}


def load(model: Model, tensors: Mapping[str, torch.Tensor]) -> LoadPlan:
    """A load as vLLM reloads a model: a trial run on the meta device, real memory, processing, copies into the memory of before."""
    live = {layer: dict(layer.named_parameters(recurse=False)) for layer in model.modules() if isinstance(layer, Layer)}
    for layer, own in live.items():
        for name, parameter in own.items():
            setattr(layer, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    meta = {layer: dict(layer.named_parameters(recurse=False)) for layer in live}
    recorder = LoadRecorder(model, [parameter for own in live.values() for parameter in own.values()])
    waiting: dict[Layer, list[tuple[str, Loader, torch.Tensor]]] = {layer: [] for layer in live}
    [bucket] = model.manifest().buckets
    packed = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, tensors, packed)
    data = as_byte_tensor(packed)
    with recorder.watching(), recorder.loading(bucket, data):
        for name, view in unpack(bucket, data):
            layer_name, parameter_name, loader, _ = model.into[name]
            layer = model.get_submodule(layer_name)
            assert isinstance(layer, Layer)
            bound = inspect.signature(loader).bind(meta[layer][parameter_name], view)
            recorder.trial(lambda loader, given: (0, loader(*given.args)), loader, bound)
            waiting[layer].append((parameter_name, loader, view))
        for layer, calls in waiting.items():
            if calls:
                for name, parameter in meta[layer].items():
                    setattr(layer, name, nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False))
                recorder.materialized(layer)
                for name, loader, view in calls:
                    loader(getattr(layer, name), view)
                if layer.process is not None:
                    layer.process(layer)
                for name, parameter in live[layer].items():
                    parameter.data.copy_(getattr(layer, name))
            for name, parameter in live[layer].items():
                setattr(layer, name, parameter)
    return recorder.plan()


def places(model: Model, plan: LoadPlan) -> Places:
    return {
        name: [(getattr(model.get_submodule(layer), attribute), region) for (layer, attribute), region in found]
        for name, found in plan.places.items()
    }


def check_changes(model: Model, plan: LoadPlan) -> None:
    """After changes were written, exact parameters have the bits of a model that loaded the new weights."""
    [bucket] = model.manifest().buckets
    encoder, now = DeltaEncoder(1.0), model.random(1)
    load(model, now)
    room = encoder.room(bucket)
    pack(bucket, now, room)
    encoder.encode(1, bucket, room)
    for tensor in now.values():
        tensor.view(-1)[::3] *= -1.5
    room = encoder.room(bucket)
    pack(bucket, now, room)
    data, base = encoder.encode(2, bucket, room)
    assert base == 1
    write_changes(places(model, plan), bucket, data)
    pack(bucket, now, room)
    assert different(places(model, plan), bucket, as_byte_tensor(room)) == []
    exact = {path for found in plan.places.values() for path, _ in found}
    written = {path: getattr(model.get_submodule(path[0]), path[1]).clone() for path in exact}
    load(model, now)
    assert all(torch.equal(written[layer, name], getattr(model.get_submodule(layer), name)) for layer, name in exact)


@pytest.mark.parametrize("rank", range(RANKS))
def test_copies_of_parts_are_regions(rank: int) -> None:
    model = Model(rank)
    plan = load(model, model.random(0))
    assert (plan.refused, plan.reloaded, plan.reasons) == (None, frozenset(), {})
    assert plan.places.keys() == model.into.keys()
    assert all(len(found) == 1 for found in plan.places.values())
    check_changes(model, plan)


def test_a_transposed_copy_is_a_region() -> None:
    model = Model()
    model.into["norm.weight"] = ("norm", "weight", transposed, (4, HIDDEN))
    model.norm = Layer(weight=((HIDDEN, 4), transposed))
    plan = load(model, model.random(0))
    assert plan.reloaded == frozenset()
    check_changes(model, plan)


@pytest.mark.parametrize("loader", [shifted, copied])
def test_a_layer_whose_loader_computes_is_loaded_as_a_whole(loader: Loader) -> None:
    model = Model()
    model.into["k_proj.bias"] = ("qkv", "weight", lambda param, loaded: loader(param.data[:1, :HEADS][0], loaded), (HEADS,))
    plan = load(model, model.random(0))
    assert plan.reloaded == {name for name, (layer, _, _, _) in model.into.items() if layer == "qkv"}
    assert "qkv" in plan.reasons
    check_changes(model, plan)


def test_a_number_that_a_loader_reads_is_not_taken_for_a_constant() -> None:
    model = Model()
    model.into["norm.weight"] = ("norm", "weight", number, (1,))
    plan = load(model, model.random(0))
    assert plan.reloaded == {"norm.weight"}


def packed_elsewhere(layer: Layer) -> None:
    layer.packed = layer.w13.data.transpose(-1, -2).contiguous()


def in_another_order(layer: Layer) -> None:
    layer.w13 = nn.Parameter(layer.w13.data.flip(0), requires_grad=False)


def scaled_in_place(layer: Layer) -> None:
    layer.w13.data.mul_(2)


@pytest.mark.parametrize("process", [packed_elsewhere, in_another_order, scaled_in_place])
@pytest.mark.parametrize("value", [None, 0.0], ids=["random", "all zeros"])
def test_processing_for_kernels_is_seen_whatever_the_numbers_are(process: Callable[[Layer], None], value: float | None) -> None:
    """With zeros alone the parameter would have the checkpoint's bits all the same."""
    model = Model()
    model.experts.process = process
    tensors = model.random(0)
    if value is not None:
        tensors = {name: torch.full_like(tensor, value) if "experts" in name else tensor for name, tensor in tensors.items()}
    plan = load(model, tensors)
    assert plan.reloaded == {name for name in model.into if "experts" in name}
    check_changes(model, plan)


def test_processing_of_a_tied_layer_concerns_what_it_is_tied_to() -> None:
    model = Model()
    model.embed.process = lambda layer: setattr(layer, "packed", layer.weight.data.clone())
    plan = load(model, model.random(0))
    assert plan.reloaded == {"embed_tokens.weight"}
    assert plan.layers["embed_tokens.weight"] == {"embed", "head"}


def test_a_part_that_no_loader_fills_or_two_fill_is_no_region() -> None:
    model = Model()
    del model.into["experts.1.up_proj.weight"]
    model.into["v_proj.weight"] = ("qkv", "weight", rows_of(1, 0), (HEADS, HIDDEN))
    plan = load(model, model.random(0))
    assert plan.reasons["experts"] == "w13: parts of it are not loaded"
    assert plan.reasons["qkv"] == "weight: loaders write the same numbers twice"


def test_numbers_computed_before_the_loader_refuse_the_whole_recording() -> None:
    model = Model()
    recorder = LoadRecorder(model, list(model.parameters()))
    [bucket] = model.manifest().buckets
    data = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
    with recorder.watching(), recorder.loading(bucket, data):
        bound = inspect.signature(whole).bind(model.norm.weight, torch.ones(HIDDEN))
        recorder.trial(lambda loader, given: (0, loader(*given.args)), whole, bound)
    refused = recorder.plan().refused
    assert refused is not None
    assert "norm.weight gets numbers that were computed" in refused


def test_latent_attention_refuses_the_recording() -> None:
    """Its products of a weight are outside the weight's layer, so that neither writes nor a load of that layer would renew them."""
    model = Model()
    setattr(model.norm, "kv_lora_rank", 4)  # noqa: B010 - modules declare tensors alone
    model.norm.kv_b_proj = nn.Linear(1, 1)
    refused = LoadRecorder(model, list(model.parameters())).plan().refused
    assert refused == "latent attention (MLA) computes with products of kv_b_proj, which only a whole load renews"


def test_tensors_of_shared_layers_are_loaded_together() -> None:
    layers = {"a": frozenset({"1", "2"}), "b": frozenset({"2", "3"}), "c": frozenset({"3"}), "d": frozenset({"4"})}
    assert closed({"a"}, layers) == {"a", "b", "c"}
    assert closed({"d"}, layers) == {"d"}


LAYERS = {"q": frozenset({"attn"}), "k": frozenset({"attn"}), "up": frozenset({"mlp"}), "norm": frozenset({"norm"})}
EXACT = LoadPlan(places={}, layers=LAYERS, reloaded=frozenset())
PACKED = LoadPlan(places={}, layers=LAYERS, reloaded=frozenset({"q"}), reasons={"attn": "weight: its numbers are not the checkpoint's"})
PAST = LoadPlan(places={}, layers=LAYERS, reloaded=frozenset({"norm"}))
REFUSED = LoadPlan(places={}, layers={}, reloaded=frozenset(), refused="the loader of mlp.up gets numbers that were computed")


@pytest.mark.parametrize(
    ("plans", "fraction", "said"),
    [
        ([EXACT, EXACT], 0.0, None),
        ([EXACT, PACKED], 0.5, "2 of 4 tensors as whole ones where they change: attn.weight: its numbers are not the checkpoint's"),
        ([PAST, EXACT], 0.25, "1 of 4 tensors as whole ones where they change: they are copied past their weight loaders"),
        ([EXACT, REFUSED], 1.0, "loaded as whole ones: the loader of mlp.up"),
        ([EXACT, None], 1.0, "loaded as whole ones: a worker has recorded nothing"),
    ],
    ids=["exact", "packed", "past", "refused", "missing"],
)
def test_an_engine_names_what_its_workers_have_to_load(plans: list[LoadPlan | None], fraction: float, said: str | None):
    plan = joined(plans)
    assert plan.reloaded_fraction == fraction
    assert plan.limits is None if said is None else said in str(plan.limits)
