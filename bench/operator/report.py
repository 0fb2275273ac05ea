"""The figures for people: lines while it runs, a table beside the aims, markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.pairs import spread

MB = 1e6


def one_line(values: Mapping[str, Any]) -> str:
    """Name and value of each figure."""
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items() if not isinstance(value, Mapping))


def rows(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Question, measured, aim."""
    latency, reaction, idle, restart, life = (values[k] for k in ("latency", "reaction", "idle", "restart", "life"))
    burst = max(values["bursts"], key=lambda b: b["jobs"])
    size = burst["jobs"]
    memory = ", ".join(f"{r['rss_bytes'] / MB:.0f} MB at {r['jobs']}" for r in values["rss"])
    kinds = ", ".join(f"{what} {count:.0f}" for what, count in sorted(life["by_kind"].items()))
    return [
        (
            "RLJob created -> RayJob exists, idle operator",
            f"p50 {latency['p50_ms']:.0f} ms, p99 {latency['p99_ms']:.0f} ms",
            "<= 50 / 250 ms",
        ),
        (f"{size} RLJobs at once -> all RayJobs", f"{burst['all_children_s']:.1f} s ({burst['jobs_per_s']:.0f}/s)", "<= 10 s"),
        _by_client(values),
        (
            f"child status -> condition at {reaction['live_jobs']} live jobs",
            f"p50 {reaction['p50_ms']:.0f} ms, p99 {reaction['p99_ms']:.0f} ms",
            "p99 <= 1 s",
        ),
        ("writes over a job's life", f"{life['create']:.0f} creates, {life['patch']:.0f} patches: {kinds}", "<= 10"),
        (
            f"nothing happens, {idle['jobs']} running jobs",
            f"{idle['writes_per_min']:.1f} writes/min, {idle['cpu_share_of_a_core'] * 100:.1f} % of a core",
            "0 writes, <= 2 %",
        ),
        ("resident memory", memory, "<= 80 / 120 / 300 MB at 0 / 1000 / 10000"),
        (
            f"restart with {restart['present']} jobs",
            f"first new job {restart['first_job_s']:.1f} s, all checked {restart['all_jobs_s']:.1f} s, "
            f"{restart['rss_bytes'] / MB:.0f} MB, "
            f"{restart['operator_cpu_s']:.0f} s of CPU, API server {restart['server_cpu_s']:.0f} s",
            "<= 5 / 60 s",
        ),
    ]


def _by_client(values: Mapping[str, Any]) -> tuple[str, str, str]:
    """The client's side of the pairs, in the median."""
    direct = values["direct"]
    size, objects = direct[0]["rayjobs"], direct[0]["objects"]
    all_s, alone_s = (statistics.median(one[key] for one in direct) for key in ("all_objects_s", "all_created_s"))
    return (
        f"{size} jobs: the same {objects / size:.0f} objects per job created by the client, {objects} in all, after a burst of as many",
        f"{all_s:.1f} s ({size / all_s:.0f} jobs/s, {objects / all_s:.0f} objects/s); the RayJobs alone {alone_s:.1f} s; "
        f"jobs per second by RLJob: {spread(values['ratios'])} times those",
        "the API server's own limit",
    )


def growth(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Burst size against rate and cost: flat columns mean linear growth."""
    return [
        (
            f"{b['jobs']}",
            f"{b['all_children_s']:.1f}",
            f"{b['jobs_per_s']:.0f}",
            f"{b['operator_cpu_ms_per_job']:.1f}",
            f"{b['server_cpu_ms_per_job']:.1f}",
            f"{b['writes_per_job']:.1f}",
        )
        for b in values["bursts"]
    ]


def ceiling(values: Mapping[str, Any]) -> str:
    """What the cores allow: processor time of a job in the largest burst, the client's own left out."""
    largest = max(values["bursts"], key=lambda b: b["jobs"])
    operator_ms, server_ms = largest["operator_cpu_ms_per_job"], largest["server_cpu_ms_per_job"]
    cores = values["machine"]["cores"]
    return (
        f"A job of the largest burst takes {server_ms:.0f} ms of the API server and etcd and {operator_ms:.0f} ms of the operator: "
        f"{cores} cores allow at most {cores / (operator_ms + server_ms) * 1e3:.0f} jobs/s, and {largest['jobs_per_s']:.0f} were made. "
        f"The operator alone could make {1e3 / operator_ms:.0f} jobs/s of one core."
    )


GROWTH_HEADER = ("jobs at once", "seconds", "jobs/s", "operator CPU ms/job", "API server and etcd CPU ms/job", "writes/job")


def show(console: Console, values: Mapping[str, Any]) -> None:
    """Both tables on the terminal."""
    table = Table("question", "measured", "aim", title="operator")
    for row in rows(values):
        table.add_row(*row)
    console.print(table)
    table = Table(*GROWTH_HEADER, title="growth")
    for line in growth(values):
        table.add_row(*line)
    console.print(table)


def markdown(values: Mapping[str, Any]) -> str:
    """The same, with the machine."""
    about = values["machine"]
    lines = [
        "# Operator against a real API server",
        "",
        f"{about['processor']}, {about['cores']} cores shared by API server, etcd, controllers, operator and client; "
        f"{about['measured_at']}.",
        "The measuring client takes KubeRay's part and writes RayJob statuses; no pods run.",
        "",
        "| question | measured | aim |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows(values)),
        "",
        "Growth: if a column stays level, the cost is linear in the number of jobs.",
        "",
        f"| {' | '.join(GROWTH_HEADER)} |",
        f"|{'---|' * len(GROWTH_HEADER)}",
        *(f"| {' | '.join(line)} |" for line in growth(values)),
        "",
        ceiling(values),
        "",
    ]
    return "\n".join(lines)
