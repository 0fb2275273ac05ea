"""The measurement of the driver runs with the driver as it is, and its page shows what it found."""

import json
import subprocess
import sys
from pathlib import Path

from bench.driver.__main__ import merged
from bench.driver.report import markdown
from bench.measure import machine

ROOT = Path(__file__).resolve().parents[3]


def test_a_small_case_is_measured_and_shown() -> None:
    size = {"prompts": 4, "samples": 2, "tokens": 8, "engines": 2, "trainer_ranks": 2, "reward_workers": 1, "steps": 2}
    command = [sys.executable, "-m", "bench.driver.case", json.dumps(size)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120.0)
    found = json.loads(done.stdout.splitlines()[-1]) | {"foreign_load": 0.5}
    assert len(found["rss_mib_at_step"]) == size["steps"] + 1
    assert found["tokens_per_s"] > 0
    assert 0 < found["longest_own_pause"]["work_ms"] <= found["longest_own_pause"]["own_ms"]
    assert found["longest_pause"]["ms"] >= found["longest_own_pause"]["ms"] > 0
    assert found["passes"] >= found["passes_above_50_ms"]
    case = merged([found, found | {"cpu_ns_per_token": 2 * found["cpu_ns_per_token"]}])
    assert (case["passes"], case["cpu_ns_per_token"]) == (2 * found["passes"], found["cpu_ns_per_token"])
    longer = case | {"tokens": 16, "cpu_us_per_response": 2 * case["cpu_us_per_response"]}
    stage = {"stage": "engines pack", "seconds": 1.0, "written_bytes": 10, "copy_s": 0.5}
    ray = {"prompts": 1, "samples": 1, "tokens": 1, "step_tokens": 1, "stages": [stage]}
    earlier = {"what": "Before", "cases": [case]}
    page = markdown({"machine": machine(()), "cases": [case, longer], "ray": ray, "before": [earlier]})
    assert "| 4 x 2 x 16 |" in page
    assert "## Before" in page
    assert "| engines pack | 0 | 1000.0 | 500.0 | 2.0 |" in page
