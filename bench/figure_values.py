"""What a result contributes to a page: figures as they are printed, from the values of its JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.training.report import ratios
from bench.trl.report import pairs_of
from bench.weightsync.report import num_counted

Values = Mapping[str, Any]
PEAK = "peak of a training step"
MEMORY = ("weights and moments", PEAK)
CLUSTER_STEPS = {
    "set up": "`make setup`",
    "cluster": "Kubernetes built from source and started",
    "images": "both images",
    "first training step": "`kubectl apply` to the first training step",
    "end of the job": "the other steps",
}
"""What steps of the way to a cluster are called on a page."""


def in_order(figures: Sequence[str], *order: int) -> list[str]:
    """The figures in another order."""
    return [figures[number] for number in order]


def way(values: Values, word: str) -> Mapping[str, Any]:
    """A newcomer's way, by a word of its name.

    Raises:
        KeyError: it was not measured.
    """
    for found in values["ways"]:
        if word in found["name"]:
            chosen: Mapping[str, Any] = found
            return chosen
    raise KeyError(f"newcomer.json has no way with {word!r} in its name, only {[found['name'] for found in values['ways']]}")


def step_s(values: Values, word: str, what: str) -> float:
    """Seconds of one step of a way."""
    (found,) = [step for step in way(values, word)["steps"] if step["what"] == what]
    return float(found["seconds"])


def newcomer_clone(values: Values) -> list[str]:
    """Minutes to the learning curve, seconds of setup."""
    return [f"{way(values, 'clone')['total_s'] / 60:.1f}", f"{step_s(values, 'clone', 'set up'):.0f}"]


def newcomer_steps(values: Values) -> list[str]:
    """Seconds to the learning curve, of setup, of model and run."""
    found_s = (way(values, "clone")["total_s"], step_s(values, "clone", "set up"), step_s(values, "clone", "model and run"))
    return [f"{one_s:.0f}" for one_s in found_s]


def quickstart_transcript(values: Values) -> list[str]:
    """What ``make run`` printed."""
    lines = list(way(values, "clone").get("transcript", ()))
    return ["```", *lines, "```"] if lines else []


def cluster_transcript(values: Values) -> list[str]:
    """What ``kubectl get rlj -w`` printed, and how long the steps to it took; empty where it was not measured."""
    if not any("cluster" in found["name"] for found in values["ways"]):
        return []
    total_s, rows = way(values, "cluster")["total_s"], way(values, "cluster")["transcript"]
    parts = ", ".join(
        f"{CLUSTER_STEPS.get(one['what'], one['what'])} {one['seconds']:,.0f} s"
        for one in way(values, "cluster")["steps"]
        if one["seconds"] >= 10
    )
    busy = way(values, "cluster")["foreign_load"]
    return [
        "```", *thinned(rows), "```", "",
        f"From a fresh clone to the end of this job it took [{total_s / 60:.1f} minutes](bench/results/newcomer.md)"
        f"{' while other programs kept both cores busy' if busy > 1 else ''}:",
        f"{parts}.",
    ]  # fmt: skip


def thinned(rows: Sequence[str], most: int = 9) -> list[str]:
    """The header, the first row of each status, the last row, and of the others as many as fit, evenly."""
    status = [row.split()[1] for row in rows]
    chosen = {status.index(one) for one in status} | {len(rows) - 1}
    others = [number for number in range(len(rows)) if number not in chosen]
    free = max(0, most - len(chosen))
    chosen |= {others[len(others) * one // free] for one in range(min(free, len(others)))}
    return [rows[number] for number in sorted(chosen)]


def gpu_lines(values: Values) -> list[str]:
    """How many lines there are, and how many passed."""
    return [f"{len(values['lines'])}", f"{sum(line['verdict'] == 'PASS' for line in values['lines'])}"]


def gpu_memory(values: Values) -> list[str]:
    """State compared with the estimate, least and most, and the peak of a step at each size; in percent."""
    lines = [line for line in values["lines"] if line["check"].startswith("train-") and line["compared"] is not None]
    state, peaks = ([100 * line["compared"] for line in lines if line["what"] == what] for what in MEMORY)
    return [f"{percent:.0f}" for percent in (min(state), max(state), *peaks)]


def upstream(values: Values) -> list[str]:
    """Text jobs that are planned as they are, all text jobs."""
    kinds = [kind for kind in values["kinds"] if kind["kind"].startswith(("RL on text", "RL with agents"))]
    return [str(sum(kind["planned"] for kind in kinds)), str(sum(kind["files"] for kind in kinds))]


def placement(values: Values) -> list[str]:
    """RLinf's time compared with RLJob's on recorded and random cases, medians of pairs: whole, placement alone."""
    found = {
        way: [statistics.median(values[cases]["ratios"][way]) for cases in ("recorded", "random")] for way in ("whole", "placement alone")
    }
    return [*(f"{one:.1f}" for one in found["whole"]), *(f"{one:.2f}" for one in found["placement alone"])]


def recorded_placement(values: Values) -> list[str]:
    """The same on recorded cases alone."""
    whole, _, alone, _ = placement(values)
    return [whole, f"{float(alone):.1f}"]


def largest_plan(values: Values) -> str:
    """Seconds of the plan for 100,000 devices."""
    (point,) = [point for point in values["growth"][0]["sides"]["plan"]["points"] if point["devices"] == 100_000]
    return f"{point['seconds']:.2f}"


def agreeing(values: Values) -> list[str]:
    """Comparisons that agree, all comparisons."""
    return [str(values["agree"]), str(values["compared"])]


def fidelity(values: Values) -> list[str]:
    """The same, the largest difference, known differences."""
    return [*agreeing(values), f"{values['worst']['value']:.1e}".replace("e-0", "e-"), str(len(values["differences"]))]


def _ahead(values: Values, side: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in values["summary"] if one["side"] == side)
    return found


def ahead(values: Values) -> list[str]:
    """Speedups of one and two batches ahead, the bound, pairs of runs."""
    one, two = _ahead(values, "ratio 1"), _ahead(values, "ratio 2")
    return [f"{one['speed_up']:.2f}", f"{two['speed_up']:.2f}", f"{one['bound']:.2f}", str(len(one["speed_ups"]))]


def trl(values: Values) -> list[str]:
    """The newest measurement alone: median, smallest, and largest multiple of TRL's updates per second; pairs."""
    (workload,) = values["workloads"]
    pairs = pairs_of(workload)
    return [f"{statistics.median(pairs):.2f}", f"{min(pairs):.2f}", f"{max(pairs):.2f}", str(len(pairs))]


