"""What the pages tell people to type or to open is there: make targets, modules, subcommands with their options, files."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from rljob_runtime.commands.cli import app
from tests.layout.tree import MEMBERS, ROOT
from tests.support.snippets import PAGES

README = ROOT / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))
OF_OTHERS = {"examples/accelerate_configs/deepspeed_zero3.yaml", "examples/scripts/gspo.py"}
"""Files of other projects, on their migration pages, that look like files of this one."""
TOP_LEVEL = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"models", "runs"}
SOURCES = [ROOT / folder / "src" / package for folder, package in MEMBERS.items()]

everywhere = pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda p: str(p.relative_to(ROOT)))


def code(text: str) -> Iterator[str]:
    """Lines of code blocks and comments in examples, and whatever stands between backticks."""
    blocks = r"^(```|~~~)[^\n]*\n(.*?)^\1|^(?: {4}|#   )([^\n]+)$"
    for match in re.finditer(blocks, text, re.DOTALL | re.MULTILINE):
        yield from (match.group(2) or match.group(3)).splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(text: str, start: str) -> list[list[str]]:
    """The words after ``start``, up to a comment, of every line of code that begins with it."""
    lines = [re.sub(r"\s+#.*|;.*", "", line).strip() for line in code(text)]
    return [line.split()[len(start.split()) :] for line in lines if f"{line} ".startswith(f"{start} ")]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def program() -> Any:
    """The command line of rljob, which typer takes 30 ms to make."""
    return typer.main.get_command(app)


def parameters(path: list[str]) -> set[str]:
    """Options of a subcommand of rljob.

    Raises:
        KeyError: there is no such subcommand.
    """
    command = program()
    for word in path:
        command = getattr(command, "commands", {})[word]
    return {option for parameter in command.params for option in parameter.opts}


@everywhere
def test_make_targets_exist(page: Path):
    named = {words[0] for words in commands(page.read_text(), "make") if words and re.fullmatch(r"[a-z0-9-]+", words[0])}
    assert named <= targets()


def test_every_make_target_is_in_the_readme():
    assert {words[0] for words in commands(README.read_text(), "make") if words} == targets()


def test_ci_runs_what_the_readme_says_in_that_order():
    said = re.search(r"^CI runs (.*?in this order)", README.read_text(), re.MULTILINE)
    assert said
    run = (ROOT / ".ci" / "run").read_text()
    done = re.findall(r"^(?:stage|tests|beside) (\S+) make (\S+)(?: ARGS='.*')?(?: #.*)?$", run, re.MULTILINE)
    assert re.findall(r"`make ([\w-]+)`", said.group(1)) == [target for _, target in done]


@everywhere
def test_modules_can_be_run(page: Path):
    for name, *_ in commands(page.read_text(), "python -m"):
        found = importlib.util.find_spec(name)
        assert found, name
        is_package = found.submodule_search_locations is not None
        assert not is_package or importlib.util.find_spec(f"{name}.__main__"), f"{name} has no __main__"


@everywhere
def test_subcommands_and_their_options_exist(page: Path):
    for words in commands(page.read_text(), "rljob"):
        path = words[: 2 if words[:1] == ["model"] else 1]
        if path and re.fullmatch(r"[a-z]+", path[0]):  # otherwise it is the program itself, or its options
            unknown = {word.split("=")[0] for word in words if word.startswith("--")} - parameters(path)
            assert unknown == set(), words


def test_measurements_and_their_options_exist():
    text = (ROOT / "bench" / "README.md").read_text()
    for module, *words in commands(text, "python -m"):
        place = ROOT / module.replace(".", "/")
        source = "".join(path.read_text() for path in (place / "__main__.py", place.with_suffix(".py")) if path.is_file())
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, f"{module} {option}"
    section = text.partition("(`bench.operator`)")[2]
    described = re.findall(r"^\| `(--\w+)` \| (\d+) \|", section, re.MULTILINE)
    source = (ROOT / "bench" / "operator" / "__main__.py").read_text()
    assert described == [(name, default) for name, default in re.findall(r'add_argument\("(--\w+)", type=\w+, default=(\d+)', source)]


@everywhere
def test_files_exist(page: Path):
    """A path begins with a folder of the repository; what a run makes and what only has a place holder does not."""
    text = page.read_text()
    words = {word.strip("(),:") for line in code(text) for word in line.split()}
    paths = {word.rstrip("/") for word in words if "/" in word and word.split("/")[0] in TOP_LEVEL and re.fullmatch(r"[\w./-]+", word)}
    assert sorted(path for path in paths - OF_OTHERS if not (ROOT / path).exists()) == []


def test_modules_of_the_map_exist():
    """`driver.py`, `policies/`: somewhere in the three packages or among the tests."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    names = {word for word in code(page) for word in re.findall(r"^[a-z_/]+(?:\.py|/)$", word)}
    known = {path for source in [*SOURCES, ROOT / "tests"] for path in source.rglob("*")}
    suffixes = {"/".join(path.parts[-count:]) for path in known for count in (1, 2, 3)}
    beyond = {name for name in names if name.split("/")[0] in TOP_LEVEL}
    assert len(names - beyond) > 20
    assert sorted(name for name in names - beyond if name.rstrip("/") not in suffixes) == []


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("    make bench      # all\n", "make", [["bench"]]),
        ("```\nmake test  # x\nmake setup\n```\nand `make e2e`", "make", [["test"], ["setup"], ["e2e"]]),
        ("#   rljob run examples/a.yaml --resume\n", "rljob", [["run", "examples/a.yaml", "--resume"]]),
        ("we make things\n", "make", []),
        ("`makefile`\n", "make", []),
    ],
)
def test_the_gate_sees_commands(text: str, start: str, expected: list[list[str]]):
    assert commands(text, start) == expected
