"""BYTES: after any number of offload cycles every tensor is bit-equal, and a model trained in between does not notice."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rljob_runtime.errors import OffloadError
from rljob_runtime.offload.slabs import SMALLEST_CHUNK_BYTES, HostSlabs
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.offload.store import StateStore
from rljob_runtime.training.parallel import local_tensor
from rljob_runtime.training.state import TRAINED_STATE, policy_state, prepare_offload
from tests.support.offload_fakes import CPU, FailingCopies, LateCopies, bytes_of, make_store

KINDS = (StateKind.PARAMS, StateKind.OPTIMIZER, StateKind.OTHER)
DTYPES = [
    getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "bool", "complex64")
    if hasattr(torch, name)
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_tensor(dtype: torch.dtype, elements: int, seed: int) -> torch.Tensor:
    """Any bits that the dtype can hold, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    return torch.randint(0, 256, (elements * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, tuple[StateKind, torch.Tensor]]:
    """Tensors of every kind and dtype: own ones, views of one flat storage, tied and frozen parameters, empty ones."""
    result = {}
    for index in range(draw(st.integers(1, 6))):
        dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
        tensor = random_tensor(dtype, draw(st.sampled_from([0, 1, 3, 1000, 20_000, 70_001])), index)
        if draw(st.booleans()):
            tensor = nn.Parameter(tensor, requires_grad=False)
        result[f"t{index}"] = (kind, tensor)
        if draw(st.booleans()):
            result[f"t{index}.tied"] = (kind, tensor)
        if draw(st.booleans()):
            result[f"t{index}.view"] = (kind, tensor.detach()[tensor.numel() // 3 :])
        if draw(st.booleans()):
            half = tensor.numel() // 2
            result[f"t{index}.strided"] = (kind, tensor.detach()[::3])
            result[f"t{index}.transposed"] = (kind, tensor.detach()[: 2 * half].view(2, half).t())
    return result


MOVES = st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(KINDS))), max_size=8)


def register_all(store: StateStore, world: dict[str, tuple[StateKind, torch.Tensor]]) -> None:
    for name, (kind, tensor) in world.items():
        store.register(kind, name, tensor)


@settings(max_examples=40)
@given(worlds(), MOVES, st.booleans())
def test_random_cycles_leave_every_byte(
    world: dict[str, tuple[StateKind, torch.Tensor]], moves: list[tuple[bool, set[StateKind]]], late: bool
) -> None:
    store = make_store(LateCopies() if late else None)
    register_all(store, world)
    kept = {name: (id(tensor), bytes_of(tensor)) for name, (_, tensor) in world.items()}
    total_bytes = store.memory().allocated_bytes
    for out, kinds in moves:
        report = store.offload(kinds) if out else store.load(kinds)
        change_bytes = sum(report.freed_bytes.values()) * (1 if out else -1)
        assert report.before.allocated_bytes - report.after.allocated_bytes == change_bytes
        assert report.copied_bytes == report.freed_bytes
        assert report.after.peak_bytes <= total_bytes
        for name, (kind, tensor) in world.items():
            if store.residence(kind) is Residence.OFFLOADED:
                assert tensor.untyped_storage().size() == 0, name
            else:
                assert bytes_of(tensor) == kept[name][1], name
    store.load(KINDS)
    assert {name: (id(tensor), bytes_of(tensor)) for name, (_, tensor) in world.items()} == kept


@settings(max_examples=40)
@given(worlds(), MOVES, st.sets(st.integers(0, 60), max_size=12))
def test_random_failures_leave_equality_or_broken(
    world: dict[str, tuple[StateKind, torch.Tensor]], moves: list[tuple[bool, set[StateKind]]], failing: set[int]
) -> None:
    store = make_store(FailingCopies(*failing))
    register_all(store, world)
    kept = {name: bytes_of(tensor) for name, (_, tensor) in world.items()}
    for out, kinds in moves:
        before = {kind: store.residence(kind) for kind in StateKind}
        try:
            (store.offload if out else store.load)(kinds)
        except OffloadError as error:
            if error.rolled_back:
                assert {kind: store.residence(kind) for kind in StateKind} == before
            else:
                assert Residence.BROKEN in {store.residence(kind) for kind in kinds}
    for name, (kind, tensor) in world.items():
        residence = store.residence(kind)
        assert residence in (Residence.ON_DEVICE, Residence.OFFLOADED, Residence.BROKEN)
        if residence is Residence.ON_DEVICE:
            assert bytes_of(tensor) == kept[name]
        elif residence is Residence.OFFLOADED or tensor.untyped_storage().size() == 0:
            assert tensor.untyped_storage().size() == 0
        else:
            assert bytes_of(tensor) == kept[name], "Broken, but no half-loaded tensor looks valid"


