"""Flexible, packed and node placement on nodes of any size, every documented field and every check; and what groups count."""

from collections.abc import Sequence

import pytest

from rljob_api.errors import PlacementError
from rljob_api.placement.assignment import MAX_PROCESSES, check_amount, shares
from rljob_api.placement.topology import ACCELERATOR, Node, NodeGroup, Topology, default_hardware, topology
from rljob_convert.placement.metadata import Placement
from rljob_convert.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
    labels_of,
    place,
)


def cluster(*accelerators: int, robots: dict[int, int] | None = None, **groups: tuple[int, ...]) -> Topology:
    robots = robots or {}
    nodes = [
        Node(
            rank=rank,
            num_accelerators=count,
            accelerator_type="NV_GPU" if count else "NO_ACCEL",
            hardware={"Franka": robots[rank]} if rank in robots else {},
        )
        for rank, count in enumerate(accelerators)
    ]
    there = [
        NodeGroup(label=label, node_ranks=ranks, hardware_type=default_hardware([nodes[rank] for rank in ranks]))
        for label, ranks in groups.items()
    ]
    if robots:
        there.append(NodeGroup(label="robots", node_ranks=tuple(robots), hardware_type="Franka"))
    return topology(nodes, there)


def shown(placements: Sequence[Placement]) -> str:
    return " ".join(f"n{each.cluster_node_rank}:{','.join(map(str, each.local_hardware_ranks)) or '-'}" for each in placements)


def where(strategy: PlacementStrategy, there: Topology) -> str:
    return shown(strategy.get_placement(there))


def check_of(strategy: PlacementStrategy, there: Topology) -> str:
    with pytest.raises(PlacementError) as caught:
        strategy.get_placement(there)
    assert caught.value.remedy
    return caught.value.check


def packed(start: int, end: int, size: int = 1, stride: int = 1) -> PackedPlacementStrategy:
    return PackedPlacementStrategy(start, end, size, stride)


def test_every_field_of_an_isolated_process() -> None:
    placement = FlexiblePlacementStrategy([[6], [7], [8], [9]]).get_placement(cluster(8, 8))[2]
    assert placement == Placement(
        rank=2,
        cluster_node_rank=1,
        placement_node_rank=1,
        local_accelerator_rank=0,
        accelerator_type="NV_GPU",
        local_rank=0,
        local_world_size=2,
        visible_accelerators=("0",),
        isolate_accelerator=True,
        local_hardware_ranks=(0,),
        node_group_label="cluster",
        hardware_type=ACCELERATOR,
        units=(8,),
    )


def test_without_isolation_all_accelerators_of_the_node_are_visible() -> None:
    (placement,) = FlexiblePlacementStrategy([[9]]).get_placement(cluster(8, 8), isolate_accelerator=False)
    assert (placement.local_hardware_ranks, placement.local_accelerator_rank) == ((1,), 1)
    assert placement.visible_accelerators == tuple("01234567")
    assert not placement.isolate_accelerator


def test_node_ranks_of_a_placement_are_dense() -> None:
    placements = FlexiblePlacementStrategy([[0], [4], [5]]).get_placement(cluster(2, 2, 2))
    assert [(each.cluster_node_rank, each.placement_node_rank) for each in placements] == [(0, 0), (2, 1), (2, 1)]
    assert [(each.local_rank, each.local_world_size) for each in placements] == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("ranks", "accelerators", "expected"),
    [
        ([[6], [1], [3, 2]], (4, 4), "n0:1 n0:2,3 n1:2"),
        ([[0], [0], [1]], (4,), "n0:0 n0:0 n0:1"),
        ([[2, 0, 1]], (4,), "n0:0,1,2"),
        ([[3], [0]], (3, 5), "n0:0 n1:0"),
    ],
)
def test_flexible_sorts_units_and_processes(ranks: list[list[int]], accelerators: tuple[int, ...], expected: str) -> None:
    assert where(FlexiblePlacementStrategy(ranks), cluster(*accelerators)) == expected


