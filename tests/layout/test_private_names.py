"""Tests reach the packages by public names alone, so that what is behind these may change without them."""

import ast
import itertools
import re
from collections.abc import Iterator

import pytest

from tests.layout.tree import MEMBERS, ROOT, member_files, python_files

EXCEPTIONS = {
    "tests/integration/rank_processes.py: _timeout": "of torch's options of a process group, which have no public one",
    "tests/unit/runtime/weightsync/test_group.py: _timeout": "the same",
    "tests/unit/runtime/test_lone_groups.py: _timeout": "the same",
    "tests/unit/runtime/test_lone_groups.py: _devices": "the same",
    "tests/unit/runtime/engine/test_sglang.py: _devices": "the same",
    "tests/unit/api/test_sync_routes.py: _replace": "a public method of every named tuple",
    "tests/unit/bench/test_chaos.py: _parse": "of the benchmarks, which nobody imports",
    "tests/unit/bench/test_gpu_check.py: _function": "of the benchmarks, which nobody imports",
}
"""``file: name`` and why the test cannot do without it."""
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
DEFINITION = re.compile(
    r"^\s*(?:async def|def|class) (_[A-Za-z]\w*)|^\s*(_[A-Za-z]\w*)(?=[^=\n(]*=[^=])|\b(?:self|cls)\.(_[A-Za-z]\w*)(?=[^=\n(]*=[^=])",
    re.MULTILINE,
)
PRIVATE_IMPORT = re.compile(r"import[^\n]*\b_[A-Za-z]")
"""Much cheaper than a syntax tree of every file."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(value: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def called(function: ast.expr) -> str:
    """Last part of the name of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def defined_in(source: str) -> set[str]:
    """Private functions, classes, variables of modules and classes, and attributes that methods set."""
    return {name for name in itertools.chain.from_iterable(DEFINITION.findall(source)) if name}


def reached_in(tree: ast.Module, of_members: frozenset[str], of_tests: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of a package that a test's file imports or reaches.

    Args:
        tree: of the file.
        of_members: private names that the packages define.
        of_tests: those that tests define; objects of tests have them, too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in modules:
                if module.split(".")[0] in MEMBERS.values():
                    names = [*module.split("."), *(alias.name for alias in node.names if isinstance(node, ast.ImportFrom))]
                    yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and node.attr in of_members and not (is_own(node.value) and node.attr in of_tests):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and called(node.func) in ("setattr", "getattr", "delattr"):
            words = (word.value for word in node.args[:2] if isinstance(word, ast.Constant) and isinstance(word.value, str))
            yield from ((node.lineno, name) for word in words if (name := word.rpartition(".")[2]) in of_members)


def test_no_test_imports_or_reaches_a_private_name_of_a_package() -> None:
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in python_files() if path.is_relative_to(ROOT / "tests")}
    of_members = frozenset[str]().union(*(defined_in(path.read_text()) for path in member_files()))
    of_tests = frozenset[str]().union(*map(defined_in, tests.values()))
    assert len(tests) > 100
    assert len(of_members) > 100
    hits = {
        f"{file}: {name}": f"{file}:{line}: {name}"
        for file, source in tests.items()
        if not of_members.isdisjoint(PRIVATE.findall(source)) or PRIVATE_IMPORT.search(source)
        for line, name in reached_in(ast.parse(source), of_members, of_tests)
    }
    found = [where for hit, where in hits.items() if hit not in EXCEPTIONS]
    assert found == [], "test the public behavior, pass in what the test replaces, or give it a public name"
    assert set(EXCEPTIONS) <= set(hits), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from rljob_api.rules import _check", ["_check"]),
        ("import rljob_runtime._inside.parts", ["_inside"]),
        ("from torch import _check", []),
        ("worker._state.clear()", ["_state"]),
        ("tensor._cdata", []),
        ("monkeypatch.setattr(worker, '_state', {})", ["_state"]),
        ("monkeypatch.setattr('rljob_api.rules._check', None)", ["_check"]),
        ("monkeypatch.setattr(worker, 'state', '_state')", []),
        ("class A(Worker):\n    def f(self):\n        self._state = self._own", ["_state"]),
        ("class A:\n    def f(self):\n        return self._own + super()._own", []),
        ("other._own", ["_own"]),
    ],
)
def test_the_gate_sees_what_it_should(source: str, expected: list[str]) -> None:
    found = reached_in(ast.parse(source), frozenset({"_check", "_state", "_own"}), frozenset({"_own"}))
    assert [name for _, name in found] == expected


def test_the_gate_knows_what_a_module_defines() -> None:
    source = "_A = 1\n_B: int = 2\nclass C:\n    _d = 3\n    def _e(self):\n        self._f, self._g = other._h, self._i == 4\n"
    assert defined_in(source) == {"_A", "_B", "_d", "_e", "_f", "_g"}
