"""tools/mutate: which faults it makes, and that it tells killed ones from survivors without touching the work tree."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.layout.tree import ROOT

TOOL = ROOT / "tools" / "mutate"


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    loader = SourceFileLoader("mutate", str(TOOL))
    spec = importlib.util.spec_from_loader("mutate", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b <= c", ["(a <= b <= c)", "(a < b < c)"]),
        ("x = a + 1", ["x = (a - 1)", "x = a + 2"]),
        ("x = y and not z", ["x = (y or not z)"]),
        ("x = a is not None", ["x = (a is None)"]),
        (
            "def f():\n    return g(é) + 0.5",
            ["def f():\n    return None", "def f():\n    return (g(é) - 0.5)", "def f():\n    return g(é) + 1.5"],
        ),
        ("def f() -> Literal[1]:\n    return None", []),
        ("def f(a: Literal[1]):\n    return False", []),
        ("x = f'{a + 1}' if True else ''", []),
    ],
)
def test_faults(mutate: ModuleType, source: str, expected: list[str]) -> None:
    assert [mutant.source for mutant in mutate.mutants(Path("f.py"), source)] == expected


def test_faults_of_one_line(mutate: ModuleType) -> None:
    assert [mutant.after for mutant in mutate.mutants(Path("f.py"), "a < b\nc > d\n", 2)] == ["c >= d"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A package whose only test checks one of two functions."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return a + a\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, *arguments, "--tests", "test_sums.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # each of the tool's runs starts faster
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


def test_survivors_are_listed_and_the_work_tree_stays(repository: Path) -> None:
    before = {path: path.read_bytes() for path in repository.rglob("*.py")}
    done = run(repository, "src/sums.py")
    assert done.returncode == 1, done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("4 of 4 possible faults")
    assert lines == [
        "killed    src/sums.py:2  a + b  ->  a - b",
        "killed    src/sums.py:2  return a + b  ->  return None",
        "SURVIVED  src/sums.py:6  a + a  ->  a - a",
        "SURVIVED  src/sums.py:6  return a + a  ->  return None",
    ]
    assert last == "killed 2 of 4"
    assert {path: path.read_bytes() for path in repository.rglob("*.py")} == before


def test_tests_that_fail_or_do_not_import_the_file_are_an_error(repository: Path) -> None:
    (repository / "src" / "other.py").write_text("x = 1\n")
    done = run(repository, "src/other.py")
    assert (done.returncode, "they do not import them" in done.stderr) == (2, True)
    (repository / "test_sums.py").write_text("def test_add():\n    assert False\n")
    done = run(repository, "src/sums.py")
    assert (done.returncode, "the tests fail without any fault" in done.stderr) == (2, True)
