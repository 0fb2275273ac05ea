"""Ceilings: a file 500 lines soft, 800 hard; a function 60 soft, 120 hard. Soft ones are reported as warnings."""

import ast
import warnings
from collections.abc import Iterator

import pytest

from tests.layout.tree import ROOT, python_files

FILE_SOFT, FILE_HARD = 500, 800
FUNCTION_SOFT, FUNCTION_HARD = 60, 120


def function_sizes(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and number of lines of every function, decorators not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def too_long(sizes: dict[str, int], soft: int, hard: int) -> dict[str, int]:
    """What is over the hard ceiling and has to be split by subject; warns of what is over the soft one."""
    over = {where: lines for where, lines in sizes.items() if lines > soft}
    for where, lines in over.items():
        warnings.warn(f"{where}: {lines} lines (soft ceiling {soft})", stacklevel=2)
    return {where: lines for where, lines in over.items() if lines > hard}


def test_files_stay_small() -> None:
    sizes = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in python_files()}
    assert too_long(sizes, FILE_SOFT, FILE_HARD) == {}


def test_functions_stay_small() -> None:
    sizes = {}
    for path in python_files():
        sizes.update({f"{path.relative_to(ROOT)}:{line} {name}": lines for name, line, lines in function_sizes(path.read_text())})
    assert too_long(sizes, FUNCTION_SOFT, FUNCTION_HARD) == {}


def test_the_gate_sees_a_function_that_is_too_long() -> None:
    source = "def long():\n" + "    x = 1\n" * FUNCTION_HARD
    assert list(function_sizes(source)) == [("long", 1, FUNCTION_HARD + 1)]
    with pytest.warns(UserWarning, match="soft ceiling"):
        assert too_long({"long": FUNCTION_HARD + 1, "short": 1}, FUNCTION_SOFT, FUNCTION_HARD) == {"long": FUNCTION_HARD + 1}
