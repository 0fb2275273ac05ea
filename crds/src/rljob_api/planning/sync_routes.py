"""Which trainer rank feeds which part of which engine when new weights are published. Pure.

::

    TrainerLayout ┐
    EngineLayout ─┼─> sync_plan(backend, ..) -> SyncPlan ── routes() ─> SyncRoute per piece
    SyncBackend ──┘                                └─ figures

A tensor dimension that is cut over devices has ``L = lcm(T, E)`` equal *atoms*, T and E being the tensor parallel sizes of trainer
and engines: trainer shard t holds atoms ``[t*L/T, (t+1)*L/T)``, engine shard e needs ``[e*L/E, (e+1)*L/E)``. A pipeline stage needs the
atoms of its own 1/P of the layers. So T and E, and the numbers of trainer replicas and of engines, may stand in any relation.

Backends that move shards (NCCL, IPC) take each piece from a rank on the same device, else on the same node, else over
the network; of several such ranks from the one that has sent least so far by that wire, else the lowest. Where RLinf 0.3.0 defines a
map (strided engines on the trainer's devices), the routes that stay on a device are its map; the others are what its all-gather moves.
A shard here is whole: FSDP cuts it further over the replicas, which an all-gather undoes before it is sent. Parameters that are not
cut, such as norms, travel with each engine shard's first piece; figures leave them out.

SharedMemory, ObjectStore and TCP move whole tensors: all trainer ranks gather, senders (:func:`chosen_senders`) pack their part of them,
every engine loads all; with TCP each node's copy comes from the node before in a chain. So does NCCL in a job, whose senders broadcast;
its routes by shard are those of RLinf. With IPC the rank on a device gathers what routes bring to it, and the engine there reads it.

Invariants: every engine shard gets every atom it needs exactly once (ONCE), from a rank that holds it (HELD). Time and memory grow with
the routes, at most ``T/E + 2`` per engine device; whole tensors have one per engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapreplace

from rljob_api.adapters import serves_adapters
from rljob_api.errors import PlacementError, counted
from rljob_api.planning.plan import Plan, PlannedComponent
from rljob_api.v1alpha1.components import EngineType, Role
from rljob_api.v1alpha1.operations import THROUGH_HOST_MEMORY, Senders, SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec

CHECK = "D11"
"""Check id of every problem here."""


class Transport(StrEnum):
    """The wire that a route needs."""

    SAME_DEVICE = "SameDevice"
    """A handle; no byte leaves the device."""
    SAME_NODE = "SameNode"
    """Between devices of a node, or through its memory."""
    NETWORK = "Network"
    """Between nodes."""
    NODE_COPY = "NodeCopy"
    """From the copy that an earlier route brought over the network to the engine's node."""


TRANSPORTS = tuple(Transport)
_SAME_DEVICE, _SAME_NODE, _NETWORK = range(3)


