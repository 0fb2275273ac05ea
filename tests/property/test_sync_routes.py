"""ONCE, HELD, nearest first, balance and purity of the sync routes, for any two layouts."""

import math
from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.planning.sync_routes import EngineLayout, SyncDevice, SyncPlan, TrainerLayout, Transport, sync_plan
from rljob_api.v1alpha1.operations import SyncBackend

NUM_DEVICES = 24


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TrainerLayout, EngineLayout]:
    """Any sizes on any devices of nodes of any size; several processes may share a device, an engine may span nodes."""
    per_node = draw(st.integers(1, NUM_DEVICES))
    tensor, replicas = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    size, stages, count = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    device = st.integers(0, NUM_DEVICES - 1).map(lambda d: SyncDevice(d // per_node, d))
    ranks = draw(st.lists(device, min_size=tensor * replicas, max_size=tensor * replicas))
    targets = draw(st.lists(device, min_size=count * size * stages, max_size=count * size * stages))
    cut = tuple(tuple(targets[i : i + size * stages]) for i in range(0, len(targets), size * stages))
    return (
        TrainerLayout(ranks=tuple(ranks), tensor_parallel_size=tensor),
        EngineLayout(engines=cut, tensor_parallel_size=size, pipeline_parallel_size=stages),
    )


def planned(layout: tuple[TrainerLayout, EngineLayout]) -> SyncPlan:
    return sync_plan(SyncBackend.NCCL, *layout)


def wire(source: SyncDevice, target: SyncDevice) -> Transport:
    if source.device == target.device:
        return Transport.SAME_DEVICE
    return Transport.SAME_NODE if source.node_rank == target.node_rank else Transport.NETWORK


def held(plan: SyncPlan, rank: int) -> range:
    size = plan.trainer.tensor_parallel_size
    return range(rank % size * plan.num_atoms // size, (rank % size + 1) * plan.num_atoms // size)


@given(layouts())
def test_every_engine_shard_gets_its_atoms_once_from_who_holds_them(layout: tuple[TrainerLayout, EngineLayout]) -> None:
    plan = planned(layout)
    size, stages = plan.engines.tensor_parallel_size, plan.engines.pipeline_parallel_size
    assert plan.num_atoms == math.lcm(plan.trainer.tensor_parallel_size, size)
    arrived: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for route in plan.routes():
        assert route.engine_shard is not None
        assert route.stage is not None
        assert route.first_atom < route.end_atom
        atoms = range(route.first_atom, route.end_atom)
        arrived[route.engine, route.stage, route.engine_shard] += atoms
        assert set(atoms) <= set(held(plan, route.source_rank))
        assert plan.trainer.ranks[route.source_rank] == route.source
        assert math.isclose(route.share, len(atoms) / plan.num_atoms / stages)
    per_shard = plan.num_atoms // size
    assert arrived == {
        (engine, stage, shard): list(range(shard * per_shard, (shard + 1) * per_shard))
        for engine in range(len(plan.engines.engines))
        for stage in range(stages)
        for shard in range(size)
    }


@given(layouts())
def test_no_nearer_rank_holds_the_piece(layout: tuple[TrainerLayout, EngineLayout]) -> None:
    plan = planned(layout)
    order = list(Transport)
    for route in plan.routes():
        assert route.engine_shard is not None
        assert route.stage is not None
        target = plan.engines.engines[route.engine][route.stage * plan.engines.tensor_parallel_size + route.engine_shard]
        assert route.transport is wire(route.source, target)
        size = plan.trainer.tensor_parallel_size
        holders = plan.trainer.ranks[route.source_rank % size :: size]
        assert order.index(route.transport) == min(order.index(wire(source, target)) for source in holders)


@given(layouts())
def test_holders_of_a_shard_send_alike_over_each_wire(layout: tuple[TrainerLayout, EngineLayout]) -> None:
    plan = planned(layout)
    size = plan.trainer.tensor_parallel_size
    sent: Counter[tuple[Transport, int]] = Counter()
    largest: Counter[int] = Counter()
    for route in plan.routes():
        atoms = route.end_atom - route.first_atom
        sent[route.transport, route.source_rank] += atoms
        largest[route.source_rank % size] = max(largest[route.source_rank % size], atoms)
    everyone = range(len(plan.trainer.ranks))
    for shard in range(size):
        network = [sent[Transport.NETWORK, rank] for rank in everyone[shard::size]]
        assert max(network) - min(network) <= largest[shard]
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank in everyone[shard::size]:
            by_node[plan.trainer.ranks[rank].node_rank].append(sent[Transport.SAME_NODE, rank])
        assert all(max(loads) - min(loads) <= largest[shard] for loads in by_node.values())


@given(layouts(), st.sampled_from([SyncBackend.NCCL, SyncBackend.OBJECT_STORE]))
def test_figures_are_those_of_the_routes(layout: tuple[TrainerLayout, EngineLayout], backend: SyncBackend) -> None:
    plan = sync_plan(backend, *layout)
    shares: Counter[Transport] = Counter()
    sent: Counter[int] = Counter()
    for route in plan.routes():
        shares[route.transport] += route.share  # type: ignore[assignment]
        if route.transport is not Transport.SAME_DEVICE:
            sent[route.source_rank] += route.share  # type: ignore[assignment]
    figures, count = plan.figures, len(plan.engines.engines)
    near = shares[Transport.SAME_NODE] + shares[Transport.NODE_COPY]
    found = (figures.same_device, figures.same_node, figures.network)
    expected = (shares[Transport.SAME_DEVICE], near, shares[Transport.NETWORK])
    assert all(math.isclose(f, share / count, abs_tol=1e-9) for f, share in zip(found, expected, strict=True))
    assert (figures.busiest_rank is None) == (not sent)
    if figures.busiest_rank is not None:
        assert math.isclose(sent[figures.busiest_rank], max(sent.values()))
        assert math.isclose(figures.busiest_share, max(sent.values()) / sum(sent.values()))
        assert figures.busiest_share >= figures.ideal_share - 1e-9


@given(layouts(), st.permutations(range(NUM_DEVICES)))
def test_only_equality_of_nodes_and_devices_counts(layout: tuple[TrainerLayout, EngineLayout], names: list[int]) -> None:
    def renamed(place: SyncDevice) -> SyncDevice:
        return SyncDevice(names[place.node_rank], names[place.device])

    trainer, engines = layout
    plan = planned(layout)
    assert planned(layout) == plan
    other = sync_plan(
        SyncBackend.NCCL,
        TrainerLayout(ranks=tuple(map(renamed, trainer.ranks)), tensor_parallel_size=trainer.tensor_parallel_size),
        EngineLayout(
            engines=tuple(tuple(map(renamed, devices)) for devices in engines.engines),
            tensor_parallel_size=engines.tensor_parallel_size,
            pipeline_parallel_size=engines.pipeline_parallel_size,
        ),
    )
    assert (other.sources, other.transports, other.figures) == (plan.sources, plan.transports, plan.figures)
