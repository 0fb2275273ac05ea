"""One workload on both sides: choose the settings of each, then measure TRL and RLJob in turn."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.measure import ChildFailedError, ChildUse, run_child
from bench.trl import rljob_side
from bench.trl.workload import Prepared

STEP_MARK = "step done: "
"""As in ``trl_side``, which is not imported here: it loads torch and TRL."""
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
TUNE_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 900.0
OnStep = Callable[[str, int], None]
"""Called with what runs and how many of its steps are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the settings of both sides are chosen for a workload."""

    own: Sequence[tuple[int, int, int]]
    """What RLJob is tried with: threads of the trainer, engines, threads of each; one alone is taken as it is."""
    candidates: Sequence[dict[str, Any]]
    """What TRL is tried with."""
    steps: int
    """The first one is left out of the mean."""
    prompts_per_step: int | None = None
    """Smaller batches where whole ones take too long; the settings hold for whole ones too."""


def tune(prepared: Prepared, tuning: Tuning, folder: Path, on_step: OnStep) -> list[dict[str, Any]]:
    """Seconds per step under every candidate, fastest first; those that failed or were too slow carry ``error``."""
    manifest = yaml.safe_load(prepared.job_file.read_text())
    if tuning.prompts_per_step is not None:
        manifest["spec"]["rollout"]["promptsPerStep"] = tuning.prompts_per_step
    job_file = prepared.job_file.with_name("tune.yaml")
    job_file.write_text(yaml.safe_dump(manifest, sort_keys=False))
    results = []
    for number, settings in enumerate(tuning.candidates, start=1):
        what = f"choosing TRL's settings {number}/{len(tuning.candidates)}"
        try:
            report = lambda n, w=what: on_step(w, n)  # noqa: E731 - binds the text of this candidate
            _, outcome = run_trl(job_file, prepared.prompts_file, settings, tuning.steps, folder, TUNE_TIMEOUT_S, report)
            results.append({**settings, "step_s": statistics.fmean(outcome["step_s"][1:])})
        except ChildFailedError as error:
            results.append({**settings, "error": str(error).strip().splitlines()[-1][:300]})
    return sorted(results, key=lambda r: r.get("step_s", float("inf")))


def tune_rljob(prepared: Prepared, tuning: Tuning, folder: Path, on_step: OnStep) -> list[dict[str, Any]]:
    """Seconds per step under each of ``own``, fastest first; the first few steps, while caches fill, are left out of the mean."""
    if len(tuning.own) == 1:
        return [{"own": list(tuning.own[0])}]
    results = []
    warmup = prepared.workload.warmup_steps
    for number, own in enumerate(tuning.own, start=1):
        what = f"choosing RLJob's settings {number}/{len(tuning.own)}"
        report = lambda n, w=what: on_step(w, n)  # noqa: E731 - binds the text of this candidate
        job_file = with_own(prepared.job_file, own, steps=warmup + tuning.steps)
        _, outcome = rljob_side.run(job_file, folder / "tune", folder / "rljob-tune.log", RUN_TIMEOUT_S, report)
        results.append({"own": list(own), "step_s": statistics.fmean(outcome["step_s"][warmup:])})
    return sorted(results, key=lambda r: r["step_s"])


def with_own(job_file: Path, own: Sequence[int], *, steps: int | None = None) -> Path:
    """A copy of the manifest with these threads of the trainer, engines and threads of each, and ``steps``; each engine has a device."""
    manifest = yaml.safe_load(job_file.read_text())
    spec = manifest["spec"]
    trainer_threads, engines, engine_threads = own
    for component in spec["components"]:
        if component["role"] == "Trainer":
            component["threadsPerWorker"] = trainer_threads
        if component["role"] == "Rollout":
            component["threadsPerWorker"] = engine_threads
            component["placement"] = {"ranks": "1" if engines == 1 else f"1-{engines}"}
    spec["nodeGroups"][0]["devicesPerNode"] = 1 + engines
    if steps is not None:
        spec["training"]["steps"] = steps
    copied = job_file.with_name(f"job-{'-'.join(map(str, own))}.yaml")
    copied.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return copied


def run_trl(
    job_file: Path, prompts_file: Path, settings: dict[str, Any], steps: int, folder: Path, timeout_s: float, on_step: Callable[[int], None]
) -> tuple[ChildUse, dict[str, Any]]:
    """One process of TRL; returns what it took and what it measured."""
    task_file, out_file, log_file = folder / "trl-task.json", folder / "trl-out.json", folder / "trl.log"
    task = {
        "job_file": str(job_file),
        "prompts_file": str(prompts_file),
        "settings": settings,
        "steps": steps,
        "out_folder": str(folder / "trl-output"),
    }
    task_file.write_text(json.dumps(task))
    use = run_child(
        [sys.executable, "-m", "bench.trl.trl_side", str(task_file), str(out_file)],
        log_file=log_file,
        timeout_s=timeout_s,
        env={"OMP_NUM_THREADS": str(settings["threads"]), **QUIET},
        watch=lambda: on_step(log_file.read_text(errors="replace").count(STEP_MARK)),
    )
    return use, json.loads(out_file.read_text())


def measure(
    prepared: Prepared, settings: dict[str, Any], own: Sequence[int], repeats: int, folder: Path, on_step: OnStep
) -> list[dict[str, Any]]:
    """TRL, RLJob, TRL, RLJob and so on; one entry per run."""
    runs = []
    own_job = with_own(prepared.job_file, own)
    for repeat in range(1, repeats + 1):
        for side in ("TRL", "RLJob"):
            what = f"{side}, run {repeat}/{repeats}"
            report = lambda n, w=what: on_step(w, n)  # noqa: E731 - binds the text of this run
            if side == "TRL":
                job, prompts = prepared.job_file, prepared.prompts_file
                use, outcome = run_trl(job, prompts, settings, prepared.total_steps, folder, RUN_TIMEOUT_S, report)
            else:
                use, outcome = rljob_side.run(own_job, folder / "run", folder / "rljob.log", RUN_TIMEOUT_S, report)
            runs.append({"side": side, "repeat": repeat} | _figures(outcome, prepared.workload.warmup_steps, use))
    return runs


def _figures(outcome: dict[str, Any], warmup_steps: int, use: ChildUse) -> dict[str, Any]:
    """Figures of one run; its first ``warmup_steps`` are left out of times, not of lengths."""
    step_s = outcome["step_s"][warmup_steps:]
    total_s = sum(step_s)
    parts = {
        name: sum(outcome[f"{name}_s"][warmup_steps:]) / len(step_s)
        for name in ("generate", "reward", "train", "sync")
        if f"{name}_s" in outcome
    }
    lengths = [n for step in outcome["lengths"] for n in step]
    return {
        "updates_per_s": len(step_s) / total_s,
        "steps": len(step_s),
        "step_mean_s": total_s / len(step_s),
        "step_median_s": statistics.median(step_s),
        "parts_mean_s": parts | {"rest": total_s / len(step_s) - sum(parts.values())},
        "reward_first": outcome["reward_mean"][0],
        "reward_last": statistics.fmean(outcome["reward_mean"][-5:]),
        "lengths": describe_lengths(lengths) if lengths else {"mean": statistics.fmean(outcome["mean_tokens"])},
        "length_counts": dict(sorted(Counter(lengths).items())),
        "wall_s": use.wall_s,
        "peak_rss_bytes": use.peak_rss_bytes,
        "foreign_load": use.foreign_load,
    }


def describe_lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Mean with its standard error, quantiles and extremes of response lengths in tokens."""
    values = np.asarray(lengths, dtype=np.float64)
    return {
        "count": len(values),
        "mean": float(values.mean()),
        "mean_error": float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0,
        "min": float(values.min()),
        "max": float(values.max()),
        **{f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)},
    }


