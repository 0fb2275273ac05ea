"""The programs of docs/python-api.md do what the page says; the one with a whole run is in tests/integration/test_library_run.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.layout.tree import ROOT

PAGE = (ROOT / "docs" / "python-api.md").read_text()


def program(name: str) -> tuple[str, str]:
    """A program of the page, and what the page says it prints."""
    found = re.search(rf"<!-- program: {name} -->\n```python\n(.*?)```.*?```text\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found.group(1), found.group(2)


@pytest.mark.parametrize("name", ["collocated", "time-division"])
def test_the_programs_print_what_the_page_says(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, expected = program(name)
    here = source.replace("rljob.Cluster(PLACEMENT)", "rljob.Cluster(PLACEMENT, in_process=True)")
    assert here != source
    (tmp_path / "program.py").write_text(here)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")  # here, where torch is imported already
    assert capsys.readouterr().out == expected
