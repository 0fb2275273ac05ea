"""The measurement of the driver runs with the driver as it is, and its page shows what it found."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.driver.__main__ import merged, pooled
from bench.driver.floor import fill, gaps
from bench.driver.pauses import Clocks
from bench.driver.report import markdown
from bench.measure import machine

ROOT = Path(__file__).resolve().parents[3]


def test_time_that_the_hypervisor_takes_is_no_pause_of_the_driver() -> None:
    began = Clocks(wall_s=1.0, work_s=0.0, process_s=0.0, queued_s=0.0, stolen_s=(5.0, 7.0))
    ended = Clocks(wall_s=1.1, work_s=0.06, process_s=0.09, queued_s=0.0, stolen_s=(5.05, 7.01))
    pause = began.until(ended)
    assert (pause.wall_s, pause.work_s, pause.lock_s, pause.stolen_s) == pytest.approx((0.1, 0.06, 0.03, 0.05))
    assert pause.own_s == pytest.approx(0.04)
    assert replace(pause, stolen_s=1.0).own_s == 0.0


def test_a_small_case_is_measured_and_shown() -> None:
    size = {"prompts": 4, "samples": 2, "tokens": 8, "engines": 2, "trainer_ranks": 2, "reward_workers": 1, "steps": 2}
    command = [sys.executable, "-m", "bench.driver.case", json.dumps(size)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120.0)
    found = json.loads(done.stdout.splitlines()[-1]) | {"foreign_load": 0.5}
    assert len(found["rss_mib_at_step"]) == size["steps"] + 1
    assert found["tokens_per_s"] > 0
    own = found["longest_own_pause"]
    assert 0 < own["work_ms"] <= own["own_ms"] + own["stolen_ms"]
    assert found["longest_pause"]["ms"] >= own["ms"] > 0
    assert found["passes"] >= found["passes_above_50_ms"]
    case = merged([found, found | {"cpu_ns_per_token": 2 * found["cpu_ns_per_token"]}])
    assert (case["passes"], case["cpu_ns_per_token"]) == (2 * found["passes"], found["cpu_ns_per_token"])
    longer = case | {"tokens": 16, "cpu_us_per_response": 2 * case["cpu_us_per_response"]}
    stage = {"stage": "engines pack", "seconds": 1.0, "written_bytes": 10, "copy_s": 0.5}
    ray = {"prompts": 1, "samples": 1, "tokens": 1, "step_tokens": 1, "stages": [stage]}
    earlier = {"what": "Before", "cases": [case]}
    found_gaps = {work: pooled([gaps(time.perf_counter, 0.01), gaps(fill, 0.01)]) for work in ("clock", "memory")}
    assert found_gaps["clock"]["seconds"] == pytest.approx(0.02)
    assert 0 < found_gaps["clock"]["longest_ms"]
    page = markdown({"machine": machine(()), "cases": [case, longer], "floor": found_gaps, "ray": ray, "before": [earlier]})
    assert "| 4 x 2 x 16 |" in page
    assert "## Before" in page
    assert "| engines pack | 0 | 1000.0 | 500.0 | 2.0 |" in page
