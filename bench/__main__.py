"""``python -m bench``: run every measurement in turn and write an index of what lies in ``bench/results``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.measure import RESULTS, ROOT

PAGE = ROOT / "docs" / "measurements.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One module and what it answers."""

    name: str
    """Module under ``bench`` and stem of its files in ``results``."""
    answers: str
    timeout_s: float
    needs: str = ""
    """Arguments without which it cannot run: it is then started by itself."""


MEASUREMENTS = (
    Measurement(name="logprob_memory", answers="memory and time of log-probs without full logits, against full logits", timeout_s=600.0),
    Measurement(name="trl", answers="updates per second, RLJob against TRL's GRPOTrainer", timeout_s=1800.0),
    Measurement(name="fidelity", answers="losses, gradients and advantages beside TRL's and verl's on the same batches", timeout_s=1800.0),
    Measurement(
        name="curves", answers="the quickstart's learning curves over five seeds, beside TRL's at equal settings", timeout_s=5400.0
    ),
    Measurement(name="seeds", answers="whether the CPU examples learn, for three seeds each", timeout_s=5400.0),
    Measurement(name="placement", answers="plans per second and growth to 100,000 devices, beside RLinf's own planner", timeout_s=900.0),
    Measurement(name="offload", answers="switches between device and host memory against the machine's copy limit", timeout_s=480.0),
    Measurement(
        name="training",
        answers="the trainer's tokens per second and core beside TRL's and a plain loop's; memory beside the estimate",
        timeout_s=1800.0,
    ),
    Measurement(
        name="loading", answers="memory and seconds of loading a sharded model, beside a whole one in each process", timeout_s=900.0
    ),
    Measurement(name="weightsync", answers="seconds of a weight sync by transport and size, sparse beside dense", timeout_s=1800.0),
    Measurement(name="overlap", answers="what generating ahead brings, beside the bounds on throughput and staleness", timeout_s=5400.0),
    Measurement(name="driver", answers="tokens and responses a second of the driver, its memory and its longest pause", timeout_s=3600.0),
    Measurement(
        name="agentic",
        answers="environment steps and turns per second, 1 to 1,000 episodes, and how much of their history stays cached",
        timeout_s=1200.0,
    ),
    Measurement(name="lake", answers="how often a tiny model crosses a frozen lake while it trains, over three seeds", timeout_s=5400.0),
    Measurement(
        name="upstream", answers="examples of ROLL and RLinf through convert, validate, plan", timeout_s=1800.0, needs="--roll and --rlinf"
    ),
    Measurement(name="operator", answers="reaction and cost of the Kubernetes operator on a real API server", timeout_s=2400.0),
    Measurement(name="specs", answers="random and mutated specs against API server, planner, webhook and operator", timeout_s=1800.0),
    Measurement(name="chaos", answers="a thousand faults at random moments: what recovers, how soon, and what is wrong", timeout_s=3600.0),
    Measurement(name="recovery", answers="what a lost process costs a real job, beside a full restart", timeout_s=1800.0),
    Measurement(name="newcomer", answers="a fresh clone, and wheels by pip alone, to a first learning curve", timeout_s=7200.0),
    Measurement(name="soak", answers="memory of driver, trainer, engine and operator over an hour", timeout_s=7200.0),
)


