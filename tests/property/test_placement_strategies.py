"""UNIT-EXISTS: whatever the nodes, groups and strategy, a placement lies on units that exist, or is refused with a listed check."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import PlacementError
from rljob_api.placement.topology import ACCELERATOR, Node, NodeGroup, Topology, topology
from rljob_convert.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy

LISTED_CHECKS = {*(f"F{n}" for n in range(1, 9)), *(f"B{n}" for n in range(1, 6)), "V1", "V2", "V3", "D6", "D8"}
LABELS = ["x", "y", "z", "cluster", "node"]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """One to five nodes of any size, some with robots; up to three groups, overlapping, each counting anything."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5))
    nodes = [
        Node(rank=rank, num_accelerators=accelerators, hardware={"Franka": robots} if robots else {})
        for rank, (accelerators, robots) in enumerate(sizes)
    ]
    members = st.sets(st.integers(0, len(nodes) - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    shapes = draw(st.lists(st.tuples(members, st.sampled_from([ACCELERATOR, "Franka", None])), max_size=3))
    groups = [NodeGroup(label=LABELS[i], node_ranks=ranks, hardware_type=kind) for i, (ranks, kind) in enumerate(shapes)]
    return topology(nodes, groups)


labels = st.one_of(st.none(), st.lists(st.sampled_from(LABELS), min_size=1, max_size=3))
rank = st.integers(-1, 20)


@st.composite
def placement_strategies(draw: st.DrawFn) -> PlacementStrategy | None:
    """Any strategy with any arguments; None where its own checks refuse them."""
    kind = draw(st.sampled_from(["flexible", "packed", "node"]))
    try:
        if kind == "flexible":
            return FlexiblePlacementStrategy(draw(st.lists(st.lists(rank, max_size=4), max_size=5)), draw(labels))
        if kind == "packed":
            return PackedPlacementStrategy(draw(rank), draw(rank), draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(labels))
        return NodePlacementStrategy(draw(st.lists(rank, max_size=5)), draw(labels))
    except PlacementError as error:
        assert error.check in LISTED_CHECKS  # noqa: PT017  any of them will do
        return None


@given(topologies(), placement_strategies(), st.booleans())
def test_every_unit_exists(there: Topology, strategy: PlacementStrategy | None, isolate: bool) -> None:
    if strategy is None:
        return
    try:
        placements = strategy.get_placement(there, isolate)
    except PlacementError as error:
        assert error.check in LISTED_CHECKS  # noqa: PT017
        return
    assert [placement.rank for placement in placements] == list(range(len(placements)))
    assert [placement.cluster_node_rank for placement in placements] == sorted(placement.cluster_node_rank for placement in placements)
    for placement in placements:
        node = there.nodes[placement.cluster_node_rank]
        own = placement.local_hardware_ranks
        assert list(own) == sorted(set(own))
        assert all(0 <= unit < node.num_units(placement.hardware_type) for unit in own)
        assert bool(own) == (placement.hardware_type is not None)
        assert node.rank in there.groups[placement.node_group_label].node_ranks
        assert there.groups[placement.node_group_label].hardware_type == placement.hardware_type or isinstance(
            strategy, NodePlacementStrategy
        )
        accelerators = list(map(int, placement.visible_accelerators))
        if isolate:
            assert accelerators == (list(own) if placement.hardware_type == ACCELERATOR else [])
        else:
            assert accelerators == list(range(node.num_accelerators))
        assert placement.local_accelerator_rank == (own[0] if placement.hardware_type == ACCELERATOR else -1)
        same_node = [other for other in placements if other.cluster_node_rank == node.rank]
        assert placement.local_world_size == len(same_node)
        assert same_node[placement.local_rank] is placement