def trl_range(values: Values) -> list[str]:
    """The same without the pairs."""
    return trl(values)[:3]


def trl_steps(values: Values) -> list[str]:
    """The same, and the measured steps of a run."""
    return [*trl(values), str(values["workloads"][0]["runs"][0]["steps"])]


def trl_parts(values: Values) -> list[str]:
    """Mean seconds of RLJob's step and of its parts; of TRL's generation and the rest of its step."""
    by_side = {side: [run for run in values["workloads"][0]["runs"] if run["side"] == side] for side in ("RLJob", "TRL")}

    def part_s(side: str, part: str) -> str:
        return f"{statistics.fmean(run['parts_mean_s'][part] for run in by_side[side]):.3f}"

    step_mean_s = statistics.fmean(run["step_mean_s"] for run in by_side["RLJob"])
    own = [part_s("RLJob", part) for part in ("generate", "train", "sync", "reward")]
    return [f"{step_mean_s:.3f}", *own, part_s("TRL", "generate"), part_s("TRL", "rest")]


def gradients(values: Values, case: str) -> str:
    """The multiple of TRL's gradients per second, dense model."""
    (row,) = [row for row in values["speed"]["rows"] if row["case"] == case and row["model"].startswith("dense")]
    return f"{statistics.median(ratios(row, 'TRL')):.1f}"


def faults(values: Values) -> list[str]:
    """Injected faults that were handled correctly, all of them."""
    rows = [row for layer in values["layers"].values() for row in layer["table"]]
    every, wrong = (sum(row[key] for row in rows) for key in ("faults", "wrong"))
    return [f"{every - wrong:,}", f"{every:,}"]


def _largest(values: Values) -> Mapping[str, Any]:
    (found,) = [size for size in values["sizes"] if size["mib"] == 1024]
    size: Mapping[str, Any] = found
    return size


def _times(values: Values, way_there: str) -> str:
    row = _largest(values)
    if way_there in row["ratios"]:
        return f"{statistics.median(row['ratios'][way_there]):.1f}"
    return f"{row[way_there]['median_s'] / row['SharedMemory, engines generate']['median_s']:.1f}"


def _of_bare(values: Values) -> str:
    return f"{100 * _largest(values)['bare_s'] / _largest(values)['SharedMemory, engines at rest']['seconds']:.0f}"


def sync(values: Values) -> list[str]:
    """Seconds for 1 GiB beside generating engines; repetitions; multiples of a file and of objects; share of bare copies."""
    own_s = _largest(values)["SharedMemory, engines generate"]["median_s"]
    repeat = str(num_counted(_largest(values)))
    return [f"{own_s:.2f}", repeat, _times(values, "safetensors"), _times(values, "objects"), _of_bare(values)]


def sync_all(values: Values) -> list[str]:
    """The same with all transports."""
    own_s, repeat = sync(values)[:2]
    others = [_times(values, one) for one in ("ObjectStore", "broadcast", "safetensors", "objects")]
    return [repeat, own_s, *others, _of_bare(values)]
