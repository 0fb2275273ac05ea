"""``python -m bench.recovery``: what a lost process costs a real job, beside a full restart; ``results/recovery.{json,md}``."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.chaos.outcome import RECOVERED, WRONG, Outcome, quantiles
from bench.chaos.processes import ChaoticRun
from bench.measure import machine, write_results
from bench.pairs import ratios, spread
from tests.integration.jobs import untrained_model

PACKAGES = ("ray", "torch")
KINDS = {
    "engine killed": "an engine",
    "reward worker killed": "a reward worker",
    "trainer killed": "one of two trainer ranks",
    "driver sent SIGTERM": "the head's pod is evicted: SIGTERM to the driver, and it starts again",
    "driver killed": "the driver, and it starts again",
    "everything killed": "everything: a full restart",
}
"""Fault -> what is lost."""
FULL = "everything killed"
STEPS = 2
"""Trained after a fault: responses of the first one may be there already, those of the second one are generated and trained afterwards."""


def main() -> int:
    """One run meets every fault several times; the exit code is 1 where one was not recovered from."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is stopped
    console, found = Console(stderr=True), list[Outcome]()
    order = [kind for _ in range(arguments.repeat) for kind in arguments.only]
    with tempfile.TemporaryDirectory(prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
        model, rng = untrained_model(Path(folder) / "model"), random.Random(arguments.seed)
        run = ChaoticRun(Path(folder) / "run", model, len(order), rng, as_users=True)
        try:
            run.ready()
            for kind in order:
                found.append(run.meet(kind, STEPS))
                console.print(f"{kind}: {found[-1].result}, {found[-1].recovery_s}", markup=False)
                if found[-1].result == WRONG:
                    break
                run.ready()
        finally:
            run.kill()
    values: dict[str, Any] = {"machine": machine(PACKAGES), "load": os.getloadavg()[1], "rows": rows_of(found, len(arguments.only))}
    values["wrong"] = [f"{outcome.kind}: {outcome.detail}" for outcome in found if outcome.result == WRONG]
    values["headline"] = headline(values["rows"])
    write_results("recovery", values, markdown(values))
    console.print(markdown(values), markup=False)
    return 1 if values["wrong"] else 0


def rows_of(found: Sequence[Outcome], kinds: int) -> list[dict[str, Any]]:
    """Figures of each kind of fault; a full restart over it in each round of ``kinds`` faults in which both were recovered from."""
    rounds: dict[str, dict[int, float]] = {}
    for place, outcome in enumerate(found):
        took = rounds.setdefault(outcome.kind, {})
        if outcome.result == RECOVERED and outcome.recovery_s is not None:
            took[place // kinds] = outcome.recovery_s
    whole = rounds.get(FULL, {})
    rows = []
    for kind, took in rounds.items():
        seconds = list(took.values())
        row: dict[str, Any] = {
            "kind": kind,
            "lost": KINDS[kind],
            "times": len(seconds),
            **quantiles(seconds),
            "largest_s": max(seconds, default=None),
        }
        both = [number for number in took if number in whole and kind != FULL]
        row |= {"all_s": seconds, "ratios": ratios([took[number] for number in both], [whole[number] for number in both])}
        rows.append(row)
    return rows


def headline(rows: list[dict[str, Any]]) -> str:
    """One line."""
    p50_s = {row["kind"]: row["p50_s"] for row in rows if row["p50_s"] is not None}
    within = [p50_s[kind] for kind in ("engine killed", "reward worker killed", "trainer killed") if kind in p50_s]
    if not within or FULL not in p50_s:
        return "not all measured"
    whole_s = p50_s[FULL]
    return f"lost workers {min(within):.0f} to {max(within):.0f} s until {STEPS} further steps, a full restart {whole_s:.0f} s"


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    about = values["machine"]
    lines = [
        "# Recovery", "",
        f"Written by `python -m bench.recovery` on {about['measured_at']}; {about['processor']}, {about['cores']} cores, load "
        f"{values['load']:.1f}. A real job on embedded Ray with a tiny model: two trainer ranks, one engine, one reward worker, nothing "
        "generated ahead, a checkpoint every two steps. Seconds from the fault until two steps more are trained: what the first one needs "
        "may be there already. Steps that have to be trained again count as others do; steps themselves take about a second.", "",
        "| lost | times | p50 s | largest s | a full restart in the same round takes, times |",
        "|---|---:|---:|---:|---|",
    ]  # fmt: skip
    for row in values["rows"]:
        if row["p50_s"] is None:
            lines.append(f"| {row['lost']} | 0 | | | |")
            continue
        times = spread(row["ratios"]) if row["ratios"] else ""
        lines.append(f"| {row['lost']} | {row['times']} | {row['p50_s']:.1f} | {row['largest_s']:.1f} | {times} |")
    lines += [
        "",
        "Almost all of a start is imports: of Ray, torch and vLLM, by processes that share two cores. On a cluster, pods that have to be "
        "scheduled and pull images, and models that have to be read, come on top of the last three rows and not of the others; a head "
        "evicted from a real cluster is a test (`e2e/test_disruptions.py`), which measures no time.",
        "", *values["wrong"],
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="of every fault (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND", help="some of the faults")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat is {arguments.repeat}; it must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