def main() -> int:
    """Returns 1 when a measurement failed; the others still run."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", choices=[[], *(m.name for m in MEASUREMENTS)], help="which (default: all)")
    names = parser.parse_args().names
    failed = []
    for measurement in MEASUREMENTS:
        if names and measurement.name not in names:
            continue
        if measurement.needs:
            sys.stderr.write(f"\n{measurement.name}: left out; python -m bench.{measurement.name} needs {measurement.needs}\n")
            continue
        sys.stderr.write(f"\n{measurement.name}: {measurement.answers}\n")
        if not _run(measurement):
            failed.append(measurement.name)
    write_lists()
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def write_lists() -> None:
    """The index of the results, for the repository and for the documentation."""
    (RESULTS / "README.md").write_text(index(RESULTS))
    PAGE.write_text(page(RESULTS))


def _run(measurement: Measurement) -> bool:
    started_s = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", f"bench.{measurement.name}"], check=False, timeout=measurement.timeout_s)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{measurement.name}: not done after {measurement.timeout_s:.0f} s\n")
        return False
    sys.stderr.write(f"{measurement.name}: exit code {done.returncode} after {time.monotonic() - started_s:.0f} s\n")
    return done.returncode == 0


def index(folder: Path) -> str:
    """A markdown table of the measurements whose results are in ``folder``: what came out, when, of which commit, on what."""
    lines = [
        "# Results",
        "",
        "Written by `python -m bench` (`make bench`). Every figure comes from a run on one machine; a `+` is a commit with changes,",
        "a dash one that was not recorded.",
        "",
        *_table(folder, ""),
    ]
    return "\n".join([*lines, ""])


def page(folder: Path) -> str:
    """The same table for the documentation, with the pictures that the measurements draw."""
    lines = [
        "# Measurements",
        "",
        "What RLJob was measured to do, beside peers and physical limits, each in one run:",
        "[how, and what is held equal](../bench/README.md). Written by `python -m bench`; all on two cores without a GPU.",
        "A `+` is a commit with changes, a dash one that was not recorded.",
        "",
        *_table(folder, "../bench/results/"),
    ]
    for picture in sorted([*folder.glob("*.svg"), *folder.glob("*.png")]):
        lines += ["", f"## {picture.stem}", "", f"![{_answers(picture.stem)}](../bench/results/{picture.name})"]
    return "\n".join([*lines, ""])


def _answers(stem: str) -> str:
    """What a result is about, by the longest name that it begins with."""
    fitting = [measurement for measurement in MEASUREMENTS if stem.startswith(measurement.name)]
    return max(fitting, key=lambda one: len(one.name)).answers if fitting else stem


def _table(folder: Path, prefix: str) -> list[str]:
    rows = ["| measured | what came out | when, commit | processor |", "|---|---|---|---|"]
    for measurement in MEASUREMENTS:
        for data in sorted(folder.glob(f"{measurement.name}*.json")):  # one file a workload where they were measured one by one
            text = data.with_suffix(".md")
            target = text if text.is_file() else data
            values = json.loads(data.read_text())
            found = values.get("machine", {}) if isinstance(values, dict) else {}
            when = f"{found.get('measured_at', '-').removesuffix(' UTC')}, {found.get('commit', '-')}"
            link = f"[{data.stem}]({prefix}{target.name})"
            rows.append(f"| {link}: {measurement.answers} | {_headline(values)} | {when} | {found.get('processor', '-')} |")
    return rows


def _headline(values: object) -> str:
    """The figures that stand for a result, where its file has some: its own headline, or ratios, reaction, switches, largest plan."""
    if not isinstance(values, dict):
        return ""
    found = [values["headline"]] if "headline" in values else []
    found += [f"({w['key']}) {w['summary']['ratio']:.2f} times" for w in values.get("workloads", [])]
    if "latency" in values:
        found.append(f"RLJob to RayJob p50 {values['latency']['p50_ms']:.0f} ms, p99 {values['latency']['p99_ms']:.0f} ms")
    if "direct" in values:
        size = values["direct"]["rayjobs"]
        found += [f"{size} at once in {burst['all_children_s']:.1f} s" for burst in values["bursts"] if burst["jobs"] == size]
    if "switch" in values:
        switch, limits, cuda = values["switch"], values["limits"], "duplex_gb_per_s" in values["limits"]
        for way, limit in (("offload", "offload" if cuda else "offload_freed"), ("load", "load" if cuda else "load_fresh")):
            found.append(f"{way} at {100 * switch[f'{way}_gb_per_s'] / limits[f'{limit}_gb_per_s']:.0f} % of bare copies")
    if "growth" in values:
        for name in ("recorded", "random"):
            ratio = values[name]["rljob_plans_per_s"] / values[name]["rlinf_plans_per_s"]
            found.append(f"{ratio:.1f} times RLinf's plans per second on {name} cases")
        largest = values["growth"][0]["sides"]["plan"]
        devices, seconds = largest["points"][-1]["devices"], largest["points"][-1]["seconds"]
        found.append(f"{devices:,} devices in {seconds:.2f} s, exponent {largest['exponent']:.2f}")
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
