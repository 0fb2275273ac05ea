"""A whole small job with SGLang in time-division: the collocated quickstart for a few steps. One apart is in ``test_converted_job``."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import Running, shortened
from tests.support.pace import until
from tests.support.sglang_installed import require_sglang

STEPS = 4

pytestmark = pytest.mark.slow
require_sglang()


def servers_of(model: Path) -> list[int]:
    """Processes of SGLang that serve a model."""
    commands = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, command in commands.items() if "sglang.launch_server" in command and str(model) in command]


def test_the_quickstart_trains_on_what_sglang_samples(model: Path, tmp_path: Path) -> None:
    """Log-probs of engine and trainer agree after every sync, so on-policy ratios are 1; top-k and time-division leave them so.

    All processes start as users' do.
    """
    manifest = shortened("quickstart-collocated", model, steps=STEPS)
    manifest["spec"]["components"][1]["engine"] = {"type": "SGLang", "maxRunningRequests": 64}
    manifest["spec"]["rollout"]["topK"] = 10
    run = Running(tmp_path / "job", manifest, as_users=True)
    assert run.wait() == 0, run.output
    until("the server's processes end", lambda: not servers_of(model))
    metrics = run.metrics()
    assert len(metrics) == STEPS
    for line in metrics:
        assert line["sync/probe_max_abs_diff"] < 1e-3
        assert line["train/ratio_min"] == pytest.approx(1.0, abs=1e-3)
        assert line["train/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert line["rollout/possible_tokens_max"] <= 10
        assert line["staleness/max"] == 0
        assert 0 < line["reward/mean"] <= 1
        assert line["offload/bytes"] > 0
    moved = [row for row in run.rows("switches.jsonl") if row.get("worker") == "actor_infer-0" and row.get("after")]
    assert {row["after"]["allocated"] == 0 for row in moved} == {True, False}, "the server's memory left, and came back"
