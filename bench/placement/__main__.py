"""``python -m bench.placement``: plans per second and growth; writes ``bench/results/placement.json``, ``.md`` and ``.svg``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

from rich.console import Console

from bench.measure import ChildFailedError, machine, run_child, write_results
from bench.pairs import PAIRS, ratios
from bench.placement import report
from bench.placement.cases import LAYOUTS, Case, growth_case, recorded
from bench.placement.random_cases import cases as random_cases
from bench.placement.side import SIDES

PACKAGES = ("pydantic", "PyYAML")
SIZES = (8, 64, 512, 4096, 32_768, 100_000)
"""Devices."""
FIT_FROM = 512
"""Devices from which growth is fitted: what a small plan costs is mostly the same for all."""
GROWTH_TIMES = 5
"""A single case needs more runs than thousands of them together."""
SEED = 5
CHILD_TIMEOUT_S = 240.0
"""Of a child, beside the limit of its slowest case."""

Rows = Mapping[str, Case]
"""What one process of one side measured, by name of the case."""


class _Lab:
    """Runs sides in child processes, one after the other."""

    def __init__(self, folder: Path, console: Console, repeat: int, limit_s: float) -> None:
        self._folder = folder
        self._console = console
        self._repeat = repeat
        self._limit_s = limit_s

    def run(self, side: str, cases: Sequence[Case], what: str, times: int = 1) -> dict[str, Any]:
        """Outcomes of one side, each case run ``times`` as often as was asked for."""
        self._console.print(f"{side}: {what}", style="dim", highlight=False)
        given, out = self._folder / "cases.jsonl", self._folder / "out.json"
        given.write_text("".join(json.dumps(case) + "\n" for case in cases))
        options = ["--cases", str(given), "--out", str(out), "--repeat", str(self._repeat * times), "--limit-s", str(self._limit_s)]
        run_child(
            [sys.executable, "-m", "bench.placement.side", side, *options],
            log_file=self._folder / "log.txt",
            timeout_s=CHILD_TIMEOUT_S + self._limit_s,
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def compare(self, cases: Sequence[Case], what: str) -> dict[str, Any]:
        """Both planners on the same cases, in alternating processes."""
        ours: list[Rows] = []
        theirs: list[Rows] = []
        for pair in range(1, PAIRS + 1):
            for side, found in (("conformance", ours), ("rlinf", theirs)):
                found.append({row["name"]: row for row in self.run(side, cases, f"{what}, pair {pair} of {PAIRS}")["cases"]})
        return compared(ours, theirs)

    def growth(self, layout: str, sizes: Sequence[int]) -> dict[str, Any]:
        """One layout at all sizes; a planner that ran past the limit is not asked for larger ones."""
        result: dict[str, Any] = {"layout": layout, "limit_s": self._limit_s, "sides": {}}
        for side in SIDES:
            points: list[Case] = []
            for devices in sizes:
                if points and "seconds" not in points[-1]:
                    break
                case = {"name": str(devices), "devices": devices, "layout": layout} if side == "plan" else growth_case(devices, layout)
                found = self.run(side, [case], f"{layout}, {devices} devices", times=GROWTH_TIMES)
                (row,) = found["cases"]
                points.append({"devices": devices, "base_bytes": found["base_bytes"], **row})
            result["sides"][side] = {"points": points, "exponent": exponent(points)}
        return result


def compared(ours: Sequence[Rows], theirs: Sequence[Rows]) -> dict[str, Any]:
    """Counts, rates in the median of all pairs, and each pair's ratio, over the cases that both sides accept."""
    first, other = ours[0], theirs[0]
    both = [name for name in first if all(rows[name].get("ok") for rows in (*ours, *theirs))]
    result: dict[str, Any] = {
        "cases": len(first),
        "accepted_by_both": len(both),
        "equal_placements": sum(first[name]["digest"] == other[name]["digest"] for name in both),
        "intended_differences": sum(
            first[name]["digest"] != other[name]["digest"] and first[name]["difference"] is not None for name in both
        ),
        "ratios": {},
    }
    for what, rate, key in (("whole", "plans_per_s", "seconds"), ("placement alone", "placements_per_s", "placement_s")):
        own_s, other_s = ([sum(rows[name][key] for name in both) for rows in side] for side in (ours, theirs))
        result[f"rljob_{rate}"] = statistics.median(len(both) / seconds for seconds in own_s)
        result[f"rlinf_{rate}"] = statistics.median(len(both) / seconds for seconds in other_s)
        result["ratios"][what] = ratios(own_s, other_s)
    return result


def exponent(points: Sequence[Case]) -> float | None:
    """Slope of time over devices, both as logarithms: 1 is linear. Least squares over the points from :data:`FIT_FROM` on."""
    from math import log

    known = [(log(point["devices"]), log(point["seconds"])) for point in points if "seconds" in point and point["devices"] >= FIT_FROM]
    return linear_regression(*zip(*known, strict=True)).slope if len(known) > 1 else None


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("--random", type=int, default=2000, help="random cases (default: 2000)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a case in a process, fewer if long; the best counts (default: 3)")
    parser.add_argument("--limit-s", type=float, default=30.0, help="most seconds of one case (default: 30)")
    arguments = parser.parse_args()
    if min(arguments.random, arguments.repeat, arguments.limit_s) < 1:
        parser.error("--random, --repeat and --limit-s must be at least 1")
    console = Console(stderr=True)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        lab = _Lab(Path(folder), console, arguments.repeat, arguments.limit_s)
        try:
            values = {
                "machine": machine(PACKAGES),
                "load_before": load_before,
                "recorded": lab.compare(recorded(), "recorded cases"),
                "random": lab.compare(random_cases(SEED, arguments.random), f"{arguments.random} random cases"),
                "growth": [lab.growth(layout, SIZES) for layout in LAYOUTS],
            }
        except ChildFailedError as error:
            console.print(f"[bold red]failed:[/] {error}", highlight=False)
            return 1
    write_results("placement", values, report.markdown(values))
    report.draw(values)
    console.print("written: bench/results/placement.json, placement.md, placement.svg", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
