"""Component placement in RLinf's notation: short and long form, groups, and every check of a section."""

from collections.abc import Mapping

import pytest

from rljob_api.errors import PlacementError
from rljob_api.placement.topology import ACCELERATOR, Node, NodeGroup, Topology, topology
from rljob_convert.placement.component import ComponentPlacement, HybridComponentPlacement, PlacementMode
from rljob_convert.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy


def cluster(*accelerators: int, groups: Mapping[str, tuple[int, ...]] | None = None, robots: dict[int, int] | None = None) -> Topology:
    """Nodes with these accelerators; groups that count them; group ``robots`` of the nodes that have some."""
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
        NodeGroup(label=label, node_ranks=ranks, hardware_type=ACCELERATOR if any(accelerators[rank] for rank in ranks) else None)
        for label, ranks in (groups or {}).items()
    ]
    if robots:
        there.append(NodeGroup(label="robots", node_ranks=tuple(robots), hardware_type="Franka"))
    return topology(nodes, there)


TWO = {"a800": (0,), "4090": (1,)}


def where(placed: ComponentPlacement, component: str) -> str:
    """``n0:0,1 n1:2`` in process order; ``-`` for a node without units."""
    return " ".join(
        f"n{placement.cluster_node_rank}:{','.join(map(str, placement.local_hardware_ranks)) or '-'}"
        for placement in placed.get_placement(component)
    )


def check_of(section: Mapping[str, object], there: Topology) -> str:
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(section, there)
    assert caught.value.remedy
    return caught.value.check


def test_names_of_one_key_share_a_strategy() -> None:
    placed = HybridComponentPlacement({"actor, reward": "0-7:0-3", "env": 3}, cluster(8))
    assert placed.components == ("actor", "reward", "env")
    assert placed.placement_mode is PlacementMode.HYBRID
    assert placed.get_strategy("actor") is placed.get_strategy("reward")
    assert placed.get_placement("actor") is placed.get_placement("reward")
    assert placed.get_hardware_ranks("actor") == tuple(range(8))
    assert placed.get_rank_map("actor") == ((range(8), range(4)),)
    assert (placed.get_world_size("actor"), placed.get_world_size("env")) == (4, 1)
    assert where(placed, "env") == "n0:3"


def test_the_base_class_has_no_mode() -> None:
    assert ComponentPlacement({}, cluster(8)).placement_mode is None


def test_isolation_off_shows_all_accelerators_of_the_node() -> None:
    placed = ComponentPlacement({"actor": "9"}, cluster(8, 8))
    (isolated,), (open_,) = placed.get_placement("actor"), placed.get_placement("actor", isolate_accelerator=False)
    assert isolated.visible_accelerators == ("1",)
    assert open_.visible_accelerators == tuple("01234567")
    assert isolated.local_hardware_ranks == open_.local_hardware_ranks == (1,)


