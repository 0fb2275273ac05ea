"""The bench of the frozen lake: its jobs, what counts as having learned, its table and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench.lake import curves, jobs, report
from bench.lake.curves import Run
from rljob_api.validation import check


def folder(path: Path, success: list[float], validated: dict[int, float]) -> Path:
    """What a run leaves, as far as the bench reads it."""
    rows = [{"step": step, "episode/success": value, "episode/turns_mean": 4.0} for step, value in enumerate(success, 1)]
    for step, value in validated.items():
        rows[step - 1] |= {"validation/pass_rate": value, "validation/version": step - 1}
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "summary.json").write_text(json.dumps({"training_s": 61.2}))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    left = folder(tmp_path / "run", [0.25] * 5 + [0.4] * 5 + [0.7] * 10, {1: 0.2, 20: 0.65})
    return curves.read(left, job="GiGPO", seed=3)


@pytest.mark.parametrize("job", jobs.JOBS)
def test_each_job_is_valid(job: str):
    spec = check(yaml.safe_dump(jobs.manifest(job, 5, Path("models/tiny-lake")))).job.spec
    assert (spec.algorithm.advantage.estimator, spec.seed) == (job if job in jobs.ALGORITHMS else "GRPO", 5)


def test_jobs_are_distinguished():
    assert len({jobs.fingerprint(job) for job in jobs.JOBS}) == len(jobs.JOBS)


def test_a_run_is_read_back_from_its_row(run: Run):
    assert curves.Run.of_row(json.loads(json.dumps(run.row()))) == run


def test_first_and_last_steps_are_compared(run: Run):
    assert (run.first, run.last, run.validations) == (pytest.approx(0.25), pytest.approx(0.7), [(0, 0.2), (19, 0.65)])
    assert run.learned
    assert curves.headline([run]) == (
        "1 of 1 runs learn: success from 0.25 in the first 5 steps to 0.70 (GiGPO) in the last 10, within 61 s"
    )


@pytest.mark.parametrize(("last", "learned"), [(0.56, True), (0.54, False)])
def test_a_run_has_learned_that_rises_by_three_tenths(tmp_path: Path, last: float, *, learned: bool):
    assert curves.read(folder(tmp_path / "run", [0.25] * 5 + [last] * 10, {}), job="GRPO", seed=0).learned is learned


def test_table_and_picture(run: Run, tmp_path: Path):
    text = report.markdown([run], {"versions": {"ray": "2"}, "measured_at": "now", "cores": 2, "processor": "cpu"})
    assert "| GiGPO | 3 | 20 | 0.250 | 0.700 | 0.200, 0.650 | 4.0 to 4.0 | 3.06 | 61 s |" in text
    report.draw([run], tmp_path / "lake.png")
    assert (tmp_path / "lake.png").read_bytes().startswith(b"\x89PNG")