@dataclass(frozen=True, slots=True)
class SyncDevice:
    """A device and its node."""

    node_rank: int
    device: int
    """Global rank, or index on its node: only together with the node does it name a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """Trainer processes: rank r holds tensor parallel shard ``r % T`` of replica ``r // T``."""

    ranks: tuple[SyncDevice, ...]
    """Device of each process, by rank."""
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Check sizes.

        Raises:
            PlacementError: D11, no rank, or T does not divide their number.
        """
        world, size = len(self.ranks), self.tensor_parallel_size
        if size < 1 or not world or world % size:
            raise PlacementError(
                CHECK,
                f"the trainer has {world} ranks, not a multiple of its tensor parallel size {size}",
                "change the trainer's placement or training.tensorParallelSize",
            )

    @property
    def num_replicas(self) -> int:
        """Whole copies of the model."""
        return len(self.ranks) // self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Engines: device i of an engine is tensor parallel shard ``i % E`` of pipeline stage ``i // E``."""

    engines: tuple[tuple[SyncDevice, ...], ...]
    """Devices of each engine, by process rank."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Check sizes.

        Raises:
            PlacementError: D11, no engine, or one with another number of devices than E*P.
        """
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        if not self.engines or tensor < 1 or pipeline < 1:
            raise PlacementError(
                CHECK,
                f"weights go to {counted(len(self.engines), 'engine')} "
                f"of tensor parallel size {tensor} and pipeline parallel size {pipeline}",
                "give at least 1 for each",
            )
        for index, devices in enumerate(self.engines):
            if len(devices) != tensor * pipeline:
                raise PlacementError(
                    CHECK,
                    f"engine {index} has {counted(len(devices), 'device')}, but tensor parallel size {tensor} * "
                    f"pipeline parallel size {pipeline} needs {tensor * pipeline}",
                    "change the rollout's placement or the engine's parallel sizes",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRoute:
    """One piece of the weights on its way."""

    source_rank: int
    source: SyncDevice
    engine: int
    engine_shard: int | None
    """Tensor parallel rank in the engine; None: the engine's process takes whole tensors and hands them to its devices itself."""
    stage: int | None
    """Pipeline rank in the engine; None as above."""
    first_atom: int
    end_atom: int
    """Behind the last."""
    share: float
    """Part of the model's bytes that it carries."""
    transport: Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFigures:
    """Where the bytes of one sync go, as fractions of all that engines take in."""

    same_device: float
    same_node: float
    """Through a node's own memory, copies that came over the network before included."""
    network: float
    busiest_rank: int | None
    """The first of the ranks that send most; None where no byte leaves its device."""
    busiest_share: float
    """Its part of the bytes that leave a device."""
    ideal_share: float
    """The part of each rank, were all equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """How one sync of all engines runs; :func:`sync_plan` makes it."""

    backend: SyncBackend
    trainer: TrainerLayout
    engines: EngineLayout
    num_atoms: int
    """L."""
    figures: SyncFigures
    senders: tuple[int, ...]
    """Ranks that share whole tensors out among them."""
    sources: tuple[int, ...] = field(repr=False)
    """Source rank of every route in order, as many for each engine; empty for whole tensors, as the next."""
    transports: bytes = field(repr=False)
    """Its transport, as an index of :data:`TRANSPORTS`."""
    moves_whole_tensors: bool
    """Whether every engine takes in all of every tensor."""

    def routes(self) -> Iterator[SyncRoute]:
        """All routes, by engine, stage, shard and atom; made on the way, so that the plan stays small."""
        return self._whole() if self.moves_whole_tensors else self._shards()

    def _shards(self) -> Iterator[SyncRoute]:
        needs, size = _needs(self.trainer.tensor_parallel_size, self.engines.tensor_parallel_size), self.engines.tensor_parallel_size
        whole = self.num_atoms * self.engines.pipeline_parallel_size
        chosen = zip(self.sources, self.transports, strict=True)
        for engine, devices in enumerate(self.engines.engines):
            for index in range(len(devices)):
                for _, first, end in needs[index % size]:
                    rank, transport = next(chosen)
                    yield SyncRoute(
                        source_rank=rank,
                        source=self.trainer.ranks[rank],
                        engine=engine,
                        engine_shard=index % size,
                        stage=index // size,
                        first_atom=first,
                        end_atom=end,
                        share=(end - first) / whole,
                        transport=TRANSPORTS[transport],
                    )

    def _whole(self) -> Iterator[SyncRoute]:
        """From each sender its part. The store brings one copy to a node, which all engines there read."""
        fetched: set[tuple[int, int]] = set()
        for engine, devices in enumerate(self.engines.engines):
            node = devices[0].node_rank
            for rank in self.senders:
                source = self.trainer.ranks[rank]
                if source.node_rank == node:
                    transport = Transport.SAME_NODE
                else:
                    transport = Transport.NODE_COPY if (rank, node) in fetched else Transport.NETWORK
                    fetched.add((rank, node))
                yield SyncRoute(
                    source_rank=rank,
                    source=source,
                    engine=engine,
                    engine_shard=None,
                    stage=None,
                    first_atom=0,
                    end_atom=self.num_atoms,
                    share=1 / len(self.senders),
                    transport=transport,
                )


def sync_plan(
    backend: SyncBackend, trainer: TrainerLayout, engines: EngineLayout, senders: tuple[int, ...] = (0,), *, broadcasts: bool = False
) -> SyncPlan:
    """Choose the source of every piece that an engine needs. Deterministic; ids of nodes and devices only count as equal or not.

    Args:
        backend: how weights travel.
        trainer: who has them.
        engines: who needs them.
        senders: trainer ranks that pack, with backends that move whole tensors.
        broadcasts: NCCL moves whole tensors, too.

    Raises:
        PlacementError: D11, IPC would have to cross nodes.
    """
    is_whole = backend in THROUGH_HOST_MEMORY or (broadcasts and backend is SyncBackend.NCCL)
    sources, transports, figures = ((), b"", _figures_of_whole(trainer, engines, senders)) if is_whole else _choose(trainer, engines)
    plan = SyncPlan(
        backend=backend,
        trainer=trainer,
        engines=engines,
        num_atoms=math.lcm(trainer.tensor_parallel_size, engines.tensor_parallel_size),
        figures=figures,
        senders=senders if is_whole else (),
        sources=sources,
        transports=transports,
        moves_whole_tensors=is_whole,
    )
    if backend is SyncBackend.IPC and _NETWORK in transports:
        raise _out_of_reach(plan)
    return plan


def sync_plan_of(
    backend: SyncBackend,
    trainer: PlannedComponent,
    rollout: PlannedComponent,
    *,
    senders: tuple[int, ...] = (0,),
    broadcasts: bool = False,
    trainer_tensor_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> SyncPlan:
    """The sync plan of two planned components, the sizes being those of ``training`` and of the rollout's ``engine``.

    Raises:
        PlacementError: D11, sizes do not match the processes, or a trainer process without a device.
    """
    bare = next((process for process in trainer.processes if not process.devices), None)
    if bare is not None:
        raise PlacementError(CHECK, f"trainer rank {bare.rank} has 0 devices, it needs 1", "place the trainer on devices")
    ranks = tuple(SyncDevice(process.node_rank, process.devices[0]) for process in trainer.processes)
    engines = tuple(tuple(SyncDevice(process.node_rank, device) for device in process.devices) for process in rollout.processes)
    return sync_plan(
        backend,
        TrainerLayout(ranks=ranks, tensor_parallel_size=trainer_tensor_parallel_size),
        EngineLayout(engines=engines, tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size),
        senders,
        broadcasts=broadcasts,
    )


def engines_elsewhere(plan: Plan) -> tuple[int, tuple[int, ...]]:
    """Node of the trainer's rank 0, and the other nodes that have engines."""
    home = trainer_nodes(plan)[0]
    return home, tuple(sorted({*engine_nodes(plan)} - {home}))


def chosen_backend(spec: RLJobSpec, plan: Plan) -> SyncBackend:
    """The transport of a job: what it asks for, or with Auto the first of IPC and shared memory that reaches all engines, TCP, ObjectStore.

    Auto does not take NCCL, which has not run between two GPUs yet.
    """
    if spec.weight_sync.backend is not SyncBackend.AUTO:
        return spec.weight_sync.backend
    if not plan.with_role(Role.TRAINER):
        return SyncBackend.OBJECT_STORE  # no sync: validation only, or a spec that is refused
    if _reads_on_devices(spec, plan):
        return SyncBackend.IPC
    if _chain_pays(spec, plan):
        return SyncBackend.TCP
    apart = engines_elsewhere(plan)[1] or loads_whole_updates(spec)
    return SyncBackend.OBJECT_STORE if apart else SyncBackend.SHARED_MEMORY


def _chain_pays(spec: RLJobSpec, plan: Plan) -> bool:
    """Whether a chain (TCP) is faster than the object store: ``docs/design/0014-auto-takes-tcp.md``."""
    return len(engines_elsewhere(plan)[1]) > 1 and not serves_adapters(spec)


def _reads_on_devices(spec: RLJobSpec, plan: Plan) -> bool:
    """Whether every engine can read all weights in the memory of its own devices, and nothing in the spec asks for another way."""
    asks = spec.weight_sync.delta is not None or spec.weight_sync.senders is not Senders.FIRST
    if asks or serves_adapters(spec) or loads_whole_updates(spec) or not all_on_accelerators(spec, plan):
        return False
    return not any(None in ranks for ranks in neighbors(spec, plan))


def chosen_senders(spec: RLJobSpec, plan: Plan) -> tuple[int, ...]:
    """Trainer ranks that pack and send: of all, or with shared memory of those on its node, those that the job asks for."""
    if not plan.with_role(Role.TRAINER):
        return (0,)
    nodes = trainer_nodes(plan)
    if chosen_backend(spec, plan) is SyncBackend.SHARED_MEMORY:
        nodes = {rank: node for rank, node in nodes.items() if node == nodes[0]}
    return _asked_senders(spec, plan, nodes)


def trainer_nodes(plan: Plan) -> dict[int, int]:
    """Node of every trainer rank."""
    processes = (process for trainer in plan.with_role(Role.TRAINER) for process in trainer.processes)
    return {rank: process.node_rank for rank, process in enumerate(processes)}


def engine_nodes(plan: Plan) -> tuple[int, ...]:
    """Node rank of every engine; engines count through the Rollout components."""
    return tuple(process.node_rank for rollout in plan.with_role(Role.ROLLOUT) for process in rollout.processes)


def _asked_senders(spec: RLJobSpec, plan: Plan, nodes: Mapping[int, int]) -> tuple[int, ...]:
    """Of trainer ranks on their nodes those that ``weightSync.senders`` means."""
    if spec.weight_sync.senders is Senders.EVERY:
        return tuple(nodes)
    if spec.weight_sync.senders is Senders.FIRST:
        return (0,)
    first = {node: rank for rank, node in reversed(list(nodes.items()))}
    return tuple(sorted(first.values()))


def neighbors(spec: RLJobSpec, plan: Plan) -> tuple[tuple[int | None, ...], ...]:
    """By engine, by process of it that has a part of the model: the trainer rank on its device; None where there is none.

    Engines count through the Rollout components. SGLang's server is one process to a transport.
    """
    trainers = [process for trainer in plan.with_role(Role.TRAINER) for process in trainer.processes]
    on_device = {device: rank for rank, process in reversed(list(enumerate(trainers))) for device in process.devices}
    engines = {component.name: component.engine for _, component in spec.with_role(Role.ROLLOUT)}
    found: list[tuple[int | None, ...]] = []
    for rollout in plan.with_role(Role.ROLLOUT):
        engine = engines[rollout.name]
        size = engine.num_devices if engine is not None else 1
        whole = engine is not None and engine.type is EngineType.SGLANG
        for process in rollout.processes:
            ranks = tuple(on_device.get(device) for device in process.devices) or (None,) * size
            found.append(ranks[:1] if whole else ranks)
    return tuple(found)


def all_on_accelerators(spec: RLJobSpec, plan: Plan) -> bool:
    """Whether trainer and engines compute on CUDA devices."""
    groups = {group.name: group.on_accelerators for group in spec.node_groups}
    components = [*plan.with_role(Role.TRAINER), *plan.with_role(Role.ROLLOUT)]
    return all(process.devices and groups.get(plan.nodes[process.node_rank].group, False) for c in components for process in c.processes)


def shared_with_senders(plan: Plan, senders: Sequence[int]) -> tuple[int, ...]:
    """Devices on which a sending rank and an engine are: NCCL has one member of a group on a device."""
    trainers = [process for trainer in plan.with_role(Role.TRAINER) for process in trainer.processes]
    engines = {device for rollout in plan.with_role(Role.ROLLOUT) for device in rollout.device_set()}
    return tuple(sorted(engines.intersection(*[{device for rank in senders for device in trainers[rank].devices}])))


def loads_whole_updates(spec: RLJobSpec) -> str | None:
    """A rollout component whose engine, SGLang, takes no update bucket by bucket, as shared memory hands it over."""
    rollouts = [component for _, component in spec.with_role(Role.ROLLOUT)]
    return next((c.name for c in rollouts if c.engine is not None and c.engine.type is EngineType.SGLANG), None)


def _out_of_reach(plan: SyncPlan) -> PlacementError:
    """The problem of a plan by shared memory that has routes between nodes."""
    per_engine = len(plan.sources) // len(plan.engines.engines)
    across = [index for index, transport in enumerate(plan.transports) if transport == _NETWORK]
    first = across[0] // per_engine
    source = plan.trainer.ranks[plan.sources[across[0]]]
    nodes = ", ".join(map(str, sorted({place.node_rank for place in plan.engines.engines[first]})))
    return PlacementError(
        CHECK,
        f"IPC shares memory within a node, but {len({index // per_engine for index in across})} of {len(plan.engines.engines)} engines "
        f"need weights that no trainer rank on their node holds: engine {first} on node {nodes} would need rank "
        f"{plan.sources[across[0]]} on node {source.node_rank}",
        "place the trainer on every node of the rollout, or choose another weightSync.backend",
    )


def _needs(trainer_size: int, engine_size: int) -> list[list[tuple[int, int, int]]]:
    """For each engine shard its pieces: (trainer shard, first atom, behind the last atom)."""
    num_atoms = math.lcm(trainer_size, engine_size)
    held, needed = num_atoms // trainer_size, num_atoms // engine_size
    return [
        [
            (t, max(t * held, e * needed), min((t + 1) * held, (e + 1) * needed))
            for t in range(e * needed // held, ((e + 1) * needed - 1) // held + 1)
        ]
        for e in range(engine_size)
    ]


_Pool = list[tuple[int, int]]
"""Heap of (atoms sent so far by this wire, rank): ranks that hold one trainer shard. A rank's load changes in one pool per wire only."""


def _choose(trainer: TrainerLayout, engines: EngineLayout) -> tuple[tuple[int, ...], bytes, SyncFigures]:
    """Source ranks and transports of all routes in order; see the module's text for the rule."""
    size = trainer.tensor_parallel_size
    on_device: dict[tuple[int, int], dict[int, int]] = {}
    on_node: dict[int, dict[int, _Pool]] = {}
    anywhere: list[_Pool] = [[] for _ in range(size)]
    for rank, place in enumerate(trainer.ranks):  # ascending, so every list is a heap from the start
        shard = rank % size
        on_device.setdefault((place.node_rank, place.device), {}).setdefault(shard, rank)
        on_node.setdefault(place.node_rank, {}).setdefault(shard, []).append((0, rank))
        anywhere[shard].append((0, rank))
    needs = _needs(size, engines.tensor_parallel_size)
    nothing: dict[int, int] = {}
    no_pools: dict[int, _Pool] = {}
    sources: list[int] = []
    transports = bytearray()
    atoms = [0, 0, 0]
    """Moved by each transport."""
    for devices in engines.engines:
        for index, place in enumerate(devices):
            here = on_device.get((place.node_rank, place.device), nothing)
            near = on_node.get(place.node_rank, no_pools)
            for shard, first, end in needs[index % len(needs)]:
                if shard in here:
                    rank, transport = here[shard], _SAME_DEVICE
                else:
                    pool, transport = near.get(shard), _SAME_NODE
                    if pool is None:
                        pool, transport = anywhere[shard], _NETWORK
                    load, rank = pool[0]
                    heapreplace(pool, (load + end - first, rank))
                sources.append(rank)
                transports.append(transport)
                atoms[transport] += end - first
    sent = [0] * len(trainer.ranks)
    for pools in (anywhere, *(pools.values() for pools in on_node.values())):
        for pool in pools:
            for load, rank in pool:
                sent[rank] += load
    return tuple(sources), bytes(transports), _figures(atoms, sent)


def _figures(atoms: Sequence[int], sent: Sequence[int]) -> SyncFigures:
    """Figures from the amounts by transport and by sending rank, in any two units."""
    same_device, same_node, network = (amount / sum(atoms) for amount in atoms)
    leaving = sum(sent)
    return SyncFigures(
        same_device=same_device,
        same_node=same_node,
        network=network,
        busiest_rank=sent.index(max(sent)) if leaving else None,
        busiest_share=max(sent) / leaving if leaving else 0.0,
        ideal_share=1 / len(sent),
    )


def _figures_of_whole(trainer: TrainerLayout, engines: EngineLayout, senders: Sequence[int]) -> SyncFigures:
    """Every node fetches a sender's part once, whatever its number of engines, but for the sender's own."""
    nodes = {devices[0].node_rank for devices in engines.engines}
    fetched = sum(len(nodes - {trainer.ranks[rank].node_rank}) for rank in senders)
    sent = [int(rank in senders) for rank in range(len(trainer.ranks))]
    return _figures([0, len(engines.engines) * len(senders) - fetched, fetched], sent)
