"""RLinf's rank maps: what is read, what every part's processes get, and every check."""

from collections import Counter

import pytest

from rljob_api.errors import PlacementError
from rljob_api.placement import ranks
from rljob_api.placement.assignment import MAX_PROCESSES


def units(text: str, num_available: int = 16) -> list[list[int]]:
    return [list(each) for each in ranks.processes(text, num_available)]


def singles(start: int, end: int) -> list[list[int]]:
    return [[rank] for rank in range(start, end + 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-7", singles(0, 7)),
        ("6-9", singles(6, 9)),
        ("5", [[5]]),
        ("0-3:0-7", [[0], [0], [1], [1], [2], [2], [3], [3]]),
        ("0:0-3", [[0]] * 4),
        ("0-7:0-3", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("0-15:0-3", [list(range(first, first + 4)) for first in (0, 4, 8, 12)]),
        ("0-3:0-1,4-5:2-9,6", [[0, 1], [2, 3], *[[4]] * 4, *[[5]] * 4, [6]]),
        ("0-1:0-3,3-5,7-10:7-14", [[0], [0], [1], [1], [3], [4], [5], *[[unit] for unit in (7, 7, 8, 8, 9, 9, 10, 10)]]),
        ("4-11:0-3,12-15:4", [[4, 5], [6, 7], [8, 9], [10, 11], [12, 13, 14, 15]]),
        ("all:0-31", [[unit] for unit in range(16) for _ in range(2)]),
        ("6-11:0-1", [[6, 7, 8], [9, 10, 11]]),
        ("0:0-1,1:2-7", [[0]] * 2 + [[1]] * 6),
    ],
)
def test_every_row_of_the_table(text: str, expected: list[list[int]]) -> None:
    assert units(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ALL", singles(0, 7)),
        ("0, 2,4 - 7", [[0], [2], *singles(4, 7)]),
        (",0,,1,", singles(0, 1)),
        ("007", [[7]]),
        (" 0 - 1 : 0 - 3 ", [[0], [0], [1], [1]]),
    ],
)
def test_spaces_commas_and_case_do_not_matter(text: str, expected: list[list[int]]) -> None:
    assert units(text, 8) == expected


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("P1", "0:0:0"),
        ("P2", "a"),
        ("P2", "-1"),
        ("P2", "1-"),
        ("P2", "0-1-2"),
        ("P2", "0x1"),
        ("P2", "1.0"),
        ("P2", "²"),
        ("P2", "-"),
        ("P2", "1" * 5000),
        ("P3", "3-1"),
        ("P4", "16"),
        ("P4", "0-16"),
        ("P4", "1" * 12),
        ("P5", ":0-3"),
        ("P6", "0-3,3-5"),
        ("P6", "0,0"),
        ("P6", "0-1,4-5,0-9"),
        ("P6", "all,3"),
        ("P7", "4-7,0-3"),
        ("P7", "0,4-7,2"),
        ("P8", "0-3:all"),
        ("P8", "0-3:ALL"),
        ("P9", "0-3:a"),
        ("P9", "0-3:3-0"),
        ("P9", "0-3:-1"),
        ("P10", "0-3:"),
        ("P11", "0-3:0-3,4-7:3-6"),
        ("P12", "0:0,1:2"),
        ("P12", "0-3:4-7,4-7:0-3"),
        ("P14", "0-3:0-2"),
        ("P14", "0-1:0,2-6:1-3"),
        ("S2", ""),
        ("S2", " , ,"),
        ("D7", "0-3:4-7"),
        ("D7", "0-3:4-7,8"),
        ("D9", "+1"),
        ("D9", "1_0"),
        ("D9", "٣"),
        ("D9", "0-3:0-+3"),
        ("D9", "0000000001"),
    ],
)
def test_every_check_has_its_id(check: str, text: str) -> None:
    with pytest.raises(PlacementError) as caught:
        ranks.processes(text, 16)
    assert caught.value.check == check
    assert caught.value.problem
    assert caught.value.remedy


def test_the_documented_uneven_part_is_spread_as_evenly_as_can_be() -> None:
    """RLinf documents it and refuses it (D19)."""
    counts = Counter(unit for units in ranks.processes("0-1:0-200,2-3:201-511", 4) for unit in units)
    assert counts == {0: 101, 1: 100, 2: 156, 3: 155}


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("P4", "99,0:0:0"),
        ("P1", "0:0:0,99"),
        ("P4", "99:all"),
        ("P6", "0,0:x"),
        ("P14", "0-3:4-6"),
        ("P4", "+99"),
        ("P6", "+1,1"),
        ("P12", "0:5,1:9"),
        ("D9", "+1:4"),
    ],
)
def test_the_first_violated_check_is_reported_and_differences_from_rlinf_last(check: str, text: str) -> None:
    with pytest.raises(PlacementError) as caught:
        ranks.processes(text, 16)
    assert caught.value.check == check


@pytest.mark.parametrize(("check", "text"), [("P4", "0"), ("P5", "all")])
def test_nothing_to_choose_from(check: str, text: str) -> None:
    with pytest.raises(PlacementError, match="there are none") as caught:
        ranks.processes(text, 0)
    assert caught.value.check == check


def test_messages_name_the_unit() -> None:
    with pytest.raises(PlacementError, match="Franka rank 2 does not exist, the 2 available ranks are 0-1"):
        ranks.processes("0-2", 2, "Franka")


@pytest.mark.parametrize(
    ("text", "num_available", "problem"),
    [
        ("all", 10**9, "processes, more than"),
        ("all:0", 10**9, "accelerator ranks, more than"),
        (f"0:0-{MAX_PROCESSES}", 1, "processes, more than"),
        ("0:0-999999999", 1, "processes, more than"),
    ],
)
def test_a_huge_selection_is_refused_before_it_is_made(text: str, num_available: int, problem: str) -> None:
    with pytest.raises(PlacementError, match=problem):
        ranks.processes(text, num_available)


def test_the_largest_allowed_selection_is_made() -> None:
    assert len(ranks.processes(f"0:0-{MAX_PROCESSES - 1}", 1)) == MAX_PROCESSES


def test_evaluation_counts_without_listing_and_says_which_process_ranks_were_written() -> None:
    evaluation = ranks.evaluate("0-3:0-1,4-5", 8)
    assert (evaluation.num_units, evaluation.num_processes, evaluation.refused) == (6, 4, None)
    assert [(part.units, part.processes, part.gives_processes) for part in evaluation.parts] == [
        (range(4), range(2), True),
        (range(4, 6), range(2, 4), False),
    ]


@pytest.mark.parametrize(
    "text", ["", ",", "a", "-1", "1-", "0-1-2", "+1", "1_0", "0x1", "1.0", "٣", "²", "3-1", "1:", ":1", "1:all", "1:2:3", "1" * 10]
)
def test_parse_refuses_the_text(text: str) -> None:
    with pytest.raises(PlacementError):
        ranks.parse(text)


def test_parse_keeps_process_ranks_and_prints_them() -> None:
    parsed = ranks.parse("0-3:0-7, all:2,")
    assert parsed.has_process_ranks
    assert str(parsed) == "0-3:0-7,all:2"
    assert not ranks.parse("0-3,5").has_process_ranks
