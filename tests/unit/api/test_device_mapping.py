import pytest

from rljob_api.errors import PlacementError
from rljob_api.placement import device_mapping


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("list(range(0,4))", (0, 1, 2, 3)),
        ("list(range(4))", (0, 1, 2, 3)),
        ("range(0, 8, 4)", (0, 4)),
        ("list(range(3, -1, -1))", (3, 2, 1, 0)),
        ("[0, 2]", (0, 2)),
        ("[3, 1]", (3, 1)),
        ("list([5])", (5,)),
        (" list(range(0,2)) + list(range(6,8)) ", (0, 1, 6, 7)),
        ("([0] + [1])", (0, 1)),
        ("[7] * 1", (7,)),
        ("1 * [7] + [] * 3", (7,)),
    ],
)
def test_reads_what_roll_writes(text: str, expected: tuple[int, ...]) -> None:
    assert device_mapping.parse(text, 8) == expected


HOSTILE = [
    "__import__('os').system('id')",
    "().__class__.__bases__",
    "[x for x in range(3)]",
    "(lambda: [0])()",
    "list(map(int, '01'))",
    "list(range(0, 8), *[1])",
    "list(range(**{}))",
    "[0 if True else 1]",
    "[0][0]",
    "{0, 1}",
    "(0, 1)",
    "f'{0}'",
    "'0'",
    "[None]",
    "[False]",
    "[1.0]",
    "[1e0]",
    "[0x1]",
    "[1_0]",
    "[１]",
    "[9999999999]",
    "[-1]",
    "[+1]",
    "[--1]",
    "[[0]]",
    "[0, [1]]",
    "range(0, 8, 0)",
    "range()",
    "range(1, 2, 3, 4)",
    "list()",
    "list(0)",
    "list(range(999999999))",
    "[0] * 999999999",
    "[0] * 1000 * 1000 * 1000",
    "2 * 3",
    "[0] - [0]",
    "[0] @ [0]",
    "[0",
    "0]",
    "",
    "   ",
    "[]",
    "[0] [1]",
    "[0]\n[1]",
    "[0]; [1]",
    "[0] # all",
    "[0]\\\n",
    "(" * 200 + "[0]" + ")" * 200,
    "[" * 3000,
    "-" * 3000 + "1",
    "[0]" + "+[0]" * 900,
    "[" + "0," * 3000 + "]",
    "[0, 0]",
    "[8]",
    "\x00",
    "[\ud800]",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_refuses_everything_else_with_a_remedy(text: str) -> None:
    with pytest.raises(PlacementError) as caught:
        device_mapping.parse(text, 8)
    assert caught.value.problem
    assert caught.value.remedy


def test_zero_devices_are_said_plainly() -> None:
    with pytest.raises(PlacementError, match="there are no devices"):
        device_mapping.parse("[0]", 0)
