"""Rules about code that hold whatever a noqa comment says: nothing is evaluated, no exception disappears, library code does not print."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layout.tree import ROOT, member_files, python_files

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


def nodes_of(source: str, *words: str) -> Iterator[ast.AST]:
    """The syntax tree's nodes; none where no word is in the text, which is much cheaper to look at.

    Python takes some other letters in a name for those of ASCII, so that text with any is always parsed.
    """
    if any(word in source for word in words) or not source.isascii():
        yield from ast.walk(ast.parse(source))


def is_monkeypatch(function: ast.expr) -> bool:
    """Whether it is ``monkeypatch.setattr``."""
    return isinstance(function, ast.Attribute) and function.attr == "setattr" and ast.unparse(function.value) == "monkeypatch"


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Line and sentence for each ``eval``/``exec`` call, broad handler that drops what it caught, and monkeypatched setting of torch."""
    for node in nodes_of(source, "eval", "exec", "except", "setattr"):
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


def prints(source: str) -> Iterator[tuple[int, str]]:
    for node in nodes_of(source, "print"):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "prints"


def located(path: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in found]


RUNS_CODE = "runtime/src/rljob_runtime/rewards/code_runner.py"
"""Runs what a model wrote, in a process made for it."""


def test_nothing_is_evaluated_and_no_exception_disappears() -> None:
    hits = [hit for path in python_files() for hit in located(path, offences(path.read_text()))]
    assert [hit for hit in hits if not (hit.startswith(f"{RUNS_CODE}:") and hit.endswith(": calls exec"))] == []


def test_library_code_does_not_print() -> None:
    library = [path for path in member_files() if not MAY_PRINT & {path.stem, path.parent.name}]
    assert [hit for path in library for hit in located(path, prints(path.read_text()))] == []


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
    assert [what for _, what in offences(source)] == expected
