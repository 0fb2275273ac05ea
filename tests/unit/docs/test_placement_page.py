"""The tables and snippets of docs/placement.md, against the planner."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from rljob_api import planner
from rljob_api.planning.plan import PlacementMode
from tests.layout.tree import ROOT
from tests.unit.api.manifests import spec
from tests.unit.docs.test_pages import rows, section

PAGE = (ROOT / "docs" / "placement.md").read_text()
TABLE = [(cells[0].strip("`"), cells[1]) for cells in rows(section(PAGE, "ranks"))[1:]]


@pytest.mark.parametrize(("text", "said"), TABLE)
def test_every_row_of_the_table_of_ranks(text: str, said: str) -> None:
    groups = [{"name": "a", "nodes": 2, "devicesPerNode": 8}]
    component = {"name": "env", "role": "Environment", "placement": {"ranks": text}}
    processes = planner.plan(spec(groups, [component])).component("env").processes
    assert " ".join(f"n{p.node_rank}:{','.join(map(str, p.local_devices))}" for p in processes) == said


def test_every_mode_is_explained() -> None:
    assert [cells[0] for cells in rows(section(PAGE, "Modes"))[1:]] == [
        mode.value for mode in (PlacementMode.DISAGGREGATED, PlacementMode.COLLOCATED, PlacementMode.PARTIAL, PlacementMode.HYBRID)
    ]


def test_every_difference_that_a_result_can_name_is_explained() -> None:
    said = [cells[0] for cells in rows(section(PAGE, "Where RLJob differs from RLinf 0.3.0"))[1:]]
    assert said == [f"D{number}" for number in range(1, 23)]


def test_the_python_snippet_runs() -> None:
    snippet = re.search(r"```python\n(.*?)```", section(PAGE, "In Python"), re.DOTALL)
    assert snippet
    subprocess.run([sys.executable, "-c", snippet.group(1)], check=True, timeout=60)


@pytest.mark.parametrize("mapping", re.findall(r"`(list\(.*?\)|\[.*?\]|range\(.*?\))`", section(PAGE, "deviceMapping")))
def test_the_mappings_are_read(mapping: str) -> None:
    from rljob_api.placement import device_mapping

    assert device_mapping.parse(mapping, 16)
