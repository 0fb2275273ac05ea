"""One table of RLJob beside each of its peers, from what the measurements wrote: ratio, pairs, what is held equal, date and commit.

A ratio above 1 is in favor of RLJob; it is the median, with the range where several pairs of runs were made one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.pairs import spread
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
    ratios: tuple[float, ...]
    """One of each pair."""
    label: str
    """In the picture."""
    machine: Values | None = None
    """Of a part that was measured at another time than the rest of its file."""


def table(folder: Path, prefix: str) -> list[str]:
    """The table as markdown; ``prefix`` leads from the page to ``bench/results``."""
    lines = ["| peer | compared | held equal | RLJob's multiple | date, commit |", "|---|---|---|---|---|"]
    for stem, machine, row in rows(folder):
        when = f"{machine.get('measured_at', '-').removesuffix(' UTC')}, {machine.get('commit', '-')}"
        lines.append(f"| {row.peer} | [{row.what}]({prefix}{stem}.md) | {row.equal} | {spread(row.ratios)} | {when} |")
    return lines


def rows(folder: Path) -> Iterator[tuple[str, Values, Row]]:
    """Every comparison that was measured, with the stem of its file in ``bench/results`` and the machine."""
    for stem, read in READERS.items():
        file = folder / f"{stem}.json"
        if file.is_file():
            values = json.loads(file.read_text())
            for row in read(values):
                yield stem, row.machine or values.get("machine", {}), row


def _short(title: str) -> str:
    """The first words of a workload's title."""
    return title.split(":")[0].split(",")[0]


def _trl(values: Values) -> Iterator[Row]:
    """The pairs of the newest measurement; earlier ones belong to other states of the code and are in the result's page."""
    for workload in values["workloads"]:
        ahead = "; RLJob generates one batch ahead" if workload["key"].endswith("ratio1") else ""
        yield Row(
            peer="TRL, GRPOTrainer",
            what=f"updates per second: {workload['title']}",
            equal=f"model, prompts, batch, rewards, loss, optimizer, float32, two cores{ahead}",
            ratios=tuple(pairs_of(workload)),
            label=f"TRL, updates: {_short(workload['title'])}{', one batch ahead' if ahead else ''}",
        )


def _generation(values: Values) -> Iterator[Row]:
    for workload in values["workloads"]:
        yield Row(
            peer="vLLM alone, LLM.generate",
            what=f"responses per second of a job's generation phase: {workload['title']}",
            equal="model, prompts, samples, limits, log-probs, float32, two threads",
            ratios=tuple(workload["ratios"]),
            label=f"bare vLLM, responses: {_short(workload['title'])}",
        )


def _training(values: Values) -> Iterator[Row]:
    for peer, side in (("TRL, its loss and backward pass", "TRL"), ("plain PyTorch loop", "plain loop")):
        for row in values.get("speed", {}).get("rows", ()):
            yield Row(
                peer=peer,
                what=f"gradients, tokens per CPU second: {row['model']}, {row['case']}",
                equal="model, batch, loss, gradient norms to 1e-4, float32, one thread",
                ratios=tuple(ratios(row, side)),
                label=f"{side}, gradients: {row['model'].split(' (')[0]}, {row['case']}",
                machine=values["speed"]["machine"],
            )


def _placement(values: Values) -> Iterator[Row]:
    for name in ("recorded", "random"):
        cases = values[name]
        for way, found in cases.get("ratios", {}).items():
            yield Row(
                peer="RLinf 0.3.0, its planner",
                what=f"plans per second, {cases['cases']:,} {name} cases, {way}",
                equal="placement, cluster, and devices; equal answers are checked",
                ratios=tuple(found),
                label=f"RLinf, plans: {name} cases, {way}",
            )


def _offload(values: Values) -> Iterator[Row]:
    moved = values["to_cpu"]
    to = moved["stands_for"] == "to"
    for way, found in moved.get("ratios", {}).items():
        yield Row(
            peer='`model.to("cpu")`' if to else "`clone` of each parameter, which `to` is not on a CPU",
            what=f"{way} of parameters",
            equal="parameters, type, device",
            ratios=tuple(found),
            label=f"{'model.to' if to else 'clone'}: {way}",
        )


def _weightsync(values: Values) -> Iterator[Row]:
    largest = max(values["sizes"], key=lambda size: size["mib"])
    peers = {"safetensors": "safetensors file", "objects": "pickled objects through Ray"}
    for way, found in largest.get("ratios", {}).items():
        yield Row(
            peer=peers[way],
            what=f"weight sync of {largest['mib']:,} MiB to two engines",
            equal="weights, machine, engines that only copy; medians",
            ratios=tuple(found),
            label=f"{peers[way]}: weight sync",
        )


def _operator(values: Values) -> Iterator[Row]:
    if found := values.get("ratios"):
        yield Row(
            peer="plain KubeRay: a client that creates the RayJobs and what belongs to them",
            what=f"{values['direct'][0]['rayjobs']:,} jobs at once, jobs per second",
            equal="the same five objects per job; an RLJob and its statuses are added to them",
            ratios=tuple(found),
            label="plain KubeRay: jobs created",
        )


def _recovery(values: Values) -> Iterator[Row]:
    for row in values["rows"]:
        if found := row.get("ratios"):
            yield Row(
                peer="a full restart from the checkpoint, as plain KubeRay retries a RayJob",
                what=f"{row['kind']}: time until two further steps",
                equal="job, machine; a retry's pods would have to be placed in addition",
                ratios=tuple(found),
                label=f"full restart: {row['kind']}",
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
