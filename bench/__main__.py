"""``python -m bench``: run every measurement in turn and write an index of what lies in ``bench/results``."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peers, peers_chart
from bench.measure import RESULTS, ROOT
from bench.trl.report import pairs_of

PAGE = ROOT / "docs" / "measurements.md"
CHUNK_TOKENS = 256
"""The chunk of log-probs whose peak is in the lists."""


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
    Measurement(name="logprob_memory", answers="peak memory and time of log-probs in chunks, compared with full logits", timeout_s=600.0),
    Measurement(name="cpu_products", answers="16-bit matrix products on a CPU, as torch computes them and in float32", timeout_s=600.0),
    Measurement(name="trl", answers="updates per second, compared with TRL's GRPOTrainer", timeout_s=3600.0),
    Measurement(name="generation", answers="responses per second of a job's generation phase, compared with bare vLLM", timeout_s=1800.0),
    Measurement(
        name="fidelity", answers="losses, gradients, and advantages, compared with TRL and verl on the same batches", timeout_s=1800.0
    ),
    Measurement(
        name="curves", answers="learning curves of the quickstart over five seeds, compared with TRL at equal settings", timeout_s=5400.0
    ),
    Measurement(name="seeds", answers="whether the CPU examples learn, three seeds each", timeout_s=5400.0),
    Measurement(
        name="placement", answers="plans per second and scaling to 100,000 devices, compared with RLinf's planner", timeout_s=900.0
    ),
    Measurement(name="offload", answers="switches between device and host memory, compared with the machine's copy limit", timeout_s=480.0),
    Measurement(
        name="training",
        answers="the trainer's tokens per second and core, compared with TRL and a plain loop; memory, compared with the estimate",
        timeout_s=1800.0,
    ),
    Measurement(
        name="loading", answers="memory and time of loading a sharded model, compared with a whole one in each process", timeout_s=900.0
    ),
    Measurement(name="weightsync", answers="time of a weight sync by transport and size, dense and sparse", timeout_s=1800.0),
    Measurement(
        name="overlap", answers="speedup from generating ahead, compared with the bounds on throughput and staleness", timeout_s=5400.0
    ),
    Measurement(name="advice", answers="what the report's best advice promises, compared with the job that follows it", timeout_s=3600.0),
    Measurement(name="driver", answers="tokens and responses per second of the driver, its memory and its longest pause", timeout_s=3600.0),
    Measurement(
        name="agentic",
        answers="environment steps and turns per second, 1 to 1,000 episodes, and how much of their history stays cached",
        timeout_s=1200.0,
    ),
    Measurement(name="lake", answers="how often a tiny model crosses the frozen lake during training, three seeds", timeout_s=5400.0),
    Measurement(
        name="upstream",
        answers="example files of ROLL and RLinf through convert, validate, and plan",
        timeout_s=1800.0,
        needs="--roll and --rlinf",
    ),
    Measurement(name="gpu_check", answers="one GPU compared with its limits, and a job on it", timeout_s=900.0, needs="a GPU"),
    Measurement(name="operator", answers="latency and cost of the Kubernetes operator on a real API server", timeout_s=2400.0),
    Measurement(name="specs", answers="random and mutated specs on a real API server, planner, webhook, and operator", timeout_s=1800.0),
    Measurement(name="chaos", answers="a thousand faults at random moments: what recovers, and how fast", timeout_s=3600.0),
    Measurement(name="recovery", answers="cost of a lost process, compared with a full restart", timeout_s=1800.0),
    Measurement(
        name="newcomer",
        answers="time from a fresh clone, and from wheels with pip alone, to a first learning curve; to a job on a cluster",
        timeout_s=7200.0,
    ),
    Measurement(
        name="screens",
        answers="every page in a browser, light and dark, wide and narrow: errors, failed requests, overflow, contrast",
        timeout_s=1800.0,
        needs="finished runs, the built site, and Chromium",
    ),
    Measurement(name="soak", answers="memory of driver, trainer, engine, and operator in a long run", timeout_s=7200.0),
)


PARTS = {
    "gpu_check-engines": "on a GPU: weights through every transport, how long an engine stops, vLLM in fp8 and with speculation",
    "weightsync-adapters": "LoRA adapters alone, compared with merged weights",
    "weightsync-engine": "how long a real vLLM engine stops for full updates, loaded or written, and for sparse ones",
    "weightsync-nodes": "time of a weight sync between two nodes, compared with a bare socket",
    "weightsync-fanout": "time of a weight sync from one node to three: chain, gloo's broadcast, object store",
    "agentic-endpoint": "cost of a call to the OpenAI-compatible endpoint",
    "overlap-simulation": "speedup from generating ahead, simulated with the scheduler's own code",
    "overlap-real": "speedup from generating ahead with real vLLM, compared with the bounds",
    "trl-i": "updates per second of the quickstart, compared with TRL's GRPOTrainer",
    "trl-i-ratio1": "the same, generating one batch ahead",
    "trl-ii": "the same with 9 M parameters and heavy-tailed responses of 8 to 256 tokens",
    "trl-iii": "the same model with LoRA adapters, responses of 8 to 64 tokens",
}
"""Results that answer a part of their measurement's question, by stem."""


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
    """The index of the results, for the repository and for the documentation, and the picture of all comparisons."""
    peers_chart.draw(RESULTS)
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
        "Written by `python -m bench` (`make bench`), one machine per row. A `+` marks a commit with local changes,",
        "a dash one that was not recorded.",
        "",
        *_table(folder, ""),
        "",
        *_peers(folder, ""),
    ]
    return "\n".join([*lines, ""])