def test_flexible_counts_through_groups_in_written_order_and_numbers_by_node() -> None:
    there = cluster(8, 8, robots={1: 2}, a=(0,), b=(1,))
    assert where(FlexiblePlacementStrategy([[0], [8]], "b,a"), there) == "n0:0 n1:0"
    assert where(FlexiblePlacementStrategy([[0], [8]], ["b", "a"]), there) == "n0:0 n1:0"
    assert where(FlexiblePlacementStrategy([[0, 1]], "robots"), there) == "n1:0,1"


def test_a_robot_process_owns_no_accelerator() -> None:
    (placement,) = FlexiblePlacementStrategy([[0]], "robots").get_placement(cluster(8, robots={0: 1}))
    assert (placement.local_accelerator_rank, placement.visible_accelerators, placement.hardware_type) == (-1, (), "Franka")
    assert placement.accelerator_type == "NV_GPU"


@pytest.mark.parametrize(("check", "ranks"), [("F1", []), ("F1", [[]]), ("F1", [[0], []]), ("F2", [[-1]]), ("F2", [[0], [2, -1]])])
def test_flexible_without_a_topology(check: str, ranks: list[list[int]]) -> None:
    with pytest.raises(PlacementError) as caught:
        FlexiblePlacementStrategy(ranks)
    assert caught.value.check == check


@pytest.mark.parametrize(
    ("check", "ranks", "group"),
    [
        ("F3", [[0]], "nowhere"),
        ("F4", [[0]], "cpu"),
        ("F4", [[0]], "node"),
        ("F5", [[12]], None),
        ("F5", [[2]], "robots"),
        ("F6", [[7, 8]], None),
        ("F6", [[3, 0, 9]], None),
        ("F7", [[1, 1]], None),
        ("F8", [[7, 8]], "a,robots"),
        ("D6", [[0]], "a,a"),
        ("D6", [[0]], "a,cluster"),
        ("D8", [[0]], "a,cpu"),
    ],
)
def test_every_check_of_flexible(check: str, ranks: list[list[int]], group: str | None) -> None:
    there = cluster(8, 4, 0, robots={0: 2}, a=(0,), b=(1,), cpu=(2,))
    assert check_of(FlexiblePlacementStrategy(ranks, group), there) == check


@pytest.mark.parametrize(
    ("ranks", "accelerators", "problem"),
    [
        ([4], (4,), "accelerator rank 4 does not exist, available are 0-3"),
        ([2], (1, 1), "accelerator rank 2 does not exist, available are 0-1"),
        ([1], (1,), "accelerator rank 1 does not exist, available are 0"),
        ([0, 9], (4, 6), "puts accelerator ranks 0, 9, which one process has, on two nodes: node 0 and node 1"),
        ([*range(8)], (4, 4), "puts accelerator ranks 0, 1, 2, 3, 4, 5, 6, 7, which one process has, on two nodes: node 0 and node 1"),
        ([*range(9)], (4, 5), "puts accelerator ranks 0, 1, 2, 3, 4, 5, 6, 7, .., which one process has, on two nodes: node 0 and node 1"),
        ([1, 0, 1], (2,), "a process holds accelerator 1 twice"),
    ],
)
def test_a_refusal_names_what_is_wrong_and_what_there_is(ranks: list[int], accelerators: tuple[int, ...], problem: str) -> None:
    with pytest.raises(PlacementError) as caught:
        FlexiblePlacementStrategy([ranks]).get_placement(cluster(*accelerators))
    assert caught.value.problem == problem


