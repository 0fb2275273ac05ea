"""Every configuration under tests/data/convert: golden result, planned, nothing lost, nothing only marked as used."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rljob_convert import conversion
from rljob_convert.rlinf.keys import TABLE as RLINF
from rljob_convert.roll.keys import TABLE as ROLL
from tests.support.golden import Golden
from tests.unit.convert import cases

every = pytest.mark.parametrize(
    ("framework", "path"),
    [pytest.param(framework, path, id=path.stem) for framework in ("rlinf", "roll") for path in cases.configurations(framework)],
)
TABLES = {"rlinf": RLINF, "roll": ROLL}
READ_BY_SECTION = {"rlinf": {("cluster",)}, "roll": {("code_sandbox", "world_size")}}
"""Keys under names of the user's own, which no table can list."""


@every
def test_golden(framework: str, path: Path, golden: Golden) -> None:
    text = cases.rendered(path)
    assert golden.differences(cases.GOLDEN / path.name, text) == ""
    assert yaml.load(text, yaml.CSafeLoader) == cases.converted(path).manifest


@every
def test_it_plans(framework: str, path: Path) -> None:
    assert cases.plan(cases.converted(path)).components
    assert cases.offload_problems(cases.converted(path)) == []


@every
def test_every_leaf_is_used_or_noted(framework: str, path: Path) -> None:
    assert cases.lost(framework, path.read_text()) == []


@every
def test_changing_a_leaf_shows(framework: str, path: Path) -> None:
    """Nothing is only marked as used: whatever a leaf says must show in the manifest or in a note."""
    assert cases.silent_leaves(framework, path.read_text()) == []


@every
def test_secrets_are_not_shown(framework: str, path: Path) -> None:
    assert "not-to-be-shown" not in conversion.render(cases.converted(path))


@every
def test_every_used_key_is_in_the_table(framework: str, path: Path) -> None:
    source, table = cases.source_of(framework, path.read_text()), TABLES[framework]
    for parts in source.used - source.serving:
        heads = {parts[:length] for length in range(1, len(parts) + 1)}
        assert any(table.pattern(head) for head in heads) or heads & READ_BY_SECTION[framework], parts
