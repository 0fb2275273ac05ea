"""Recipe: a field of the spec is a line and a docstring in its section's class; schema, bounds and messages follow from it."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import ValidationError

from rljob_api.crd.schema import structural
from rljob_api.v1alpha1.base import SpecModel
from rljob_api.v1alpha1.learning import Rollout

SECTION = '''
from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.learning import Rollout


class ToyRollout(Rollout):
    """How responses are generated, with one field more."""

    patience_seconds: Annotated[int, Field(ge=1, le=60)] = 5
    """How long to wait for a toy."""
'''


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SpecModel]]:
    """The section with one field more, in a module of its own: descriptions are read from source files."""
    (tmp_path / "rljob_toy.py").write_text(SECTION)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("rljob_toy").ToyRollout
    sys.modules.pop("rljob_toy")


def test_a_field_reaches_the_schema_with_its_default_bounds_and_description(section: type[SpecModel]) -> None:
    before, after = structural(Rollout, "spec.rollout")["properties"], structural(section, "spec.rollout")["properties"]
    assert set(after) - set(before) == {"patienceSeconds"}
    assert after["patienceSeconds"] == {
        "description": "How long to wait for a toy.",
        "type": "integer",
        "minimum": 1,
        "maximum": 60,
        "default": 5,
    }


def test_a_field_is_read_by_its_key_and_held_to_its_bounds(section: type[SpecModel]) -> None:
    assert section.model_validate({"patienceSeconds": 7}).model_dump()["patience_seconds"] == 7
    with pytest.raises(ValidationError, match="less than or equal to 60"):
        section.model_validate({"patienceSeconds": 61})
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section.model_validate({"patience": 7})