@settings(max_examples=20)
@given(worlds(), st.integers(0, 12))
def test_the_host_budget_is_never_exceeded(world: dict[str, tuple[StateKind, torch.Tensor]], chunks: int) -> None:
    budget_bytes = chunks * SMALLEST_CHUNK_BYTES
    slabs = HostSlabs(pinned=False, budget_bytes=budget_bytes, chunk_bytes=SMALLEST_CHUNK_BYTES)
    store = StateStore(CPU, slabs)
    register_all(store, world)
    for kind in KINDS:
        needed_bytes = store.memory().allocated_bytes
        with contextlib.suppress(OffloadError):
            store.offload([kind])
        assert slabs.held_bytes <= budget_bytes
        if slabs.held_bytes + needed_bytes + 2 * SMALLEST_CHUNK_BYTES <= budget_bytes:
            assert store.residence(kind) is Residence.OFFLOADED, "refused although there was room"


# ------------------------------------------------------------------ FSDP2


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    """Embedding, a frozen layer, a trained one, a buffer, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.layer = nn.Linear(24, 24)
        self.head = nn.Linear(24, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(self.frozen(self.embedding(tokens) * self.scale.to(self.head.weight.dtype)))))


def train(policy: MixedPrecisionPolicy, cycles: list[list[StateKind]], lr: float = 1e-2) -> list[str]:
    """Losses, as exact hexadecimal numbers, of one update per entry, with an offload and load of its kinds behind it."""
    torch.manual_seed(11)
    model = Tied()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    store = policy_state(model, optimizer, CPU, None, "policy")
    assert isinstance(model.layer.weight, DTensor)
    losses = []
    for step, kinds in enumerate(cycles):
        tokens = torch.randint(0, 31, (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item().hex())
        prepare_offload(model)
        store.offload(kinds)
        for name, parameter in model.named_parameters():
            size = parameter._local_tensor.untyped_storage().size()
            assert (size == 0) is (StateKind.PARAMS in kinds), name
        store.load(kinds)
    return losses


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_trains_bit_equal_through_offloads(policy: MixedPrecisionPolicy) -> None:
    everything = list(StateKind)
    plain = train(policy, [[]] * 6)
    assert train(policy, [everything, [StateKind.OPTIMIZER], [StateKind.PARAMS], [], everything, everything]) == plain
    assert len(set(plain)) == 6, "the model learns, so losses differ"
    assert train(policy, [[]] * 6, lr=1.1e-2)[1:] != plain[1:], "losses tell updates apart"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), failing=st.sets(st.integers(0, 120), max_size=10))
@pytest.mark.usefixtures("one_rank")
def test_shards_and_moments_survive_random_updates_moves_failures_and_checkpoints(data: st.DataObject, failing: set[int]) -> None:
    """Against a twin whose state never moves: every byte of weights, buffers and moments, or Broken and refused."""
    moved, twin = sharded(), sharded()
    store = policy_state(moved.model, moved.optimizer, CPU, None, "policy")
    store.copies = FailingCopies(*failing)
    for step in range(data.draw(st.integers(1, 5))):
        if data.draw(st.integers(0, 3)) == 0:
            for one in (moved, twin):
                one.optimizer.load_state_dict(one.optimizer.state_dict())  # replaces all of its tensors
        for one in (moved, twin):
            one.update(step)
        for out, kinds in data.draw(MOVES):
            with contextlib.suppress(OffloadError):
                (store.offload if out else store.load)(kinds)
        store.copies = FailingCopies()
        with contextlib.suppress(OffloadError):
            store.load([kind for kind in StateKind if store.residence(kind) is Residence.OFFLOADED])
        if Residence.BROKEN in {store.residence(kind) for kind in StateKind}:
            with pytest.raises(OffloadError, match="Broken"):
                store.require(StateKind, "update")
            return
        store.require(TRAINED_STATE, "update")
        assert moved.bytes() == twin.bytes()
        store.copies = FailingCopies(*(index - 10 * step for index in failing))


@dataclass
class Sharded:
    """A sharded model and its optimizer."""

    model: Tied
    optimizer: torch.optim.AdamW

    def update(self, seed: int) -> None:
        tokens = torch.randint(0, 31, (16,), generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(self.model(tokens), tokens.roll(1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        prepare_offload(self.model)

    def bytes(self) -> list[bytes]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [bytes_of(local_tensor(t.detach())) for t in (*self.model.parameters(), *self.model.buffers(), *states)]


def sharded() -> Sharded:
    torch.manual_seed(11)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return Sharded(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


@pytest.mark.usefixtures("one_rank")
def test_fsdp_keeps_all_its_views_on_the_storage_that_moves() -> None:
    """Of ``FSDPParam``: if torch keeps a shard elsewhere some day, offload would not free it."""
    torch.manual_seed(1)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.arange(5)).sum().backward()
    (group,) = fully_shard.state(model)._fsdp_param_groups
    for parameter in group.fsdp_params:
        storages = {t.untyped_storage()._cdata for t in (parameter._sharded_param_data, parameter._sharded_local_tensor)}
        assert storages == {parameter.sharded_param._local_tensor.untyped_storage()._cdata}