@pytest.mark.parametrize(
    ("section", "there", "expected"),
    [
        ("6-9", cluster(8, 8), "n0:6 n0:7 n1:0 n1:1"),
        ("0-15:0-3", cluster(8, 8), "n0:0,1,2,3 n0:4,5,6,7 n1:0,1,2,3 n1:4,5,6,7"),
        ("4-11:0-3,12-15:4", cluster(8, 8), "n0:4,5 n0:6,7 n1:0,1 n1:2,3 n1:4,5,6,7"),
        ({"node_group": "node", "placement": "0-1:0-3"}, cluster(8, 8), "n0:- n0:- n1:- n1:-"),
        ({"node_group": "node", "placement": "0:0-1,1:2-7"}, cluster(8, 8), "n0:- n0:- n1:- n1:- n1:- n1:- n1:- n1:-"),
        ({"node_group": "a800,4090", "placement": "6-9"}, cluster(8, 8, groups=TWO), "n0:6 n0:7 n1:0 n1:1"),
        ({"node_group": "a800 , 4090", "placement": "6-9"}, cluster(8, 8, groups=TWO), "n0:6 n0:7 n1:0 n1:1"),
        ({"node_group": ["a800", 4090], "placement": "6-9"}, cluster(8, 8, groups=TWO), "n0:6 n0:7 n1:0 n1:1"),
        ({"node_group": ["4090"], "placement": "0-1"}, cluster(8, 8, groups=TWO), "n1:0 n1:1"),
        ({"node_group": 4090, "placement": "0-1"}, cluster(8, 8, groups=TWO), "n1:0 n1:1"),
        ({"node_group": "4090,a800", "placement": "6-9"}, cluster(8, 8, groups=TWO), "n0:0 n0:1 n1:6 n1:7"),
        ({"node_group": "cluster", "placement": "15"}, cluster(8, 8), "n1:7"),
        (
            {"node_group": "x,y,z", "placement": "all:0-5"},
            cluster(4, 2, 6, groups={"x": (0,), "y": (1,), "z": (2,)}),
            "n0:0,1 n0:2,3 n1:0,1 n2:0,1 n2:2,3 n2:4,5",
        ),
        (
            {"node_group": "odd", "placement": "all:0-3"},
            cluster(8, 8, 8, 8, groups={"odd": (1, 3)}),
            "n1:0,1,2,3 n1:4,5,6,7 n3:0,1,2,3 n3:4,5,6,7",
        ),
        ("all", cluster(2, 0, 2), "n0:0 n0:1 n2:0 n2:1"),
        ("0-1:0-3", cluster(0, 0), "n0:- n0:- n1:- n1:-"),
        ({"node_group": "robots", "placement": "0-1:0-3"}, cluster(8, 8, robots={1: 2}), "n1:0 n1:0 n1:1 n1:1"),
        ({"node_group": "robots", "placement": "0-1:0"}, cluster(8, 8, robots={1: 2}), "n1:0,1"),
    ],
)
def test_places_where_rlinf_documents(section: object, there: Topology, expected: str) -> None:
    assert where(ComponentPlacement({"a": section}, there), "a") == expected


def test_labels_are_those_of_the_first_unit() -> None:
    placed = ComponentPlacement({"a": {"node_group": "a800,4090", "placement": "6-9"}}, cluster(8, 8, groups=TWO))
    assert [placement.node_group_label for placement in placed.get_placement("a")] == ["a800", "a800", "4090", "4090"]


def test_the_strategy_follows_what_the_group_counts() -> None:
    placed = ComponentPlacement({"a": "0-1", "b": {"node_group": "node", "placement": "0"}}, cluster(8))
    assert isinstance(placed.get_strategy("a"), FlexiblePlacementStrategy)
    assert isinstance(placed.get_strategy("b"), NodePlacementStrategy)


