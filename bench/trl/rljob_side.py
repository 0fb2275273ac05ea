"""One run of RLJob through its public command, and the reading of what it wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import ChildUse, run_child


def run(job_file: Path, run_dir: Path, log_file: Path, timeout_s: float, on_step: Callable[[int], None]) -> tuple[ChildUse, dict[str, Any]]:
    """``rljob run``; returns what it took and, by step, where the time went and what was generated."""
    metrics_file = run_dir / "metrics.jsonl"
    metrics_file.unlink(missing_ok=True)
    use = run_child(
        [sys.executable, "-m", "rljob_runtime.commands.cli", "run", str(job_file), "--run-dir", str(run_dir), "--overwrite"],
        log_file=log_file,
        timeout_s=timeout_s,
        watch=lambda: on_step(_count_lines(metrics_file)),
    )
    return use, read(run_dir)


def read(run_dir: Path) -> dict[str, Any]:
    """Seconds by step and part of a finished run, and the lengths of those steps whose trajectories were kept."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] if "metrics" in row else row for row in rows]
    return {
        "step_s": [m["time/step_s"] for m in steps],
        "generate_s": [m["time/generate_s"] for m in steps],
        "reward_s": [m["time/reward_s"] for m in steps],
        "train_s": [m["time/train_s"] for m in steps],
        "sync_s": [m["time/sync_s"] for m in steps],
        "reward_mean": [m["reward/mean"] for m in steps],
        "mean_tokens": [m["response/mean_tokens"] for m in steps],
        "lengths": _lengths(run_dir, len(steps)),
    }


def _lengths(run_dir: Path, num_steps: int) -> list[list[int]]:
    """Response tokens of all samples, one list a step; empty where not every step's trajectories were kept."""
    files = sorted((run_dir / "trajectories").glob("step-*.jsonl"))
    if len(files) != num_steps:
        return []
    return [[int(json.loads(line)["response_tokens"]) for line in file.read_text().splitlines()] for file in files]


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
