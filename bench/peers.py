"""One table of RLJob beside each of its peers, from what the measurements wrote: ratio, pairs, what is held equal, date and commit.

A ratio above 1 is in favor of RLJob; it is the median, with the range where several pairs of runs were made one after the other.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.training.report import ratios
from bench.trl.report import pairs_of

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison."""

    peer: str
    what: str
    equal: str
    """Held equal on both sides."""
    ratio: str
    machine: Values | None = None
    """Of a part that was measured at another time than the rest of its file."""


def table(folder: Path, prefix: str) -> list[str]:
    """The table as markdown; ``prefix`` leads from the page to ``bench/results``."""
    lines = ["| peer | compared | held equal | RLJob's multiple | date, commit |", "|---|---|---|---|---|"]
    for stem, machine, row in rows(folder):
        when = f"{machine.get('measured_at', '-').removesuffix(' UTC')}, {machine.get('commit', '-')}"
        lines.append(f"| {row.peer} | [{row.what}]({prefix}{stem}.md) | {row.equal} | {row.ratio} | {when} |")
    return lines


def rows(folder: Path) -> Iterator[tuple[str, Values, Row]]:
    """Every comparison that was measured, with the stem of its file in ``bench/results`` and the machine."""
    for stem, read in READERS.items():
        file = folder / f"{stem}.json"
        if file.is_file():
            values = json.loads(file.read_text())
            for row in read(values):
                yield stem, row.machine or values.get("machine", {}), row


def _spread(found: Sequence[float]) -> str:
    if len(found) == 1:
        return f"{found[0]:.2f}, one pair"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}, {len(found)} pairs)"


def _trl(values: Values) -> Iterator[Row]:
    """The pairs of the newest measurement; earlier ones belong to other states of the code and are in the result's page."""
    for workload in values["workloads"]:
        ahead = "; RLJob generates one batch ahead" if workload["key"].endswith("ratio1") else ""
        yield Row(
            peer="TRL, GRPOTrainer",
            what=f"updates per second: {workload['title']}",
            equal=f"model, prompts, batch, rewards, loss, optimizer, float32, two cores{ahead}",
            ratio=_spread(pairs_of(workload)),
        )


def _generation(values: Values) -> Iterator[Row]:
    for workload in values["workloads"]:
        yield Row(
            peer="vLLM alone, LLM.generate",
            what=f"responses per second of a job's generation phase: {workload['title']}",
            equal="model, prompts, samples, limits, log-probs, float32, two threads",
            ratio=_spread(workload["ratios"]),
        )


def _training(values: Values) -> Iterator[Row]:
    for peer, side in (("TRL, its loss and backward pass", "TRL"), ("plain PyTorch loop", "plain loop")):
        for row in values.get("speed", {}).get("rows", ()):
            yield Row(
                peer=peer,
                what=f"gradients, tokens per CPU second: {row['model']}, {row['case']}",
                equal="model, batch, loss, gradient norms to 1e-4, float32, one thread",
                ratio=_spread(ratios(row, side)),
                machine=values["speed"]["machine"],
            )


def _placement(values: Values) -> Iterator[Row]:
    for title, key in (("from configuration to placement", "plans_per_s"), ("the placement alone", "placements_per_s")):
        for name in ("recorded", "random"):
            cases = values[name]
            yield Row(
                peer="RLinf 0.3.0, its planner",
                what=f"plans per second {title}, {cases['cases']:,} {name} cases",
                equal="placement, cluster, and devices; equal answers are checked",
                ratio=f"{cases[f'rljob_{key}'] / cases[f'rlinf_{key}']:.1f}",
            )


def _offload(values: Values) -> Iterator[Row]:
    switch, moved = values["switch"], values["to_cpu"]
    for way in ("offload", "load"):
        yield Row(
            peer='`model.to("cpu")`' if moved["stands_for"] == "to" else "`clone` of each parameter, which `to` is not on a CPU",
            what=f"{way} of parameters",
            equal="parameters, type, device",
            ratio=f"{moved[f'{way}_s'] / switch[f'params_{way}_s']:.2f}",
        )


def _weightsync(values: Values) -> Iterator[Row]:
    largest = max(values["sizes"], key=lambda size: size["mib"])
    for key, peer in (("safetensors", "safetensors file"), ("objects", "pickled objects through Ray")):
        own, other = largest["SharedMemory, engines generate"], largest[key]
        yield Row(
            peer=peer,
            what=f"weight sync of {largest['mib']:,} MiB to two engines",
            equal="weights, machine, engines that only copy; the median of both",
            ratio=f"{other['median_s'] / own['median_s']:.1f}",
        )


def _operator(values: Values) -> Iterator[Row]:
    direct = values["direct"]
    burst = next(b for b in values["bursts"] if b["jobs"] == direct["rayjobs"])
    yield Row(
        peer="plain KubeRay: a client that creates the RayJobs and what belongs to them",
        what=f"{direct['rayjobs']:,} jobs at once, jobs per second",
        equal="the same five objects per job; an RLJob and its statuses are added to them",
        ratio=f"{direct['all_objects_s'] / burst['all_children_s']:.2f}",
    )


def _recovery(values: Values) -> Iterator[Row]:
    found = {row["kind"]: row for row in values["rows"]}
    full = found["everything killed"]["p50_s"]
    for kind, row in found.items():
        if kind != "everything killed":
            yield Row(
                peer="a full restart from the checkpoint, as plain KubeRay retries a RayJob",
                what=f"{kind}: time until two further steps",
                equal="job, machine; a retry's pods would have to be placed in addition",
                ratio=f"{full / row['p50_s']:.1f}",
            )


READERS: Mapping[str, Callable[[Values], Iterator[Row]]] = {
    "trl": _trl,
    "trl-i": _trl,
    "trl-i-ratio1": _trl,
    "trl-ii": _trl,
    "trl-iii": _trl,
    "generation": _generation,
    "training": _training,
    "placement": _placement,
    "offload": _offload,
    "weightsync": _weightsync,
    "operator": _operator,
    "recovery": _recovery,
}
