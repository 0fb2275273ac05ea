"""Table and picture of the learning curves."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS

COLORS = {"RLJob": "tab:blue", "TRL": "tab:orange"}


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    machine, window = values["machine"], values["window_steps"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    found, ends = values["bands"], values["ends"]
    seeds = len(next(iter(ends.values())))
    lines = [
        "# Learning curves: RLJob compared with TRL's GRPOTrainer",
        "",
        f"Written by `python -m bench.curves` on {machine['measured_at']}: {versions}. The quickstart, {values['steps']} steps, {seeds} "
        f"seeds on each side, the same prompts in the same order, equal settings: [bench/README.md](../README.md).",
        "",
        f"The bands (lowest to highest reward over seeds, in windows of {window} steps) overlap in {100 * values['overlap_share']:.0f} % "
        f"of the windows. The mean rewards of the ends are {values['ends_apart_errors']:+.1f} standard errors apart.",
        "",
        "![mean reward over steps](curves.png)",
        "",
        f"| steps | {' | '.join(found)} |",
        f"|---:|{'---:|' * len(found)}",
    ]
    count = len(next(iter(found.values()))["mean"])
    for place in range(count):
        if place % 2 == 0 or place == count - 1:
            cells = [f"{band['mean'][place]:.3f} ({band['low'][place]:.3f} to {band['high'][place]:.3f})" for band in found.values()]
            lines.append(f"| {place * window + 1} to {(place + 1) * window} | {' | '.join(cells)} |")
    lines += ["", *(f"Ends of {side}'s runs: {', '.join(f'{end:.3f}' for end in each)}." for side, each in ends.items()), ""]
    return "\n".join(lines)


def draw(values: dict[str, Any]) -> None:
    """Write ``curves.png``: each side's mean as a line, its seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    window = values["window_steps"]
    for side, band in values["bands"].items():
        steps = [window * place + (window + 1) / 2 for place in range(len(band["mean"]))]
        axes.fill_between(steps, band["low"], band["high"], color=COLORS[side], alpha=0.25, linewidth=0)
        axes.plot(steps, band["mean"], color=COLORS[side], label=f"{side}, {len(values['ends'][side])} seeds")
    axes.set(xlabel="step", ylabel="mean reward", title="Quickstart: mean and range over seeds")
    axes.grid(visible=True, linewidth=0.4)
    axes.legend(loc="lower right")
    figure.savefig(RESULTS / "curves.png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)
