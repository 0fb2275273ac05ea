"""``python -m bench.training``: measure, write ``bench/results/training.json`` and ``training.md``, print the markdown."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bench.training
from bench.measure import RESULTS, machine, write_results
from bench.training import memory, speed
from bench.training.report import headline, report

PACKAGES = ("torch", "transformers", "trl")


PARTS = ("speed", "memory")


def main() -> int:
    """Measure, write, and print the markdown; parts that are not asked for stay as they were measured before."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=bench.training.__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="of the sides in turns")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "training.json"
    values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if "speed" in args.parts:
            values["speed"] = _measured(lambda: speed.measure(Path(folder) / "speed", args.rounds, _tell))
        if "memory" in args.parts:
            values["memory"] = _measured(lambda: memory.measure(Path(folder) / "memory", _tell))
    values |= {"headline": headline(values), "machine": values[args.parts[-1]]["machine"]}
    text = report(values)
    write_results("training", values, text)
    sys.stdout.write(text)
    return 0


def _measured(measure: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """Rows, and what a reader needs to place them."""
    where = {"machine": machine(PACKAGES), "commit": _commit(), "load_before": os.getloadavg()[0]}
    return {**where, "rows": measure(), "load_after": os.getloadavg()[0]}


def _tell(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
