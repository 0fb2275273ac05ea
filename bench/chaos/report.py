"""The table of faults, and the recoveries beside a full restart."""

from __future__ import annotations

from typing import Any

from bench.chaos.outcome import FAILED, RECOVERED, WRONG


def headline(values: dict[str, Any]) -> str:
    """One line."""
    rows = [row for layer in values["layers"].values() for row in layer["table"]]
    return f"{sum(row['faults'] for row in rows)} faults, {sum(row[WRONG] for row in rows)} not answered as they should be"


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    about = values["machine"]
    lines = [
        "# Chaos", "",
        f"Written by `python -m bench.chaos`; {about['processor']}, {about['cores']} cores. {headline(values)}.", "",
        "A fault is *recovered* if the job continued to its end with every step trained once, or the operator brought its job to the "
        "correct end; *failed* is a fault that no restart can repair, reported with its cause. "
        "Time to recover: from the fault to the next trained "
        "step, to the next attempt's RayJob, or to the RayJob of a job that is applied during a fault of the operator. "
        "A process that is *slowed* is stopped for 0.4 s of every 0.5 s; its time is that of three steps trained meanwhile, "
        "and one that is replaced although it is only slow is wrong. "
        "A webhook that is down must be named in the status where it may not be ignored (`Fail`), and keep nothing from being done "
        "where it may (`Ignore`). On a real cluster two further steps count, of the next attempt where the fault ends one. Its reason "
        "must be in the status, and the operator must see a change of the spec afterwards.", "",
    ]  # fmt: skip
    for layer in values["layers"].values():
        lines += [
            f"## {layer['title'].capitalize()}", "",
            f"Seed {layer['seed']}, {layer['seconds']:.0f} s until {layer['measured_at']}; machine load {layer['load']:.0f}.", "",
            "| kind | faults | recovered | failed with the true cause | wrong | p50 s | p99 s |", "|---|---:|---:|---:|---:|---:|---:|",
        ]  # fmt: skip
        for row in layer["table"]:
            times = " | ".join("" if row[key] is None else f"{row[key]:.2f}" for key in ("p50_s", "p99_s"))
            lines.append(f"| {row['kind']} | {row['faults']} | {row[RECOVERED]} | {row[FAILED]} | {row[WRONG]} | {times} |")
        lines += ["", *(f"- {text}" for text in layer["wrong"]), *([""] if layer["wrong"] else [])]
    return "\n".join(lines)
