"""The program and the table of docs/time-division.md that are about one's own loop."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

from rljob_runtime.offload.worker_group import WorkerGroup
from tests.layout.tree import ROOT
from tests.unit.docs.test_pages import rows, section

PAGE = section((ROOT / "docs" / "time-division.md").read_text(), "Writing your own loop")


def test_the_program_prints_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program
    (tmp_path / "program.py").write_text(program.group(1))
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")  # here, where torch is imported already
    *lines, moved = capsys.readouterr().out.splitlines()
    assert lines == re.findall(r"`(trainer [^`]*reference [^`]*)`", PAGE)
    weights = moment = 4_000_000
    assert moved == f"{3 * 2 * weights + 2 * (weights + moment) + 2 * 2 * moment:.1f} bytes moved", "as the sentence below adds up"
    assert f"and {float(moved.split()[0]) / 1e6:.0f} MB:" in PAGE


def test_the_table_names_what_roles_have() -> None:
    said = "".join(cells[0] for cells in rows(PAGE)[1:])
    assert set(re.findall(r"group\.(\w+)\(", said)) <= set(dir(WorkerGroup))
    assert {"reload_states", "offload_states"} <= set(re.findall(r"(\w+_states)\(", said))
    assert (
        set(re.findall(r"(\w+)=", said)) == {"is_offload_states", "include", "each"} <= set(inspect.signature(WorkerGroup.call).parameters)
    )
