"""SwanLab, whose protobuf fits no environment with vLLM: installed into a folder of its own, which its process finds first."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.v1alpha1.operations import TrackerType
from rljob_runtime.report.trackers.feed import run_id_of
from tests.layout.test_slim_imports import find_uv
from tests.unit.runtime.report.test_trackers import CREDENTIALS, REWARDS, two_attempts

VALUE = re.compile(rb"reward/mean\x10(.)\x18\x01.{10,20}?\*\t\t(.{8})", re.DOTALL)
"""A step and its value, a double, in SwanLab's records."""

pytestmark = pytest.mark.slow


def test_swanlab_has_files_of_one_run_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    install = [find_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(packages), "swanlab==0.10.3"]
    subprocess.run(install, check=True)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    folder = two_attempts(tmp_path / "run", (TrackerType.SWANLAB,))
    first, second = sorted((folder.trackers / "swanlab").glob("run-*/run-*.swanlab"))
    assert {first.stem, second.stem} == {f"run-{run_id_of(folder)}"}
    found = [(int(step[0]), struct.unpack("<d", value)[0]) for path in (first, second) for step, value in VALUE.findall(path.read_bytes())]
    assert found == REWARDS
    assert b"maths" in first.read_bytes()
    assert "seed" in (first.parent / "files" / "config.yaml").read_text()