def _pooled(runs: Sequence[dict[str, Any]]) -> Counter[int]:
    return sum((Counter(r["length_counts"]) for r in runs), Counter())


def length_distance(one: Counter[int], other: Counter[int]) -> dict[str, float]:
    """Largest difference of two distribution functions, and what chance alone exceeds in 5 % of cases (Kolmogorov-Smirnov).

    The bound is for independent samples of unknown origin. Here both sides answer the same prompts, which makes chance differences smaller.
    """
    n, m = one.total(), other.total()
    below_one = below_other = largest = 0.0
    for length in sorted(one.keys() | other.keys()):
        below_one += one[length] / n
        below_other += other[length] / m
        largest = max(largest, abs(below_one - below_other))
    return {"largest_difference": largest, "chance_5_percent": 1.358 * ((n + m) / (n * m)) ** 0.5}


def summarize(prepared: Prepared, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repetitions, and the median over pairs of the ratio of RLJob to TRL."""
    by_side = {side: [r for r in runs if r["side"] == side] for side in ("TRL", "RLJob")}
    medians = {side: statistics.median(r["updates_per_s"] for r in found) for side, found in by_side.items()}
    pairs = [b["updates_per_s"] / a["updates_per_s"] for a, b in zip(by_side["TRL"], by_side["RLJob"], strict=True)]
    lengths = {side: _pooled(found) for side, found in by_side.items()}
    return {
        "lengths_differ_by": length_distance(lengths["TRL"], lengths["RLJob"]) if all(lengths.values()) else None,
        "updates_per_s": medians,
        "ratio": statistics.median(pairs),
        "ratio_lowest": min(pairs),
        "ratio_highest": max(pairs),
        "aim": prepared.workload.aim,
        "reached": min(pairs) >= prepared.workload.aim,
        "pairs": pairs,
    }
