"""``tools/gpu-check``: run the checks, print the table, write the JSON."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.checks import CHECKS, chosen, run
from bench.gpu_check.lines import Verdict, exit_code
from bench.gpu_check.scale import Scale, here
from bench.gpu_check.terminal import markdown, progress, say, table, write_json

AT_CPU_SIZE = (
    "No CUDA device: every line runs at CPU size, so that the code is exercised. Nothing here says what a GPU does; lines of speed have no "
    "bound, and PASS means that the line ran and that its bytes are right."
)
EPILOG = "Exit codes: 0 nothing failed, 1 a line failed, 2 the arguments are wrong."


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = parse(argv)
    started = time.monotonic()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=arguments.folder) as folder:
        scale = here(Path(folder))
        found = facts(scale)
        say(f"{found['device']}, torch {found['torch']}")
        if not scale.on_cuda:
            say(AT_CPU_SIZE)
        wanted = chosen(arguments.only)
        with progress(len(wanted), sys.stderr) as begin:
            for check in wanted:
                begin(check.name)
                lines += list(run(check, scale, started + 60 * arguments.minutes))
                if arguments.json is not None:  # now already: what ends this program later takes nothing of it
                    write_json(arguments.json, {**found, "seconds": time.monotonic() - started}, lines)
    seconds = time.monotonic() - started
    table(lines, sys.stdout)
    counts = {verdict: sum(line.verdict is verdict for line in lines) for verdict in Verdict}
    say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f" in {seconds:.0f} s")
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{found['device']}, torch {found['torch']}\n\n{markdown(lines)}", encoding="utf-8")
    return exit_code(lines)


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
    parser.add_argument("--minutes", type=float, default=8.0, help="checks that would take longer are skipped (default: 8)")
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
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: must be above 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
