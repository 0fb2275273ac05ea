"""``rljob compare`` on run folders, as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner

from rljob_runtime.commands.cli import app
from rljob_runtime.report.jsonl import dump_row
from tests.support.report_fakes import make_record


def make_run(folder: Path, *, seed: int = 0, rate: float = 1e-4, gain: float = 0.0, steps: int = 15) -> Path:
    folder.mkdir(parents=True)
    (folder / ".rljob-run").touch()
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": folder.name}}
    manifest["spec"] = {"seed": seed, "training": {"learningRate": rate, "steps": steps}}  # type: ignore[assignment]
    (folder / "spec.yaml").write_text(yaml.safe_dump(manifest))
    rows = []
    for step in range(1, steps + 1):
        record = make_record(step)
        metrics = {**record.metrics, "reward/mean": record.metrics["reward/mean"] + gain + 0.01 * seed}
        rows.append(dump_row({"step": step, "version": step, "wall_s": 0.1 * step, **metrics}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_tables_page_and_json(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"r{rate}-{seed}", seed=seed, rate=rate, gain=rate * 500) for rate in (1e-4, 4e-4) for seed in (0, 1)]
    words = [str(run) for run in runs]
    done = CliRunner().invoke(app, ["compare", *words, "--html", str(tmp_path / "out.html")], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "learningRate 0.0004" in done.output
    assert "spec.training.learningRate" in done.output
    assert "Holm" in done.output
    page = (tmp_path / "out.html").read_text()
    assert page.count('<section class="card">') == 7, "reward, length, gradient, mismatch, speed, time of a step, reward over time"
    assert "<script src" not in page
    assert "https://cdn" not in page.split("</script>", 1)[1]
    found = json.loads(CliRunner().invoke(app, ["compare", *words, "--json"]).output)
    assert [len(v["runs"]) for v in found["variants"]] == [2, 2]
    assert found["measures"][0]["variants"][1]["difference"]["mean"] > 0.1


def test_what_is_no_run_or_named_twice_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    for arguments, words in (
        ([str(run), str(tmp_path / "none")], "is not a run folder"),
        ([str(run), str(run)], "named more than once"),
        ([str(run), "--html", str(tmp_path / "no" / "x.html")], "cannot"),
    ):
        done = CliRunner().invoke(app, ["compare", *arguments])
        assert done.exit_code == 2, done.output
        assert words in done.output


def test_text_of_users_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>bold")
    assert CliRunner().invoke(app, ["compare", str(run), "--html", str(tmp_path / "out.html")]).exit_code == 0
    assert "<b>bold" not in (tmp_path / "out.html").read_text().split("</script>", 1)[1]
