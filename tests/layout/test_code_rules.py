"""Rules about code that hold whatever a noqa comment says: nothing is evaluated, no exception disappears, library code does not print.

And functions stay small: 60 lines soft, 120 hard; soft ones are reported as warnings.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.layout.tree import ROOT, member_files, python_files, too_long

FUNCTION_SOFT, FUNCTION_HARD = 60, 120
BROAD = {"Exception", "BaseException"}
# The only modules whose output is the interface.
MAY_PRINT = {"cli", "__main__", "driver"}


def names_of(handler: ast.ExceptHandler) -> set[str]:
    """The class names a handler catches; empty for a bare ``except:``."""
    if handler.type is None:
        return set()
    nodes = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in nodes}


def does_nothing(body: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Pass | ast.Continue) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


def is_monkeypatch(function: ast.expr) -> bool:
    """Whether it is ``monkeypatch.setattr``."""
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "setattr"
        and isinstance(function.value, ast.Name)
        and function.value.id == "monkeypatch"
    )


def offences(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and sentence for an ``eval``/``exec`` call, a broad handler that drops what it caught, or a monkeypatched setting of torch."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        yield node.lineno, f"calls {node.func.id}"
    if isinstance(node, ast.ExceptHandler):
        caught = names_of(node)
        if not caught:
            yield node.lineno, "bare except"
        elif caught & BROAD and does_nothing(node.body):
            yield node.lineno, "swallows every exception"
    if isinstance(node, ast.Call) and is_monkeypatch(node.func) and node.args:
        target = ast.unparse(node.args[0])
        if target.startswith("torch.") and target.endswith(".config"):  # undone by delattr, which hides the setting in this process
            yield node.lineno, f"monkeypatches {target}; use {target}.patch"


def is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the gates look for in one file."""

    offences: list[tuple[int, str]]
    prints: list[tuple[int, str]]
    functions: list[tuple[int, str, int]]
    """First line, name, and number of lines of every function, decorators not counted."""


def read(source: str) -> Found:
    """All of it in one pass over the syntax tree, because trees of all files take seconds."""
    found = Found(offences=[], prints=[], functions=[])
    for node in ast.walk(ast.parse(source)):
        found.offences.extend(offences(node))
        if is_print(node):
            found.prints.append((node.lineno, "prints"))  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
    return found


@pytest.fixture(scope="module")
def files() -> dict[Path, Found]:
    return {path: read(path.read_text()) for path in python_files()}


def located(path: Path, found: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in found]


RUNS_CODE = "runtime/src/rljob_runtime/rewards/code_runner.py"
"""Runs what a model wrote, in a process made for it."""


def test_nothing_is_evaluated_and_no_exception_disappears(files: dict[Path, Found]) -> None:
    hits = [hit for path, found in files.items() for hit in located(path, found.offences)]
    assert [hit for hit in hits if not (hit.startswith(f"{RUNS_CODE}:") and hit.endswith(": calls exec"))] == []


def test_library_code_does_not_print(files: dict[Path, Found]) -> None:
    library = [path for path in member_files() if not MAY_PRINT & {path.stem, path.parent.name}]
    assert [hit for path in library for hit in located(path, files[path].prints)] == []


def test_functions_stay_small(files: dict[Path, Found]) -> None:
    sizes = {f"{path.relative_to(ROOT)}:{line} {name}": lines for path, found in files.items() for line, name, lines in found.functions}
    assert too_long(sizes, FUNCTION_SOFT, FUNCTION_HARD) == {}


def test_the_gate_sees_a_function_that_is_too_long() -> None:
    source = "def long():\n" + "    x = 1\n" * FUNCTION_HARD
    assert read(source).functions == [(1, "long", FUNCTION_HARD + 1)]
    with pytest.warns(UserWarning, match="soft ceiling"):
        assert too_long({"long": FUNCTION_HARD + 1, "short": 1}, FUNCTION_SOFT, FUNCTION_HARD) == {"long": FUNCTION_HARD + 1}


def test_the_gate_sees_what_is_printed() -> None:
    assert read("import sys\nprint(1)\nsys.print(2)").prints == [(2, "prints")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("eval('1')", ["calls eval"]),
        ("try:\n    f()\nexcept Exception:\n    pass", ["swallows every exception"]),
        ("try:\n    f()\nexcept (ValueError, Exception):\n    'why'", ["swallows every exception"]),
        ("try:\n    f()\nexcept:\n    g()", ["bare except"]),
        ("try:\n    f()\nexcept KeyError:\n    pass", []),
        ("try:\n    f()\nexcept Exception as e:\n    g(e)", []),
        ("model.eval()", []),
        ("monkeypatch.setattr(torch._dynamo.config, 'a', 1)", ["monkeypatches torch._dynamo.config; use torch._dynamo.config.patch"]),
        ("monkeypatch.setattr(torch, 'compile', f)", []),
    ],
)
def test_the_gate_sees_what_it_should(source: str, expected: list[str]) -> None:
    assert [what for _, what in read(source).offences] == expected
