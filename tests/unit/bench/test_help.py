"""Every command of the measurements and tools explains itself, and does nothing else then."""

import importlib.util
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import MEASUREMENTS
from tests.layout.tree import ROOT

PAGES = (ROOT / "bench" / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
TEXT = "\n".join(page.read_text() for page in PAGES)
MODULES = sorted({"bench", *(f"bench.{one.name}" for one in MEASUREMENTS), *re.findall(r"python -m (bench[.\w]*\w)", TEXT)})
TOOLS = sorted(path for path in (ROOT / "tools").iterdir() if path.is_file() and path.stat().st_mode & 0o100)


def test_every_module_prints_its_options(monkeypatch, capsys):
    """In one process: what they import is imported once."""
    assert {"bench.loading", "bench.weightsync.engine"} <= set(MODULES)
    faults = [f"python -m {module}: {fault}" for module in MODULES for fault in _faults(module, monkeypatch, capsys)]
    assert faults == []


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_tool_prints_its_options(tool: Path, monkeypatch, capsys):
    if "bash" in tool.read_text().splitlines()[0]:
        done = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout[0].isupper()
        return
    assert list(_faults(str(tool), monkeypatch, capsys)) == []


def _faults(target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """What is wrong with a module's or file's answer to ``--help``; one without a parser is not run, for it would do its work."""
    found = None if "/" in target else importlib.util.find_spec(target)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{target}.__main__")
    source = Path(target if found is None or found.origin is None else found.origin)
    if not re.search("ArgumentParser|import main", source.read_text()):
        yield "it has no parser of arguments"
        return
    monkeypatch.setattr(sys, "argv", [target, "--help"])
    run = runpy.run_path if "/" in target else runpy.run_module
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        try:
            run(target, run_name="__main__")
        except SystemExit as end:
            if end.code not in (0, None):
                yield f"exit code {end.code}"
        except Exception as error:  # noqa: BLE001 - every kind is a finding
            yield repr(error)
        else:
            yield "it returned, as after its work"
    if not capsys.readouterr().out.startswith("usage: "):
        yield "no usage is printed"
