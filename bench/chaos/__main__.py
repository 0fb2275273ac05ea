"""``python -m bench.chaos``: a thousand faults at random moments; writes ``bench/results/chaos.{json,md}``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.chaos import cluster, lives, loop, operator_faults, processes, report
from bench.chaos.outcome import WRONG, Outcome, table
from bench.measure import RESULTS, machine, write_results

PACKAGES = ("ray", "torch", "kopf", "aiohttp")
LAYERS = {"loop": loop.KINDS, "operator": operator_faults.KINDS, "processes": processes.KINDS, "cluster": cluster.KINDS}
TITLES = {"loop": loop.LAYER, "operator": lives.LAYER, "processes": processes.LAYER, "cluster": cluster.LAYER}
MAX_SHOWN, MAX_TEXT = 10, 2000
"""Faults that went wrong whose details the result keeps, and characters of each."""
WITHOUT_ROOT = ("loop", "operator", "processes")
SHARES = {"loop": 0.75, "operator": 0.23, "processes": 0.02, "cluster": 0.02}
"""Shares of the faults: what one costs differs by a factor of a hundred."""


def main() -> int:
    """Every layer in turn; the exit code is 1 where a fault ended otherwise than it should."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is stopped
    console = Console(stderr=True)
    layers: dict[str, Any] = {}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    wrong = 0
    with bar:
        for layer in arguments.layers:
            count = arguments.faults if len(arguments.layers) == 1 else max(1, round(SHARES[layer] * arguments.faults))
            task, began_s = bar.add_task(layer, total=count), time.monotonic()
            found = _run(layer, count, arguments, lambda done, task=task: bar.update(task, completed=done))  # type: ignore[misc]
            bar.update(task, completed=count)
            layers[layer] = _summary(layer, found, arguments.seed, time.monotonic() - began_s)
            wrong += sum(outcome.result == WRONG for outcome in found)
    file = RESULTS / "chaos.json"
    kept = json.loads(file.read_text())["layers"] if file.is_file() and not arguments.dry else {}
    values: dict[str, Any] = {"machine": machine(PACKAGES), "layers": kept | layers}
    values["headline"] = report.headline(values)
    if not arguments.dry:
        write_results("chaos", values, report.markdown(values))
    console.print(report.markdown(values), markup=False)
    return 1 if wrong else 0


def _summary(layer: str, found: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    wrong = [f"{outcome.kind}: {outcome.detail}"[:MAX_TEXT] for outcome in found if outcome.result == WRONG]
    return {
        "title": TITLES[layer], "seed": seed, "seconds": seconds, "load": os.getloadavg()[1], "table": table(found),
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "wrong": wrong[:MAX_SHOWN],
    }  # fmt: skip


def _run(layer: str, count: int, arguments: argparse.Namespace, say: loop.Say) -> list[Outcome]:
    if layer == "loop":
        return asyncio.run(loop.run(arguments.seed, count, arguments.only, say))
    if layer == "operator":
        return asyncio.run(operator_faults.run(arguments.seed, count, arguments.only, say))
    if layer == "cluster":
        return asyncio.run(cluster.run(arguments.seed, count, arguments.only, say))
    with tempfile.TemporaryDirectory(prefix="bench-chaos-", ignore_cleanup_errors=True) as folder:
        return processes.run(arguments.seed, count, arguments.only, say, Path(folder))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=1100, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments (default: %(default)s)")
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=list(LAYERS),
        default=list(WITHOUT_ROOT),
        help="default: all that need no root, which are all but cluster; results of the others are kept",
    )
    parser.add_argument("--only", metavar="KIND", help="one kind of fault, such as 'driver killed'; picks the layer, and implies --dry")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    if arguments.faults < 1:
        parser.error(f"--faults is {arguments.faults}; it must be at least 1")
    if arguments.only is not None:
        arguments.dry = True  # one row is not the layer's table
        arguments.layers = [layer for layer, kinds in LAYERS.items() if arguments.only in kinds][:1]
        if not arguments.layers:
            known = sorted({kind for kinds in LAYERS.values() for kind in kinds})
            parser.error(f"--only {arguments.only!r} is no kind of fault; the kinds are {', '.join(known)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
