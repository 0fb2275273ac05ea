"""Tables and picture of the placement bench."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS
from bench.pairs import spread

NAMES = {
    "plan": "RLJob, spec to plan",
    "conformance": "RLJob, RLinf config to placements",
    "rlinf": "RLinf 0.3.0, the same",
}
LAYOUT_TEXTS = {
    "halves": "trainer on one half, rollout on the other, one process per device",
    "engines": "the same with engines of 8 devices (4 of 8)",
    "collocated": "trainer and rollout on every device",
}


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    machine = values["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Placement: RLJob's planner compared with that of RLinf 0.3.0",
        "",
        f"Written by `python -m bench.placement` on {machine['measured_at']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, load {values['load_before']:.1f} before; Python {machine['python']}, {versions}. "
        "What is compared and how: [bench/README.md](../README.md).",
        "",
        "## Plans per second",
        "",
        "Rates are medians of the pairs of processes; times: median, range, and number of pairs.",
        "",
        "| cases | accepted by both | equal placements | intended differences | | RLJob | RLinf | times |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for name in ("recorded", "random"):
        found = values[name]
        counts = f"{found['cases']} {name} | {found['accepted_by_both']} | {found['equal_placements']} | {found['intended_differences']}"
        for what, key in (("whole", "plans_per_s"), ("placement alone", "placements_per_s")):
            ours, theirs = found[f"rljob_{key}"], found[f"rlinf_{key}"]
            lines.append(f"| {counts} | {what} | {ours:,.0f} | {theirs:,.0f} | {spread(found['ratios'][what])} |")
            counts = "| | |"
    for growth in values["growth"]:
        lines += ["", *_growth(growth)]
    return "\n".join([*lines, ""])


def _growth(growth: dict[str, Any]) -> list[str]:
    sides = growth["sides"]
    sizes = [point["devices"] for point in sides["plan"]["points"]]
    lines = [
        f"## Growth: {LAYOUT_TEXTS[growth['layout']]}",
        "",
        *(["![seconds per plan over devices](placement.svg)", ""] if growth["layout"] == "halves" else []),
        f"| devices | {' | '.join(NAMES[side] for side in sides)} |",
        f"|---:|{'---:|' * len(sides)}",
    ]
    for position, devices in enumerate(sizes):
        cells = [_cell(side["points"], position, growth["limit_s"]) for side in sides.values()]
        lines.append(f"| {devices:,} | {' | '.join(cells)} |")
    exponents = [f"{side['exponent']:.2f}" if side["exponent"] is not None else "-" for side in sides.values()]
    return [*lines, f"| exponent from 512 on | {' | '.join(exponents)} |"]


def _cell(points: list[dict[str, Any]], position: int, limit_s: float) -> str:
    if position >= len(points):
        return "not tried"
    point = points[position]
    if "seconds" not in point:
        return f"more than {limit_s:.0f} s"
    per_device_us = point["seconds"] / point["devices"] * 1e6
    return f"{_time(point['seconds'])}, {per_device_us:,.1f} µs a device, {point['peak_bytes'] / 2**20:.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"


def draw(values: dict[str, Any]) -> None:
    """``results/placement.svg``: seconds over devices, both as logarithms, with a linear slope for the eye."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rljob", "svg.fonttype": "none"})
    from matplotlib import pyplot

    growth = next(growth for growth in values["growth"] if growth["layout"] == "halves")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    styles = {"plan": ("tab:blue", "o"), "conformance": ("tab:cyan", "s"), "rlinf": ("tab:red", "^")}
    for side, found in growth["sides"].items():
        color, marker = styles[side]
        points = [(point["devices"], point["seconds"]) for point in found["points"] if "seconds" in point]
        exponent = "" if found["exponent"] is None else f" (exponent {found['exponent']:.2f})"
        axes.loglog(*zip(*points, strict=True), color=color, marker=marker, label=NAMES[side] + exponent)
        for point in found["points"]:
            if "seconds" not in point:
                axes.loglog([points[-1][0], point["devices"]], [points[-1][1], growth["limit_s"]], color=color, linestyle=":")
                axes.annotate(f"> {growth['limit_s']:.0f} s", (point["devices"], growth["limit_s"]), color=color, ha="left", va="bottom")
    first, last = (growth["sides"]["plan"]["points"][position] for position in (0, -1))
    ends = (first["devices"], last["devices"])
    axes.loglog(ends, [last["seconds"] * devices / last["devices"] for devices in ends], color="gray", linewidth=0.8, label="linear")
    axes.set(xlabel="devices", ylabel="seconds per plan", title="Trainer on one half of the devices, rollout on the other")
    axes.grid(visible=True, which="major", linewidth=0.4)
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(RESULTS / "placement.svg", metadata={"Date": None})
    pyplot.close(figure)
