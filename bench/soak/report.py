"""Verdict, table and picture of a soak."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS
from bench.soak.memory import slope

WARM_UP = 0.25
"""Share of the samples before the line: caches, compiled kernels and thread stacks fill there."""
BOUND_MIB_PER_HOUR = 10.0
BOUND_SHARE_PER_HOUR = 0.01
"""Of what the process holds; the larger of the two bounds counts."""
HELD, DONE = 3, 4
"""Columns of a sample."""


def verdicts(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For every process: how fast what it holds grew after the warm-up, and whether that is flat."""
    found = []
    for part in parts.values():
        for name, rows in part["samples"].items():
            late = rows[int(len(rows) * WARM_UP) :]
            if len(late) < 2:
                continue
            hours = (late[-1][0] - late[0][0]) / 3600
            growth = _per_hour(late)
            last_half = rows[len(rows) // 2 :]
            held = late[-1][HELD]
            bound = max(BOUND_MIB_PER_HOUR, BOUND_SHARE_PER_HOUR * held)
            found.append(
                {
                    "process": name, "rss_mib": late[-1][1], "pss_mib": late[-1][2], "held_mib": held,
                    "growth_mib_per_hour": round(growth, 2), "last_half_mib_per_hour": round(_per_hour(last_half), 2),
                    "bound_mib_per_hour": round(bound, 1), "unit": part["unit"],
                    "per_hour": round((late[-1][DONE] - late[0][DONE]) / hours), "minutes": round(rows[-1][0] / 60, 1),
                    "flat": growth <= bound,
                }
            )  # fmt: skip
    return found


def _per_hour(rows: list[list[float]]) -> float:
    """Growth of what is held, in MiB."""
    return slope([row[0] for row in rows], [row[HELD] for row in rows]) * 3600


def headline(values: dict[str, Any]) -> str:
    """One line."""
    found = values["verdicts"]
    flat = sum(verdict["flat"] for verdict in found)
    return f"{flat} of {len(found)} groups of processes flat over {min((v['minutes'] for v in found), default=0):.0f} minutes"


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    about = values["machine"]
    lines = [
        "# Memory of a long run", "",
        f"Written by `python -m bench.soak` on {about['measured_at']}; {about['processor']}, {about['cores']} cores. A real job (one "
        "trainer, one engine, generation one batch ahead, checkpoint every 20 steps, validation every 100) and the operator on a real API "
        "server, whose jobs are created, run, succeed, and are deleted.", "",
        "*Held* is PSS without file pages, which the kernel can drop at any time: it grows if something leaks. Growth is the median "
        f"slope of all pairs of samples (Theil-Sen) after the first {WARM_UP:.0%}. Flat: at most {BOUND_MIB_PER_HOUR:.0f} MiB per hour, or "
        f"{BOUND_SHARE_PER_HOUR:.0%} of what is held, whichever is larger.", "",
        "![memory over time](soak.svg)", "",
        "| process | RSS MiB | PSS MiB | held MiB | growth MiB/h | in the last half | bound MiB/h | work per hour | minutes | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for v in values["verdicts"]:
        lines.append(
            f"| {v['process']} | {v['rss_mib']:.0f} | {v['pss_mib']:.0f} | {v['held_mib']:.0f} | {v['growth_mib_per_hour']:+.1f} | "
            f"{v['last_half_mib_per_hour']:+.1f} | {v['bound_mib_per_hour']:.1f} | {v['per_hour']} {v['unit']} | {v['minutes']:.0f} | "
            f"{'flat' if v['flat'] else '**grows**'} |"
        )
    problems = [part["problem"] for part in values["parts"].values() if part["problem"]]
    return "\n".join([*lines, "", *problems, *([""] if problems else [])])


def draw(values: dict[str, Any]) -> None:
    """Write ``soak.svg``: one small plot a process, what it holds over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = {name: rows for part in values["parts"].values() for name, rows in part["samples"].items() if len(rows) > 1}
    if not series:
        return
    figure, axes = pyplot.subplots(len(series), 1, figsize=(8, 1.9 * len(series)), layout="constrained", sharex=True, squeeze=False)
    for axis, (name, rows) in zip(axes[:, 0], series.items(), strict=True):
        minutes = [row[0] / 60 for row in rows]
        for column, label in ((2, "PSS"), (HELD, "held")):
            axis.plot(minutes, [row[column] for row in rows], label=label, linewidth=1)
        axis.axvspan(0, minutes[int(len(minutes) * WARM_UP)], color="gray", alpha=0.15, linewidth=0)
        axis.set(ylabel="MiB", title=name)
        axis.grid(visible=True, linewidth=0.4)
        axis.legend(loc="lower right", fontsize="small")
    axes[-1, 0].set(xlabel="minutes (gray: warm-up)")
    figure.savefig(RESULTS / "soak.svg", metadata={"Date": None})
    pyplot.close(figure)
