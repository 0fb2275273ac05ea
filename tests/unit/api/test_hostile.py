"""No input costs much or raises anything but a listed error: deep, huge, doubling, odd."""

import json
import subprocess
import sys

from tests.layout.tree import ROOT
from tests.support.cost import limit_s

MAX_CPU_S = 2.0
MAX_BYTES = 200 * 2**20


def test_hostile_inputs_are_answered_soon_and_small() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.api.hostile"], cwd=ROOT, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(map(json.loads, done.stdout.splitlines()))
    assert len(rows) > 250
    assert [row for row in rows if row["cpu_s"] > limit_s(MAX_CPU_S)] == []
    assert max(row["peak_bytes"] for row in rows) < MAX_BYTES
