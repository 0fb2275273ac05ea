"""``python -m bench.soak``: an hour of training and of the operator; memory over time and a verdict; ``results/soak.{json,md,svg}``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.measure import RESULTS, machine, write_results
from bench.soak import report
from bench.soak.memory import MIB, Memory, read
from bench.soak.subjects import Watched, subject

PACKAGES = ("ray", "torch", "kopf", "aiohttp")
PARTS = ("job", "operator")
SAMPLE_S = 15.0
START_S = 600.0
"""Bound of the time until there is something to sample."""


def main() -> int:
    """Sample every part at the same time, then judge; the exit code is 1 where memory grew or a part ended."""
    arguments = _parse()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    console, found = Console(stderr=True), dict[str, dict[str, Any]]()
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=console)
    with tempfile.TemporaryDirectory(prefix="bench-soak-", ignore_cleanup_errors=True) as folder, bar:
        threads = []
        for part in arguments.only:
            task = bar.add_task(part, total=arguments.minutes * 60)

            def run(part: str = part, task: Any = task) -> None:
                found[part] = _soak(part, Path(folder) / part, arguments, over, lambda **now: bar.update(task, **now))

            threads.append(threading.Thread(target=run))
            threads[-1].start()
        for thread in threads:
            thread.join()
    file = RESULTS / "soak.json"
    stored = json.loads(file.read_text()) if file.is_file() else {"parts": {}}
    values = {"machine": machine(PACKAGES), "parts": stored["parts"] | found}
    values["verdicts"] = report.verdicts(values["parts"])
    values["headline"] = report.headline(values)
    write_results("soak", values, report.markdown(values))
    report.draw(values)
    console.print(report.markdown(values))
    problems = [part["problem"] for part in found.values() if part["problem"]]
    for problem in problems:
        console.print(problem, markup=False)
    return 1 if problems or not all(verdict["flat"] for verdict in values["verdicts"]) else 0


def _soak(part: str, folder: Path, arguments: argparse.Namespace, over: threading.Event, show: Any) -> dict[str, Any]:
    """Samples of one part: name -> rows of [seconds, RSS, PSS, held], the sizes in MiB."""
    samples: dict[str, list[list[float]]] = {}
    now, began_s, first_s = Watched(), time.monotonic(), None
    try:
        with subject(part, folder, arguments.pause_s, arguments.job_every_s) as watched:
            while not over.wait(SAMPLE_S if first_s is not None else 1.0):
                now = watched.look()
                if now.problem or (first_s is None and time.monotonic() - began_s > START_S):
                    now.problem = now.problem or f"{part}: nothing to sample within {START_S:.0f} s"
                    break
                if not now.groups:
                    continue
                first_s = time.monotonic() if first_s is None else first_s
                at_s = time.monotonic() - first_s
                for name, pids in now.groups.items():
                    row = _sum([memory for pid in pids if (memory := read(pid)) is not None])
                    samples.setdefault(name, []).append([round(at_s, 1), *row, now.done])
                show(completed=at_s, description=f"{part}: {now.done} {watched.unit}")
                if at_s >= arguments.minutes * 60:
                    break
    except Exception as error:  # noqa: BLE001 - what was sampled is kept and shown beside the problem
        now.problem = f"{part}: {type(error).__name__}: {error}"
    return {"unit": "steps" if part == "job" else "jobs", "done": now.done, "problem": now.problem, "samples": samples}


def _sum(memories: list[Memory]) -> list[float]:
    return [round(sum(getattr(m, name) for m in memories) / MIB, 2) for name in ("rss_bytes", "pss_bytes", "held_bytes")]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of sampling (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts; the others' results are kept")
    parser.add_argument("--pause-s", type=float, default=0.08, help="of the reward of every response (default: %(default)s)")
    parser.add_argument("--job-every-s", type=float, default=1.0, help="an RLJob for the operator this often (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes}; it must be positive")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
