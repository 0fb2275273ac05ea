"""``tools/gpu-check``: run the checks; print and write each line as it comes."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.checks import CHECKS, Check, chosen, run
from bench.gpu_check.ending import CutOffError, limited
from bench.gpu_check.lines import Verdict, exit_code
from bench.gpu_check.report import Report
from bench.gpu_check.scale import Scale, here
from bench.gpu_check.terminal import markdown, say, screen

AT_CPU_SIZE = (
    "No CUDA device: every line runs at CPU size, so that the code is exercised. Nothing here says what a GPU does; lines of speed have no "
    "bound, and PASS means that the line ran and that its bytes are right."
)
EPILOG = "Exit codes: 0 nothing failed, 1 a line failed or nothing was measured, 2 the arguments are wrong, 130 and 143 ended by a signal."
GPU_MINUTES = 8.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = parse(argv)
    started = time.monotonic()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=arguments.folder) as folder:
        scale = here(Path(folder))
        found = facts(scale)
        say(f"{found['device']}, torch {found['torch']}")
        if not scale.on_cuda:
            say(AT_CPU_SIZE)
        wanted = chosen(arguments.only)
        minutes = arguments.minutes or (GPU_MINUTES if scale.on_cuda else math.inf)
        with screen(len(wanted), sys.stdout, sys.stderr) as shown:
            report = Report(found, arguments.json, shown)
            ended = measured(wanted, scale, report, started + 60 * minutes)
    counts = {verdict: sum(line.verdict is verdict for line in report.lines) for verdict in Verdict}
    say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f" in {report.seconds:.0f} s")
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{found['device']}, torch {found['torch']}\n\n{markdown(report.lines)}", encoding="utf-8")
    return exit_code(report.lines) if ended is None else ended


def measured(wanted: Sequence[Check], scale: Scale, report: Report, ends_s: float) -> int | None:
    """Run checks one after another, and report what comes until ``ends_s`` of the monotonic clock.

    Returns:
        The exit code where a signal ended it, otherwise None.
    """
    scale = replace(scale, begin=report.stage)
    left = [check.name for check in wanted]
    try:
        with limited(ends_s - time.monotonic(), "--minutes"):
            for check in wanted:
                report.begin(left.pop(0))
                with closing(run(check, scale, ends_s, is_last=not left)) as lines:
                    for line in lines:
                        report.add(line)
            report.end()
    except CutOffError as error:
        report.cut_off(str(error), left)
        return error.exit_code
    return None


def facts(scale: Scale) -> dict[str, Any]:
    """What a reader needs to place the figures."""
    properties = torch.cuda.get_device_properties(scale.device) if scale.on_cuda else None
    return {
        "device": properties.name if properties is not None else f"CPU ({platform.machine()})",
        "cpu_size": not scale.on_cuda,
        "device_bytes": properties.total_memory if properties is not None else None,
        "devices": torch.cuda.device_count() if scale.on_cuda else 0,
        "driver_load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(prog="tools/gpu-check", description=__doc__, epilog=EPILOG)
    names = ", ".join(check.name for check in CHECKS)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=f"one check, can be repeated: {names}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value, limit and bound as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table for an issue or a page")
    minutes = "checks that would take longer are skipped, except the last, and one that does is cut off "
    minutes += f"(default: {GPU_MINUTES:g}; without a GPU no limit)"
    parser.add_argument("--minutes", type=float, help=minutes)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for models and a checkpoint, meanwhile (default: TMPDIR)")
    arguments = parser.parse_args(argv)
    try:
        chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.folder is not None and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: no such folder; name one with some 20 GB of free space")
    for option in ("json", "markdown"):
        file = getattr(arguments, option)
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"--{option} {file}: its folder does not exist; make it, or name another file")
    if arguments.minutes is not None and not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: must be above 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
