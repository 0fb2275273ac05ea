"""The recipes of CONTRIBUTING.md: each adds what it says, by the files that it names and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.layout.tree import ROOT
from tests.support import recipes

MAX_FILES: Mapping[str, int] = {"loss": 3, "spec_field": 4, "engine": 3, "transport": 3, "role": 3, "command": 2}
"""Written by hand, without tests, golden files, and generated files."""
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
DECISION = (ROOT / "docs" / "design" / "0002-one-description-of-a-role.md").read_text()


def section(name: str) -> str:
    """The part of the guide that names the recipe's folder."""
    (found,) = (part for part in re.split(r"^###? ", GUIDE, flags=re.MULTILINE) if f"`tests/data/recipes/{name}/`" in part)
    return found


def steps(name: str) -> list[str]:
    """The file of each numbered step, ``<...>`` for a name; those that leave least open first."""
    return sorted(re.findall(r"^\d\. `([^`]+)`", section(name), flags=re.MULTILINE), key=lambda step: step.count("<"))


def describes(step: str, file: str) -> bool:
    return re.fullmatch(re.sub(r"<[^>]+>", "[^/]+", step.replace(".", r"\.")), file) is not None


def test_every_recipe_has_a_limit() -> None:
    assert {path.name for path in recipes.FOLDER.iterdir()} == set(MAX_FILES)


@pytest.mark.parametrize("name", MAX_FILES)
def test_a_recipe_adds_what_it_says(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(name)
    recipe.apply(tmp_path)
    recipe.check(tmp_path)


@pytest.mark.parametrize("name", MAX_FILES)
def test_the_guide_names_the_files_of_the_recipe(name: str) -> None:
    files, named = recipes.load(name).files, steps(name)
    described = [next((step for step in named if describes(step, file)), f"no step names {file}") for file in files]
    assert sorted(described) == sorted(named)


@pytest.mark.parametrize("name", MAX_FILES)
def test_guide_and_decision_count_the_files_of_the_recipe(name: str) -> None:
    count = len(recipes.load(name).files)
    assert count <= MAX_FILES[name]
    assert f"({count} files" in section(name)
    (row,) = (line for line in DECISION.splitlines() if f"`tests/data/recipes/{name}/`" in line)
    assert re.match(r"\d+", row.split("|")[3].strip()).group() == str(count)  # type: ignore[union-attr]
