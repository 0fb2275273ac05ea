"""``python -m bench.operator``: brings up an API server, plays KubeRay, measures, writes ``bench/results/operator.{json,md}``."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.measure import machine, write_results
from bench.operator import report, scenarios
from bench.operator.api import Api
from bench.operator.subject import Subject
from bench.pairs import PAIRS, ratios
from e2e.cluster.api_server import temporary_api_server
from e2e.cluster.state import StateFolder

PACKAGES = ("kopf", "kubernetes", "pydantic", "aiohttp")
SETTLE_S = 5.0
Step = Callable[[str, Any], Awaitable[Any]]
"""Awaits a scenario and shows its figures under the text."""


def main() -> int:
    """Measure, show, write; returns the exit code."""
    arguments = _parse()
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="bench-operator-") as folder,
        temporary_api_server(Path(folder) / "api", crds=True) as kubeconfig,
    ):
        processes = StateFolder(path=Path(folder) / "api").require().processes
        server = [record.identity.pid for record in processes if record.name in ("etcd", "kube-apiserver")]
        subject = Subject(kubeconfig, Path(folder) / "operator.log", server)
        try:
            values = asyncio.run(_measure(kubeconfig, subject, arguments, console))
        finally:
            subject.stop()
    values = {"machine": machine(PACKAGES), **values}
    report.show(console, values)
    write_results("operator", values, report.markdown(values))
    console.print("written: bench/results/operator.json, bench/results/operator.md")
    return 0


async def _measure(kubeconfig: Path, subject: Subject, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    values: dict[str, Any] = {"start_s": subject.start(), "bursts": [], "rss": []}
    main_size = arguments.jobs
    async with Api(kubeconfig) as api:

        async def step(text: str, work: Any) -> Any:
            with console.status(text):
                result = await work
            console.print(f"{text}: {report.one_line(result)}", highlight=False)
            return result

        values["rss"].append({"jobs": 0, "rss_bytes": (await step("idle, no jobs", scenarios.idle(subject, 0, SETTLE_S)))["rss_bytes"]})
        values["latency"] = await step("one job at a time", scenarios.latency(api, "latency", arguments.latency))
        values["life"] = await step("writes of a life", scenarios.life(api, subject, "life", 20))
        first, size = main_size // 10, main_size // PAIRS
        values["bursts"].append(await step(f"{first} jobs at once", scenarios.burst(api, subject, "burst-first", first)))
        main_text = f"{main_size} jobs at once"
        values["bursts"].append(await step(main_text, scenarios.burst(api, subject, f"burst-{main_size}", main_size)))
        values["running"] = await step("all start to run", scenarios.all_running(api, f"burst-{main_size}", main_size))
        values["idle"] = await step("nothing happens", scenarios.idle(subject, main_size, arguments.idle))
        values["reaction"] = await step("single changes", scenarios.reaction(api, f"burst-{main_size}", main_size, main_size // 4))
        present = 20 + arguments.latency + sum(b["jobs"] for b in values["bursts"])
        values["rss"].append({"jobs": present, "rss_bytes": subject.rss_bytes()})
        values |= await _pairs(api, subject, size, step)
        paired = values.pop("paired")
        present += sum(one["jobs"] for one in paired)
        values["bursts"] += paired
        if arguments.many > present:
            more = arguments.many - present
            await step(f"{more} jobs that are over", scenarios.finished(api, "life", "many", more))
            values["rss"].append({"jobs": arguments.many, "rss_bytes": subject.rss_bytes()})
            present = arguments.many
        values["restart"] = await step(f"restart with {present} jobs", scenarios.restart(api, subject, "restart", present))
    return values


async def _pairs(api: Api, subject: Subject, size: int, step: Step) -> dict[str, Any]:
    """Bursts of ``size`` RLJobs, each followed by the same objects created by the client."""
    paired, direct = [], []
    for pair in range(1, PAIRS + 1):
        source = f"pair-{pair}"
        paired.append(await step(f"{size} jobs at once, pair {pair}", scenarios.burst(api, subject, source, size)))
        direct.append(await step(f"{size} RayJobs by the client, pair {pair}", scenarios.direct(api, source, f"direct-{pair}", size)))
    found = ratios([burst["all_children_s"] for burst in paired], [one["all_objects_s"] for one in direct])
    return {"paired": paired, "direct": direct, "ratios": found}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of the burst and of the live set (default: %(default)s)")
    parser.add_argument("--many", type=int, default=10000, help="jobs present at the restart, most of them over (default: %(default)s)")
    parser.add_argument("--latency", type=int, default=200, help="jobs created one at a time (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of the idle measurement (default: %(default)s)")
    arguments = parser.parse_args()
    for name in ("jobs", "latency"):
        if getattr(arguments, name) < 20:
            parser.error(f"--{name} is {getattr(arguments, name)}; it must be at least 20")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
