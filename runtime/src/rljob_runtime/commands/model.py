"""``rljob model``: makes models with a progress bar. Imports torch only when a model is made."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.tiny import FROZEN_LAKE, TinySize, TinySummary, make_lake_model, make_tiny_model

SIZES = {"small": TinySize.TINY, "fresh": TinySize.FRESH, "mixture": TinySize.MIXTURE, "10m": TinySize.TEN_MILLION}


def make_with_progress(out: Path, *, size: str, seed: int, task: str = "sums") -> int:
    """Make a tiny model in ``out``; returns the exit code after it showed the user how it went.

    Args:
        out: folder to make; one that holds the same model is left as it is.
        size: a key of :data:`SIZES`.
        seed: seed of weights and data.
        task: ``sums``, or ``frozen-lake``, which has one size.
    """
    bar = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        shown = bar.add_task("starting", total=1.0)

        def progress(phase: str, fraction: float) -> None:
            bar.update(shown, description=phase, completed=fraction)

        try:
            if task == FROZEN_LAKE:
                summary = make_lake_model(out, seed=seed, progress=progress)
            else:
                summary = make_tiny_model(out, size=SIZES[size], seed=seed, progress=progress)
        except RuntimeFault as error:
            bar.stop()
            sys.stderr.write(f"{error}\n")
            return ExitCode.FAILED
        except OSError as error:  # making it reads nothing of the user's
            bar.stop()
            sys.stderr.write(f"{out}: cannot be made: {error.strerror or error}; name a folder where this user may write\n")
            return ExitCode.FAILED
    sys.stdout.write(f"{_sentence(summary)}\n")
    return ExitCode.OK


def _sentence(summary: TinySummary) -> str:
    millions = summary.num_parameters / 1e6
    done = "is already there" if summary.reused else f"made in {summary.elapsed_s:.0f} s"
    solved = f", solves {summary.sampled_pass_rate:.0%} of {summary.task} when sampled" if summary.num_measured else ""
    return f"{summary.folder}: {done}, {millions:.1f} million parameters{solved}"
