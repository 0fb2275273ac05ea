"""``rljob sweep``: every point checked first, run one after the other, resumed and skipped; or written for a queue and applied."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from rljob_runtime.commands import sweep as command
from rljob_runtime.commands import sweep_file
from rljob_runtime.commands.cli import app
from rljob_runtime.commands.sweep import MODES, State, failures, run_local
from rljob_runtime.errors import Interrupted, SetupError
from rljob_runtime.report.metrics import table_of
from rljob_runtime.report.summary import RunStatus, save_summary, summarize
from tests.layout.tree import ROOT

MATRIX = "spec.training.learningRate: [1e-4, 4e-4]\n  spec.seed: [0, 1]"


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    job = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    job["spec"]["storage"] = {"claimName": "data", "mountPath": "/data"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))

    def write(text: str) -> Path:
        (tmp_path / "sweep.yaml").write_text(text)
        return tmp_path / "sweep.yaml"

    return write


def read(path: Path, queue: str | None = None) -> sweep_file.Sweep:
    return sweep_file.read(path, shape_of=lambda spec: None, config_of=lambda spec: None, queue=queue)


def test_points_are_all_combinations_with_names_that_stay(written: Callable[[str], Path]) -> None:
    found = read(written(f"job: job.yaml\nmatrix:\n  {MATRIX}\nexclude: [{{spec.seed: 1, spec.training.learningRate: 1e-4}}]"))
    assert [p.words for p in found.points] == ["learningRate 0.0001, seed 0", "learningRate 0.0004, seed 0", "learningRate 0.0004, seed 1"]
    assert [c.job.spec.training.learning_rate for c in found.checked] == [1e-4, 4e-4, 4e-4]
    assert [c.job.metadata.name for c in found.checked] == [p.name for p in found.points]
    more = read(written("job: job.yaml\nmatrix:\n  spec.training.learningRate: [4e-4, 1e-3]\n  spec.seed: [1, 0, 2]"))
    assert {p.name for p in found.points[1:]} < {p.name for p in more.points}


def test_paths_reach_entries_of_lists_and_fields_that_are_not_there_yet(written: Callable[[str], Path]) -> None:
    engine = "spec.components[actor_infer].engine.maxRunningRequests: [8]"
    found = read(written(f"job: job.yaml\nmatrix:\n  {engine}\n  spec.overlap.asyncGenerationRatio: [1]"))
    (job,) = found.checked
    assert job.job.spec.overlap.async_generation_ratio == 1
    assert job.job.spec.components[1].engine is not None
    assert job.job.spec.components[1].engine.max_running_requests == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: RLJob", ["is a job, and a sweep names one; write a file with job: and matrix:"]),
        ("matricks: {}", ["matricks: is not a key of a sweep", "matrix: is not a mapping"]),
        (
            "matrix: {spec.seed: 3, metadata.name: [a], spec.training.steps: []}",
            ["matrix.spec.seed: 3", "matrix.metadata.name", "matrix.spec.training.steps"],
        ),
        ("matrix: {spec.seed: [1, 1]}", ["has a value twice"]),
        (
            "matrix: {spec.seed: [1]}\nexclude: [{spec.sed: 1}, {spec.seed: 2}]",
            ["exclude[0].spec.sed", "exclude[1].spec.seed: 2: is not a value of"],
        ),
        ("matrix: {spec.seed: [1]}\nexclude: [{spec.seed: 1}]", ["leaves no point"]),
        (
            "matrix: {'spec.components[actor_inver].env': [1], 'spec.components.x': [1]}",
            ["no entry called actor_inver; did you mean", "components is a list"],
        ),
    ],
)
def test_problems_of_the_file_come_at_once(written: Callable[[str], Path], text: str, words: list[str]) -> None:
    with pytest.raises(SpecInvalidError) as caught:
        read(written(f"job: job.yaml\n{text}"))
    reported = "\n".join(map(str, caught.value.errors))
    assert all(word in reported for word in words), reported


def test_problems_of_all_points_come_at_once_before_anything_is_written(written: Callable[[str], Path], tmp_path: Path) -> None:
    path = written("job: job.yaml\nmatrix:\n  spec.training.learningRate: [-1, 4e-4]\n  spec.training.stebs: [1, 2]")
    done = CliRunner().invoke(app, ["sweep", str(path), "--run-dir", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert done.output.count("stebs") <= 2, "a problem of all points is reported once"
    assert "learningRate" in done.output
    assert "learningRate -1, stebs 1) and 1 more" in done.output
    assert not (tmp_path / "out").exists()


def finished(folder: Path, manifest: str, status: RunStatus) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".rljob-run").touch()
    job = check(manifest).job.model_dump(mode="json", by_alias=True, exclude_none=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(job))
    (folder / "metrics.jsonl").touch()
    summary = summarize(
        table_of([]), job_name="x", status=status, failure=None, total_steps=1, total_s=1.0, startup_s=0.1, seed=0, packages={}
    )
    save_summary(folder / "summary.json", summary)


def test_a_sweep_goes_on_where_it_was_interrupted_and_skips_what_is_finished(written: Callable[[str], Path], tmp_path: Path) -> None:
    found, root = read(written(f"job: job.yaml\nmatrix:\n  {MATRIX}")), tmp_path / "out"
    started: list[tuple[str, str]] = []
    codes = iter([0, 3, 130])

    def start(job_file: Path, folder: Path, mode: str, manifest: str) -> int:
        assert job_file == tmp_path / "job.yaml"
        started.append((folder.name, mode))
        code = next(codes, 0)
        finished(folder, manifest, {0: RunStatus.SUCCEEDED, 3: RunStatus.FAILED}.get(code, RunStatus.INTERRUPTED))
        if code == 130:
            (folder / "checkpoints" / "step-000001").mkdir(parents=True)
            (folder / "checkpoints" / "step-000001" / "COMPLETE").touch()
        return code

    with pytest.raises(Interrupted, match=r"interrupted at point .* \(3 of 4\); the same command continues"):
        run_local(found, root, start, lambda *reported: None)
    names = [p.name for p in found.points]
    assert started == [(names[0], "new"), (names[1], "new"), (names[2], "new")]
    assert json.loads((root / "points.json").read_text())[names[3]] == {"spec.training.learningRate": 4e-4, "spec.seed": 1}
    started.clear()
    ended = run_local(found, root, start, lambda *reported: None)
    assert started == [(names[1], MODES[State.UNFINISHED]), (names[2], MODES[State.RESUMABLE]), (names[3], "new")]
    assert [(one.code, one.skipped) for one in ended] == [(0, True), (0, False), (0, False), (0, False)]
    assert failures(ended, root) is None
    other = yaml.safe_load((root / names[0] / "spec.yaml").read_text())
    other["spec"]["training"]["steps"] = 7
    (root / names[0] / "spec.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(SetupError, match=r"holds a run of another job \(spec.training.steps is 7 there and 200 in the sweep\)"):
        run_local(found, root, start, lambda *reported: None)


def test_a_failed_point_is_reported_with_its_log(written: Callable[[str], Path], tmp_path: Path) -> None:
    found = read(written("job: job.yaml\nmatrix: {spec.seed: [4]}"))
    ended = run_local(found, tmp_path / "out", lambda *call: 3, lambda *reported: None)
    error = failures(ended, tmp_path / "out")
    assert error is not None
    assert f"1 of 1 points failed; the same command runs them again:\n  {found.points[0].name} (seed 4): exit code 3;" in str(error)


def test_manifests_wait_in_a_queue_and_kubectl_applies_them(
    written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = written(f"job: job.yaml\nmatrix:\n  {MATRIX}"), tmp_path / "manifests"
    assert "names none: give --queue NAME" in CliRunner().invoke(app, ["sweep", str(path), "--manifests", str(out)]).output
    assert "add --manifests" in CliRunner().invoke(app, ["sweep", str(path), "--apply"]).output
    fake = tmp_path / "bin" / "kubectl"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\necho applied\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    done = CliRunner().invoke(app, ["sweep", str(path), "--manifests", str(out), "--queue", "night", "--apply", "-n", "team"])
    assert done.exit_code == 0, done.output
    files = sorted(out.glob("*.yaml"))
    assert len(files) == 4
    for file in files:
        job = check(file.read_text()).job
        assert (job.spec.queue and job.spec.queue.name, job.metadata.name) == ("night", file.stem)
    said = (tmp_path / "said").read_text()
    assert said.startswith("--namespace team apply --filename")
    assert all(str(file) in said for file in files)
    assert f"rljob compare /data/team/{files[0].stem}" in done.output or "/data/team/" in done.output
    fake.write_text("#!/bin/sh\necho no rights >&2\nexit 1\n")
    refused = CliRunner().invoke(app, ["sweep", str(path), "--manifests", str(out), "--queue", "night", "--apply"])
    assert (refused.exit_code, "kubectl apply: no rights" in refused.output) == (2, True)


def test_a_point_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    seen: list[Path] = []
    start = command.child_process(tmp_path / "logs", seen.append)
    code = start(tmp_path / "job.yaml", tmp_path / "point", "new", "kind: Nothing\n")
    assert code == 2, (tmp_path / "logs" / "point.log").read_text()
    assert "RLJob" in (tmp_path / "logs" / "point.log").read_text()


def test_a_dry_run_lists_and_starts_nothing(written: Callable[[str], Path], tmp_path: Path) -> None:
    path = written(f"job: job.yaml\nmatrix:\n  {MATRIX}\n  spec.components[actor_infer].threadsPerWorker: [1]")
    done = CliRunner().invoke(app, ["sweep", str(path), "--dry-run", "--run-dir", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.output.count("quickstart-") == 4
    assert "components[actor_infer]." in done.output
    assert not (tmp_path / "out").exists()
