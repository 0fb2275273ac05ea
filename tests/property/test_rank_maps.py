"""Rank maps and component placements of any shape: even spread, processes 0..N-1, parse -> print -> parse, key-order independence."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import PlacementError
from rljob_api.placement import ranks
from rljob_api.placement.topology import ACCELERATOR, Node, Topology, topology
from rljob_convert.placement.component import ComponentPlacement

LISTED_CHECKS = {f"P{number}" for number in range(1, 15)} | {"S2", "D7", "D9"}


@st.composite
def rank_maps(draw: st.DrawFn) -> str:
    """Valid rank maps: parts of R units and P processes, R a multiple of P or P more than R."""
    parts = []
    unit = process = 0
    for _ in range(draw(st.integers(1, 4))):
        unit += draw(st.integers(0, 2))
        small, factor = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        further = draw(st.integers(0, small - 1))
        num_units, num_processes = draw(st.sampled_from([(small, small * factor + further), (small * factor, small)]))
        text = str(unit) if num_units == 1 else f"{unit}-{unit + num_units - 1}"
        if num_units != num_processes or draw(st.booleans()):
            text += f":{process}" if num_processes == 1 else f":{process}-{process + num_processes - 1}"
        parts.append(text)
        unit += num_units
        process += num_processes
    return ",".join(parts)


anything = st.one_of(st.text(alphabet="0123456789-:, all+_٣", max_size=20), st.text(max_size=20))


@given(rank_maps())
def test_units_of_a_part_are_spread_evenly_over_processes_0_to_n(text: str) -> None:
    evaluation = ranks.evaluate(text, 100)
    assert evaluation.refused is None
    following = 0
    for part in evaluation.parts:
        assert part.processes.start == following
        following = part.processes.stop
        split = list(part.split())
        assert len(split) == len(part.processes)
        assert len({len(units) for units in split}) == 1
        uses = Counter(unit for units in split for unit in units)
        assert set(uses) == set(part.units)
        assert max(uses.values()) - min(uses.values()) <= 1
    assert len(ranks.processes(text, 100)) == following


@given(rank_maps())
def test_parse_print_parse(text: str) -> None:
    parsed = ranks.parse(text)
    assert ranks.parse(str(parsed)) == parsed
    assert ranks.processes(str(parsed), 100) == ranks.processes(text, 100)


@given(anything, st.integers(0, 20))
def test_any_text_is_read_or_refused_with_a_listed_check(text: str, num_available: int) -> None:
    try:
        processes = ranks.processes(text, num_available)
    except PlacementError as error:
        assert error.check in LISTED_CHECKS  # noqa: PT017  any of them will do
    else:
        assert all(0 <= unit < num_available for units in processes for unit in units)
        assert ranks.processes(str(ranks.parse(text)), num_available) == processes


def cluster(*accelerators: int) -> Topology:
    return topology([Node(rank=rank, num_accelerators=count) for rank, count in enumerate(accelerators)])


@given(st.dictionaries(st.sampled_from("abcde"), rank_maps(), min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(section: dict[str, str], order: random.Random) -> None:
    keys = sorted(section)
    order.shuffle(keys)
    there = cluster(100)
    placed, again = ComponentPlacement(section, there), ComponentPlacement({key: section[key] for key in keys}, there)
    assert {name: placed.get_placement(name) for name in placed.components} == {
        name: again.get_placement(name) for name in again.components
    }


@given(rank_maps(), st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_a_component_lies_on_existing_units_in_process_order(text: str, accelerators: list[int]) -> None:
    there = cluster(*accelerators)
    try:
        placed = ComponentPlacement({"a": text}, there)
    except PlacementError as error:
        assert error.check in {"P4", "F6", "S1"}  # noqa: PT017  the listed ones for a valid text
        return
    placements = placed.get_placement("a")
    assert [placement.rank for placement in placements] == list(range(placed.get_world_size("a")))
    for placement in placements:
        node = there.nodes[placement.cluster_node_rank]
        assert all(0 <= unit < node.num_units(ACCELERATOR) for unit in placement.local_hardware_ranks)