def page(folder: Path) -> str:
    """The same table for the documentation, with the pictures that the measurements draw."""
    lines = [
        "# Measurements",
        "",
        "Every result of `python -m bench`, on two CPU cores unless another processor is named: [how it is measured](../bench/README.md).",
        "[Figures](figures.md) has them by topic. A `+` marks a commit with local changes, a dash one that was not recorded.",
        "",
        *_table(folder, "../bench/results/"),
        "",
        *_peers(folder, "../bench/results/"),
    ]
    for picture in sorted([*folder.glob("*.svg"), *folder.glob("*.png")]):
        if picture.name == peers_chart.NAME:
            continue  # with its table
        lines += ["", f"## {picture.stem}", "", f"![{_answers(picture.stem)}](../bench/results/{picture.name})"]
    return "\n".join([*lines, ""])


def _peers(folder: Path, prefix: str) -> list[str]:
    """The table of comparisons and what its figures are."""
    about = "A multiple above 1 is in favor of RLJob: the median of pairs of runs that followed each other, with their range."
    lines = ["## Compared with others", "", about, ""]
    if (folder / peers_chart.NAME).is_file():
        lines += [f"![multiples of all comparisons: medians and ranges]({prefix}{peers_chart.NAME})", ""]
    return [*lines, *peers.table(folder, prefix)]


def _answers(stem: str) -> str:
    """What a result is about: its own line, or that of the measurement with the longest name that it begins with."""
    if stem in PARTS:
        return PARTS[stem]
    fitting = [measurement for measurement in MEASUREMENTS if stem.startswith(measurement.name)]
    return max(fitting, key=lambda one: len(one.name)).answers if fitting else stem


def _table(folder: Path, prefix: str) -> list[str]:
    rows = ["| measurement | result | date, commit | processor |", "|---|---|---|---|"]
    for measurement in MEASUREMENTS:
        for data in sorted(
            folder.glob(f"{measurement.name}*.json"), key=lambda file: file.stem
        ):  # one file a workload where they were measured one by one
            text = data.with_suffix(".md")
            target = text if text.is_file() else data
            values = json.loads(data.read_text())
            found = values.get("machine", {}) if isinstance(values, dict) else {}
            when = f"{found.get('measured_at', '-').removesuffix(' UTC')}, {found.get('commit', '-')}"
            link = f"[{data.stem}]({prefix}{target.name})"
            rows.append(f"| {link}: {_answers(data.stem)} | {_headline(values)} | {when} | {found.get('processor', '-')} |")
    return rows


