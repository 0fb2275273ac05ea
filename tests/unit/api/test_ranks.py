import pytest

from rljob_api import ranks
from rljob_api.errors import PlacementTextError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("5", [5]),
        ("all", list(range(8))),
        ("ALL", list(range(8))),
        ("0, 2,4 - 7", [0, 2, 4, 5, 6, 7]),
        (",0,,1,", [0, 1]),
        ("007", [7]),
    ],
)
def test_selects(text: str, expected: list[int]) -> None:
    assert ranks.parse(text).resolve(8) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "a", "-1", "1-", "0-1-2", "+1", "1_0", "0x1", "1.0", "٣", "²", "3-1", "1:", ":1", "1:all", "1" * 10]
)
def test_refuses_the_text(text: str) -> None:
    with pytest.raises(PlacementTextError):
        ranks.parse(text)


@pytest.mark.parametrize(
    ("text", "problem"), [("8", "rank 8"), ("0-8", "rank 8"), ("1,0", "already"), ("0-2,2", "already"), ("all,3", "already")]
)
def test_refuses_the_ranks(text: str, problem: str) -> None:
    with pytest.raises(PlacementTextError, match=problem):
        ranks.parse(text).resolve(8)


def test_nothing_to_choose_from() -> None:
    with pytest.raises(PlacementTextError, match="no devices"):
        ranks.parse("all").resolve(0)


def test_a_huge_selection_is_refused_before_it_is_made() -> None:
    with pytest.raises(PlacementTextError, match="more than"):
        ranks.parse("all").resolve(10**9)


def test_process_ranks_are_parsed() -> None:
    parsed = ranks.parse("0-3:0-7, all:2")
    assert parsed.has_process_ranks
    assert str(parsed) == "0-3:0-7,all:2"