@pytest.mark.parametrize(
    ("arguments", "accelerators", "expected"),
    [
        ((0, 7, 2), (8,), "n0:0,1 n0:2,3 n0:4,5 n0:6,7"),
        ((0, 7, 2, 2), (8,), "n0:0,2 n0:1,3 n0:4,6 n0:5,7"),
        ((0, 7, 2, 4), (8,), "n0:0,4 n0:1,5 n0:2,6 n0:3,7"),
        ((0, 7, 4, 2), (8,), "n0:0,2,4,6 n0:1,3,5,7"),
        ((0, 7, 1, 2), (8,), "n0:0 n0:1 n0:2 n0:3 n0:4 n0:5 n0:6 n0:7"),
        ((0, 3), (8,), "n0:0 n0:1 n0:2 n0:3"),
        ((4, 11, 2, 2), (8, 8), "n0:4,6 n0:5,7 n1:0,2 n1:1,3"),
        ((0, 5, 2), (2, 4), "n0:0,1 n1:0,1 n1:2,3"),
        ((0, 3, 2), (2, 0, 2), "n0:0,1 n2:0,1"),
    ],
)
def test_every_row_of_packed(arguments: tuple[int, ...], accelerators: tuple[int, ...], expected: str) -> None:
    assert where(packed(*arguments), cluster(*accelerators)) == expected


@pytest.mark.parametrize(("arguments", "accelerators"), [((7, 8, 2), (8, 8)), ((0, 7, 2), (3, 5)), ((6, 9, 2, 2), (8, 8))])
def test_packed_never_gives_a_unit_that_a_node_does_not_have(arguments: tuple[int, ...], accelerators: tuple[int, ...]) -> None:
    assert check_of(packed(*arguments), cluster(*accelerators)) == "B5"


def test_packed_numbers_reversed_groups_by_node() -> None:
    there = cluster(4, 4, a=(0,), b=(1,))
    assert where(PackedPlacementStrategy(0, 7, 2, 2, "b,a"), there) == "n0:0,2 n0:1,3 n1:0,2 n1:1,3"
    assert [each.units for each in PackedPlacementStrategy(2, 5, 2, 1, "b,a").get_placement(there)] == [(4, 5), (2, 3)]


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        ("B1", (-1, 3)),
        ("B1", (3, 2)),
        ("B2", (0, 6, 2)),
        ("B2", (0, 5, 2, 2)),
        ("B2", (0, 3, 0)),
        ("B2", (0, 3, 2, 0)),
        ("B2", (0, 2, 1, 2)),
    ],
)
def test_packed_without_a_topology(check: str, arguments: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError) as caught:
        packed(*arguments)
    assert caught.value.check == check


@pytest.mark.parametrize(
    ("check", "end", "group"),
    [("B3", 0, "nowhere"), ("B3", 0, "cpu"), ("B3", 0, "a,cpu"), ("B3", 0, "node"), ("B4", 12, None), ("B4", 8, "a")],
)
def test_every_check_of_packed(check: str, end: int, group: str | None) -> None:
    assert check_of(PackedPlacementStrategy(0, end, 1, 1, group), cluster(8, 4, 0, a=(0,), cpu=(2,))) == check


def test_node_placement_sorts_and_counts() -> None:
    placements = NodePlacementStrategy([2, 0, 1, 1]).get_placement(cluster(8, 0, 8))
    assert [each.cluster_node_rank for each in placements] == [0, 1, 1, 2]
    assert [each.local_rank for each in placements] == [0, 0, 1, 0]
    assert [each.local_world_size for each in placements] == [1, 2, 2, 1]
    assert {(each.local_hardware_ranks, each.local_accelerator_rank, each.visible_accelerators) for each in placements} == {((), -1, ())}
    assert {each.hardware_type for each in placements} == {None}
    assert [each.units for each in placements] == [(0,), (1,), (1,), (2,)]


def test_node_placement_shows_accelerators_only_when_asked() -> None:
    (placement,) = NodePlacementStrategy([0]).get_placement(cluster(2), isolate_accelerator=False)
    assert placement.visible_accelerators == ("0", "1")
    assert placement.local_accelerator_rank == -1


@pytest.mark.parametrize(
    ("check", "ranks", "group"),
    [("F3", [0], "nowhere"), ("V2", [3], None), ("V2", [-1], None), ("V2", [1], "a"), ("V3", [0], "a,cluster"), ("V3", [0], "a,a")],
)
def test_every_check_of_node(check: str, ranks: list[int], group: str | None) -> None:
    assert check_of(NodePlacementStrategy(ranks, group), cluster(8, 0, 0, a=(0,))) == check