def _headline(values: object) -> str:
    """The figures that stand for a result, where its file has some: its own headline, or ratios, reaction, switches, largest plan."""
    if not isinstance(values, dict):
        return ""
    found = [values["headline"]] if "headline" in values else []
    if "headline" not in values:
        found += [_beside_trl(workload) for workload in values.get("workloads", [])]
    if peaks := _log_prob_peaks(values.get("points", [])):
        found.append(peaks)
    if "turns" in values and "Served" in values["turns"]:
        merged, served = (min(turn["sync_s"] for turn in values["turns"][way]) for way in ("Merged", "Served"))
        found.append(f"{1000 * served:.0f} ms an update instead of {1000 * merged:.0f} ms")
    dense = [row for row in values.get("rows", []) if isinstance(row, dict) and row.get("way") == "dense, one engine there"]
    found += [f"{row['socket_s'] / row['seconds']:.0%} of a bare socket at {row['mbit']} Mbit/s" for row in dense]
    if "latency" in values:
        found.append(f"RLJob to RayJob p50 {values['latency']['p50_ms']:.0f} ms, p99 {values['latency']['p99_ms']:.0f} ms")
    if "bursts" in values:
        burst = max(values["bursts"], key=lambda one: one["jobs"])
        found.append(f"{burst['jobs']} at once in {burst['all_children_s']:.1f} s")
    if "switch" in values:
        switch, limits, cuda = values["switch"], values["limits"], "duplex_gb_per_s" in values["limits"]
        for way, limit in (("offload", "offload" if cuda else "offload_freed"), ("load", "load" if cuda else "load_fresh")):
            found.append(f"{way} at {100 * switch[f'{way}_gb_per_s'] / limits[f'{limit}_gb_per_s']:.0f} % of bare copies")
    if "growth" in values:
        for name in ("recorded", "random"):
            whole, alone = (values[name][f"rljob_{key}"] / values[name][f"rlinf_{key}"] for key in ("plans_per_s", "placements_per_s"))
            found.append(f"{whole:.1f} times RLinf's plans per second on {name} cases ({alone:.1f} for the placement alone)")
        largest = values["growth"][0]["sides"]["plan"]
        devices, seconds = largest["points"][-1]["devices"], largest["points"][-1]["seconds"]
        found.append(f"{devices:,} devices in {seconds:.2f} s, exponent {largest['exponent']:.2f}")
    return ", ".join(found)


def _beside_trl(workload: dict[str, Any]) -> str:
    """A workload's ratio to TRL: the median of the newest measurement's pairs, or the one that was measured."""
    pairs = pairs_of(workload)
    if len(pairs) == 1:
        return f"{pairs[0]:.2f} times, one pair of runs"
    return f"{statistics.median(pairs):.2f} times in the median of {len(pairs)} pairs ({min(pairs):.2f} to {max(pairs):.2f})"


def _log_prob_peaks(points: list[dict[str, Any]]) -> str | None:
    """Peaks of full logits and of chunks, for the longest sequence of the smallest vocabulary; None where one was not measured."""
    peaks = {(p["vocabulary"], -p["tokens"], p["chunk_tokens"]): p["peak_mib"] for p in points if p["method"] in {"full", "chunked"}}
    for vocabulary, tokens in sorted({key[:2] for key in peaks}):
        full, chunked = (peaks.get((vocabulary, tokens, size)) for size in (0, CHUNK_TOKENS))
        if full is not None and chunked is not None:
            where = f"{-tokens:,} tokens, vocabulary of {vocabulary:,}"
            return f"{where}: {chunked:.0f} MiB in chunks of {CHUNK_TOKENS} tokens, {full:.0f} MiB with full logits"
    return None


if __name__ == "__main__":
    sys.exit(main())
