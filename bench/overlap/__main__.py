"""``python -m bench.overlap``: the simulation and the real jobs; each writes its JSON, markdown and picture into ``bench/results``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import bench.overlap
from bench.measure import ChildFailedError, machine, write_results
from bench.overlap import real, real_report, simulation, simulation_report


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write; returns the exit code."""
    arguments = parse(argv)
    console = Console(stderr=True)
    try:
        if arguments.what in (None, "simulation"):
            _simulate(arguments, console)
        if arguments.what in (None, "real"):
            _run_real(arguments, console)
    except ChildFailedError as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of all parts; without the name of one, both run with their defaults."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=bench.overlap.__doc__)
    parser.set_defaults(sim_steps=simulation.STEPS, in_flight=list(simulation.IN_FLIGHT))
    parser.set_defaults(**real.DEFAULTS)
    parts = parser.add_subparsers(dest="what", metavar="simulation|real", help="which part (default: both)")
    simulated = parts.add_parser("simulation", help="the scheduler on a virtual clock; a few minutes on one core")
    simulated.add_argument(
        "--steps", dest="sim_steps", type=int, default=simulation.STEPS, help=f"measured steps of a run (default: {simulation.STEPS})"
    )
    simulated.add_argument(
        "--in-flight",
        type=int,
        nargs="+",
        default=list(simulation.IN_FLIGHT),
        help="requests in flight of the cost table (default: 1000 3000 10000 30000)",
    )
    on_machine = parts.add_parser("real", help="jobs with vLLM on embedded Ray, ratios in turn; needs a quiet machine")
    real.add_options(on_machine)
    arguments = parser.parse_args(argv)
    if arguments.sim_steps < 1 or min(arguments.in_flight) < simulation.COST_SLOTS:
        parser.error(f"--steps must be at least 1, --in-flight at least {simulation.COST_SLOTS}")
    if arguments.steps <= real.WARMUP_STEPS or arguments.pairs < 1 or min(arguments.ratios) < 0:
        parser.error(f"--steps must be above {real.WARMUP_STEPS}, --pairs at least 1, --ratios not negative")
    return arguments


def _simulate(arguments: argparse.Namespace, console: Console) -> None:
    found = simulation.measure(arguments.sim_steps, arguments.in_flight, lambda text: console.print(text, style="dim", highlight=False))
    values = {"machine": machine(("numpy",)), **found, "headline": ""}
    values["headline"] = f"{100 * simulation_report.least_share(values, 4.0):.0f} % of an unlimited ratio's throughput at ratio 4 and above"
    write_results(simulation_report.STEM, values, simulation_report.markdown(values))
    simulation_report.draw(values)
    console.print(f"written: bench/results/{simulation_report.STEM}.json, .md, .svg", highlight=False)


def _run_real(arguments: argparse.Namespace, console: Console) -> None:
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    values = real.measure(arguments, lambda text: console.print(text, style="dim", highlight=False))
    write_results(real_report.STEM, values, real_report.markdown(values))
    real_report.draw(values)
    console.print(f"written: bench/results/{real_report.STEM}.json, .md, .svg", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
