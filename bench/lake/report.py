"""Table and picture of the runs on the lake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.lake.curves import FIRST_STEPS, LAST_STEPS, Run, by_job, headline

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "frozen-lake.png"
WINDOW_STEPS = 5
"""Success of a step's episodes is noisy; the picture averages over so many."""


def markdown(runs: Sequence[Run], machine: Mapping[str, Any]) -> str:
    """The whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return "\n".join(
        [
            "# Frozen lake over seeds",
            "",
            f"Written by `python -m bench.lake` on {machine['measured_at']}: {machine['cores']} cores of {machine['processor']}, "
            f"{versions}.",
            "`rljob run examples/frozen-lake.yaml` with other seeds and advantage estimators (the file has GRPO), and ROLL's "
            "asynchronous example as `rljob convert` writes it, with sizes for this machine (`bench/lake/converted.py`). Other programs "
            "ran on the same cores.",
            "",
            f"{headline(runs)}.",
            "",
            "![success over steps](../../docs/images/frozen-lake.png)",
            "",
            f"| job | seed | steps | success, steps 1 to {FIRST_STEPS} | last {LAST_STEPS} steps | validation, first and last "
            "| turns | s per step | training |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
            *(_row(run) for run in runs),
            "",
        ]
    )


def _row(run: Run) -> str:
    turns = [value for value in run.metrics["episode/turns_mean"] if value is not None]
    cells = [
        run.job,
        str(run.seed),
        str(len(run.success)),
        f"{run.first:.3f}",
        f"{run.last:.3f}",
        f"{run.validations[0][1]:.3f}, {run.validations[-1][1]:.3f}" if run.validations else "-",
        f"{np.mean(turns[:FIRST_STEPS]):.1f} to {np.mean(turns[-LAST_STEPS:]):.1f}",
        f"{run.training_s / len(run.success):.2f}",
        f"{run.training_s:.0f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def draw(runs: Sequence[Run], file: Path = PICTURE) -> None:
    """Success of each run over its steps, and that on the maps of the validation; a panel a job."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = by_job(runs)
    size = (4.0 * len(panels) + 1.0, 4.0)
    figure, row = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, (job, found) in zip(row[0], panels, strict=True):
        for run in found:
            window = min(WINDOW_STEPS, len(run.success))
            smooth = np.convolve(run.success, np.ones(window) / window, mode="valid")
            (line,) = axes.plot(np.arange(window, len(run.success) + 1) - (window - 1) / 2, smooth, label=f"seed {run.seed}")
            steps, values = zip(*run.validations, strict=True) if run.validations else ((), ())
            axes.plot(steps, values, "o", markersize=5, color=line.get_color())
        axes.set(xlabel="step", ylim=(0, 1), title=job)
        axes.grid(visible=True, linewidth=0.4)
        axes.legend(loc="lower right")
    row[0][0].set(ylabel="episodes that reach the goal")
    figure.suptitle("Frozen lake: training (lines), validation (dots)")
    figure.savefig(file, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
