"""The program and the table of docs/time-division.md that are about one's own loop."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

from rljob_runtime.offload.worker_group import WorkerGroup
from tests.layout.tree import ROOT
from tests.unit.docs.test_pages import rows, section

PAGE = section((ROOT / "docs" / "time-division.md").read_text(), "Writing your own loop")


def test_the_program_prints_what_the_page_says() -> None:
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program
    done = subprocess.run([sys.executable, "-c", program.group(1)], check=True, timeout=60, capture_output=True, text=True)
    *lines, moved = done.stdout.splitlines()
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