@pytest.mark.parametrize(
    ("check", "section"),
    [
        ("G1", {"a": {"node_group": "b800", "placement": "0"}}),
        ("G1", {"a": {"node_group": "a800,", "placement": "0"}}),
        ("G1", {"a": {"node_group": [], "placement": "0"}}),
        ("G1", {"a": {"node_group": None, "placement": "0"}}),
        ("G1", {"a": {"node_group": {"x": 1}, "placement": "0"}}),
        ("G1", {"a": {"node_group": 10**5000, "placement": "0"}}),
        ("G2", {"a": {"node_group": "a800"}}),
        ("G2", {"a": {}}),
        ("P2", {"a": None}),
        ("P2", {"a": ["0-3"]}),
        ("P2", {"a": 1.5}),
        ("P2", {"a": True}),
        ("P2", {"a": -1}),
        ("P2", {"a": {"placement": None}}),
        ("P4", {"a": 10**5000}),
        ("P4", {"a": 60}),
        ("S1", {"a": {"node_group": "node", "placement": "0-1:0"}}),
        ("S2", {"a": ""}),
        ("S2", {"a": {"node_group": "node", "placement": ","}}),
        ("C1", {"a": "0", "a,b": "1"}),
        ("C1", {"a,a": "0"}),
        ("F6", {"a": "6-11:0-1"}),
        ("F6", {"a": {"node_group": "a800,4090", "placement": "6-9:0"}}),
        ("D6", {"a": {"node_group": "a800,a800", "placement": "0"}}),
        ("D6", {"a": {"node_group": "a800,cluster", "placement": "0"}}),
        ("V3", {"a": {"node_group": "node,node", "placement": "0"}}),
        ("D8", {"a": {"node_group": "a800,cpu", "placement": "0"}}),
        ("D7", {"a": "0-3:4-7"}),
        ("D9", {"a": "+1"}),
        ("D20", {"a": {"placement": "0", "node_groups": "a800"}}),
        ("D20", {"a,": "0"}),
        ("D20", {"": "0"}),
    ],
)
def test_every_check_of_a_section(check: str, section: Mapping[str, object]) -> None:
    assert check_of(section, cluster(8, 8, 0, groups=TWO | {"cpu": (2,)})) == check


@pytest.mark.parametrize(
    ("check", "section"),
    [
        ("P4", {"a": "+1", "b": "99"}),
        ("C1", {"a,": "0", "a": "1"}),
        ("F6", {"a": "0-3:4-7", "b": "6-11:0-1"}),
        ("P6", {"a": {"placement": "0,0", "extra": 1}}),
        ("P4", {"a": {"node_group": "a800,a800", "placement": "99"}}),
    ],
)
def test_what_only_rljob_refuses_comes_last(check: str, section: Mapping[str, object]) -> None:
    assert check_of(section, cluster(8, 8, groups=TWO)) == check


def test_hardware_of_two_kinds_in_one_process() -> None:
    there = cluster(2, groups={"gpus": (0,)}, robots={0: 2})
    assert check_of({"a": {"node_group": "gpus,robots", "placement": "0-3:0"}}, there) == "F8"
    placed = ComponentPlacement({"a": {"node_group": "gpus,robots", "placement": "0-3:0-1"}}, there)
    assert [placement.hardware_type for placement in placed.get_placement("a")] == [ACCELERATOR, "Franka"]


@pytest.mark.parametrize(
    ("section", "near"),
    [
        ({"a": {"placement": "0", "node_groups": "a800"}}, "did you mean node_group?"),
        ({"a": {"placment": "0"}}, "did you mean placement?"),
        ({"a": {"node_group": "a80", "placement": "0"}}, "did you mean a800?"),
    ],
)
def test_misspelled_words_get_a_suggestion(section: Mapping[str, object], near: str) -> None:
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(section, cluster(8, 8, groups=TWO))
    assert caught.value.remedy == near


def test_errors_name_the_key() -> None:
    with pytest.raises(PlacementError, match=r'component_placement\["actor,env"\]: accelerator rank 8 does not exist'):
        ComponentPlacement({"actor,env": "0-8"}, cluster(8))


def test_unknown_components_are_refused_with_a_suggestion() -> None:
    placed = ComponentPlacement({"actor": "0"}, cluster(1))
    for ask in (placed.get_placement, placed.get_strategy, placed.get_world_size, placed.get_hardware_ranks, placed.get_rank_map):
        with pytest.raises(PlacementError, match="no component is called") as caught:
            ask("acter")
        assert caught.value.remedy == "did you mean actor?"


def test_all_processes_together_are_bounded_before_they_are_made() -> None:
    section: Mapping[str, object] = {f"c{number}": "0:0-99" for number in range(3)}
    assert len(ComponentPlacement(section, cluster(1), max_processes=300).components) == 3
    with pytest.raises(PlacementError, match="too many processes together"):
        ComponentPlacement(section, cluster(1), max_processes=299)
