"""Every example is a valid job: types, rules between fields, placement."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rljob_api import validation
from tests.layout.tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))
JOBS = [
    pytest.param(path, document["metadata"]["name"], id=f"{path.relative_to(ROOT / 'examples')}:{document['metadata']['name']}")
    for path in EXAMPLES
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] == "RLJob"
]


@pytest.mark.parametrize(("path", "name"), JOBS)
def test_the_example_is_valid(path: Path, name: str):
    assert validation.check(path.read_text(), name=name).plan.nodes


def test_every_example_holds_one_job_under_a_name_of_its_own():
    names = [parameter.values[1] for parameter in JOBS]
    assert len(names) == len(EXAMPLES) == len(set(names))