def test_node_placement_needs_a_process() -> None:
    with pytest.raises(PlacementError) as caught:
        NodePlacementStrategy([])
    assert caught.value.check == "V1"


def test_node_placement_counts_groups_in_written_order() -> None:
    there = cluster(8, 0, 8, a=(0,), b=(1, 2))
    assert where(NodePlacementStrategy([0, 2], "b,a"), there) == "n0:- n1:-"


def test_processes_are_numbered_by_node_and_unit_or_as_given() -> None:
    selection = cluster(2, 2).select()
    assert shown(place(selection, [[3], [0]])) == "n0:0 n1:1"

    def numbered(*, keep_order: bool) -> list[tuple[int, int, list[tuple[int, tuple[int, ...]]]]]:
        nodes = shares(selection, [[3], [0], [2], [0]], keep_order=keep_order)
        return [(share.node.rank, share.index, [(rank, units) for rank, _, units in share.seats]) for share in nodes]

    assert numbered(keep_order=True) == [(0, 0, [(1, (0,)), (3, (0,))]), (1, 1, [(0, (3,)), (2, (2,))])]
    assert numbered(keep_order=False) == [(0, 0, [(0, (0,)), (1, (0,))]), (1, 1, [(2, (2,)), (3, (3,))])]


def test_huge_placements_are_refused_before_they_are_made() -> None:
    there = cluster(*[1024] * 2000)
    for strategy in (PackedPlacementStrategy(0, 2_047_999), PackedPlacementStrategy(0, 2_047_999, 1024)):
        with pytest.raises(PlacementError, match="more than"):
            strategy.get_placement(there)
    with pytest.raises(PlacementError, match="processes, more than"):
        check_amount(MAX_PROCESSES + 1, 1)


@pytest.mark.parametrize(("group", "labels"), [(None, ()), ("a", ("a",)), (" a , b,", ("a", "b")), (["a", " b"], ("a", "b")), ([], ())])
def test_labels(group: str | list[str] | None, labels: tuple[str, ...]) -> None:
    assert labels_of(group) == labels


def test_what_ranks_of_a_selection_count() -> None:
    there = cluster(4, 0, 2, robots={1: 2}, gpus=(0, 2), cpu=(1,))
    counted = {label: (there.select([label]).num_units, there.select([label]).unit_name) for label in there.groups}
    assert counted == {
        "cluster": (6, "accelerator"),
        "node": (3, "node"),
        "gpus": (6, "accelerator"),
        "cpu": (1, "node"),
        "robots": (2, "Franka"),
    }
    assert there.count_nodes(["gpus"]).num_units == 2
    both = there.select(["gpus", "robots"])
    assert (both.num_units, both.unit_name, both.counts_nodes) == (8, "accelerator/Franka", False)
    assert [both.locate(rank).node.rank for rank in range(8)] == [0, 0, 0, 0, 2, 2, 1, 1]


def test_a_cluster_without_accelerators_counts_nodes() -> None:
    assert (cluster(0, 0).select().num_units, cluster(0, 0).select().unit_name) == (2, "node")


def test_selections_are_made_once_and_do_not_pile_up() -> None:
    labels = {f"g{rank}": (rank,) for rank in range(40)}
    there = cluster(*[1] * 40, robots=None, **labels)
    assert there.select() is there.select(["cluster"])
    for label in labels:
        assert there.select([label]).num_units == 1
    assert there.select() == there.select(["cluster"])


def test_groups_that_cannot_be_counted_together() -> None:
    there = cluster(4, 4, 0, a=(0,), b=(0, 1), cpu=(2,))
    for check, labels in (("D6", ["a", "b"]), ("D6", ["a", "a"]), ("V3", ["cpu", "cpu"]), ("D8", ["a", "cpu"]), ("G1", ["c"])):
        with pytest.raises(PlacementError) as caught:
            there.select(labels)
        assert caught.value.check == check
    with pytest.raises(PlacementError, match='ranks of "cpu" count nodes, ranks of "a" count hardware'):
        there.select(["a", "cpu"])
    assert there.select(["a", "b"], together=False).num_units == 12
