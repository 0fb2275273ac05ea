"""``python -m bench.driver``: every case in a process of its own; writes ``bench/results/driver.{json,md}``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import bench.driver
from bench.driver.report import STEM, markdown
from bench.driver.world import Size
from bench.measure import RESULTS, ChildFailedError, machine, run_child, write_results

SIZES = (
    Size(prompts=1024, samples=16, tokens=64, steps=2),
    Size(prompts=1024, samples=16, tokens=64, steps=2, engines=8),
    Size(prompts=1024, samples=16, tokens=64, steps=2, ratio=1.0),
    Size(prompts=1024, samples=16, tokens=1024, steps=1),
    Size(prompts=64, samples=16, tokens=16384, steps=1),
    Size(prompts=256, samples=16, tokens=16384, steps=1),
)
LARGE = Size(prompts=1024, samples=16, tokens=16384, steps=1)
"""268 million tokens."""
LARGE_BYTES = 40 * LARGE.tokens_per_step
"""What it needs: bytes a token at the peak, rounded up."""
LONG = Size(prompts=16, samples=8, tokens=256, engines=4, steps=1000)
TIMEOUT_S = 1800.0
FLOOR_S = 20.0
"""Before each case: what the machine alone does to a program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.driver", description=bench.driver.__doc__)
    parser.add_argument(
        "--before",
        type=Path,
        help="earlier results to stand beside these: a list of {what, cases} (default: those in the present file)",
    )
    parser.add_argument("--repeat", type=int, choices=range(1, 10), default=2, help="runs of each case but the one of 1,000 steps")
    parser.add_argument("--without-long", action="store_true", help="leave out the run of 1,000 steps")
    parser.add_argument("--without-large", action="store_true", help=f"leave out {LARGE.tokens_per_step:,} tokens at once")
    arguments = parser.parse_args(argv)
    sizes = [*SIZES, *([] if arguments.without_large else [LARGE]), *([] if arguments.without_long else [LONG])]
    free_bytes = psutil.virtual_memory().available
    if LARGE in sizes and free_bytes < LARGE_BYTES:
        sys.stderr.write(
            f"{LARGE_BYTES / 2**30:.0f} GiB of memory are needed, {free_bytes / 2**30:.0f} are free; --without-large needs less\n"
        )
        return 2
    try:
        floors, cases = [], []
        for size in sizes:
            floors.append(_child([sys.executable, "-m", "bench.driver.floor", str(FLOOR_S)]))
            cases.append(merged([_measure(size) for _ in range(1 if size == LONG else arguments.repeat)]))
        ray_step = _child([sys.executable, "-m", "bench.driver.ray_step"])
    except ChildFailedError as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    values = {
        "machine": machine(("numpy", "ray")),
        "cases": cases,
        "floor": {work: pooled([found[work] for found in floors]) for work in ("clock", "memory")},
        "ray": ray_step,
        "before": _before(arguments.before),
    }
    values["headline"] = _headline(cases)
    write_results(STEM, values, markdown(values))
    return 0


def _measure(size: Size) -> dict[str, Any]:
    return _child([sys.executable, "-m", "bench.driver.case", json.dumps(asdict(size))])


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs of one case: figures of the one that took the least processor time, for others on the machine only add to it, but all pauses."""
    least = min(runs, key=lambda run: run["cpu_ns_per_token"])
    return least | {
        "runs": len(runs),
        "longest_pause": max((run["longest_pause"] for run in runs), key=lambda pause: pause["ms"]),
        "longest_own_pause": max((run["longest_own_pause"] for run in runs), key=lambda pause: pause["own_ms"]),
        "longest_collection_ms": max(run["longest_collection_ms"] for run in runs),
        **{name: sum(run[name] for run in runs) for name in ("passes", "passes_above_50_ms", "own_passes_above_50_ms")},
    }


def pooled(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gaps of several measurements as those of one."""
    totals = {name: sum(one[name] for one in found) for name in ("seconds", "calls", "above_50_ms")}
    return totals | {"longest_ms": max(one["longest_ms"] for one in found)}


def _child(command: Sequence[str]) -> dict[str, Any]:
    """What a process prints last, and how many other programs wanted a core meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "case.log"
        use = run_child(command, log_file=log, timeout_s=TIMEOUT_S)
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return found | {"foreign_load": use.foreign_load}


def _before(path: Path | None) -> list[dict[str, Any]]:
    """Cases of earlier commits."""
    present = RESULTS / f"{STEM}.json"
    found: list[dict[str, Any]] = []
    if path is not None:
        found = json.loads(path.read_text())
    elif present.is_file():
        found = json.loads(present.read_text())["before"]
    return found


def _headline(cases: Sequence[dict[str, Any]]) -> str:
    shortest, longest = (pick(cases, key=lambda case: case["tokens"]) for pick in (min, max))
    return (
        f"{longest['tokens_per_cpu_s'] / 1e6:.1f} million tokens a second of processor time in responses of {longest['tokens']:,} tokens, "
        f"{shortest['tokens_per_cpu_s'] / 1e6:.1f} million in those of {shortest['tokens']}; "
        f"{longest['bytes_per_token_in_flight']:.0f} bytes a token in flight; "
        f"pauses of its own making up to {max(case['longest_own_pause']['own_ms'] for case in cases):.0f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
