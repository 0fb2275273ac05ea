"""The figures as markdown and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.measure import RESULTS
from bench.pairs import spread

STEM = "weightsync"
TRANSPORTS = (
    "SharedMemory, engines at rest", "SharedMemory, engines generate", "ObjectStore", "TCP", "NCCL's, over gloo", "IPC's, between processes"
)  # fmt: skip
PEERS = ("broadcast", "safetensors", "objects")
WAYS = (*TRANSPORTS, *PEERS)
OWN, COMPARED = TRANSPORTS[1], PEERS[1:]
"""What is measured in pairs: our transport, and its peers."""
SPARSE = TRANSPORTS[1:3]
"""What is measured with a part of the weights changed."""
TITLES = {"broadcast": "gloo broadcast, bare", "safetensors": "safetensors file", "objects": "pickled objects"}


def num_counted(row: Mapping[str, Any]) -> int:
    """Syncs through our transport that count."""
    return len(row[OWN]["all_s"])


def headline(values: dict[str, Any]) -> str:
    """The largest model in one sentence: medians, and the share of bare copies, of which only the fastest is kept."""
    row = values["sizes"][-1]
    here_s, idle_s = row[WAYS[1]]["median_s"], row[WAYS[0]]["seconds"]
    times = {way: row[way]["median_s"] / here_s for way in WAYS[2:]} | {way: statistics.median(row["ratios"][way]) for way in COMPARED}
    counted = num_counted(row)
    return (
        f"{row['mib']:,} MiB to {values['engines']} engines that generate in {here_s:.2f} s through shared memory (median of "
        f"{counted}), {times['broadcast']:.1f} times that by gloo's broadcast, {times['ObjectStore']:.1f} through the object "
        f"store, {times['safetensors']:.1f} by a file, {times['objects']:.1f} as pickled objects; with idle engines the fastest reaches "
        f"{row['bare_s'] / idle_s:.0%} of the speed of bare copies between the same processes"
    )


def markdown(values: dict[str, Any]) -> str:
    """Tables by size and by what changed."""
    where = values["machine"]
    lines = [
        "# Weight syncs by transport",
        "",
        f"Written by `python -m bench.weightsync` on {where['measured_at']}, in {values['duration_s']:.0f} s: {where['processor']}, "
        f"{where['cores']} cores, load {values['load_before']:.1f} before; {where['versions']}. What is compared and how: "
        "[bench/README.md](../README.md).",
        "",
        f"{values['headline']}.",
        "",
        f"One trainer rank, {values['engines']} engines, bfloat16, buckets of {values['bucket_bytes'] >> 20} MiB. Seconds of a sync, the "
        f"fastest of {values['repeat']} or more and their median; GB/s of the model's bytes; limit: the speed of bare copies "
        "between as many processes, with two alternating segments, is 100 %; memcpys: the time in copies of the model within one process. "
        "Without GPUs, NCCL and IPC are represented by the same transports between processes on the host.",
        "",
        "| MiB | way | seconds | median | GB/s | limit | memcpys | stall, s | hidden, s |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in values["sizes"]:
        for way in WAYS:
            lines.append(_row(row, way))
    lines += ["", f"Rounds of {OWN}, of a file, and of objects alternate; how much longer each took in the medians of a round:", ""]
    lines += ["| MiB | " + " | ".join(TITLES[way] for way in COMPARED) + " |", "|---:|" + "---|" * len(COMPARED)]
    lines += [f"| {row['mib']:,} | " + " | ".join(spread(row["ratios"][way]) for way in COMPARED) + " |" for row in values["sizes"]]
    kinds = [f"{way}, {kind}" for way in SPARSE for kind in ("dense", "sparse")]
    lines += [
        "",
        f"![seconds by size and by what changed]({STEM}.svg)",
        "",
        f"{values['sparse_mib']} MiB of which a part changes between two syncs; sparse sends what changed where that is smaller.",
        "",
        "| changed | " + " | ".join(f"{kind}, s" for kind in kinds) + " | sparse bytes of dense |",
        "|---:|" + "---:|" * (len(kinds) + 1),
    ]
    for row in values["changes"]:
        share = row["ObjectStore, sparse"]["bytes"] / row["ObjectStore, dense"]["bytes"]
        cells = " | ".join(f"{row[kind]['seconds']:.3f}" for kind in kinds)
        lines.append(f"| {row['changed']:.1%} | {cells} | {share:.2%} |")
    return "\n".join([*lines, ""])


def _row(row: dict[str, Any], way: str) -> str:
    found = row[way]
    seconds, size = found["seconds"], row["mib"] << 20
    stall = [f"{found[key]:.4f}" if key in found else "" for key in ("stall_s", "hidden_s")]
    return (
        f"| {row['mib']:,} | {TITLES.get(way, way)} | {seconds:.4f} | {found['median_s']:.4f} | {size / seconds / 1e9:.2f} | "
        f"{row['bare_s'] / seconds:.0%} | {seconds / row['memcpy_s']:.1f} | {stall[0]} | {stall[1]} |"
    )


def draw(values: dict[str, Any]) -> None:
    """``results/weightsync.svg``."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rljob", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, (by_size, by_change) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = [row["mib"] for row in values["sizes"]]
    for way in WAYS:
        by_size.plot(sizes, [row[way]["seconds"] for row in values["sizes"]], marker="o", label=TITLES.get(way, way))
    by_size.plot(sizes, [row["bare_s"] for row in values["sizes"]], "k-", label="bare copies between the processes")
    by_size.plot(sizes, [row["memcpy_s"] for row in values["sizes"]], "k--", label="one memcpy")
    by_size.set(xscale="log", yscale="log", xlabel="MiB of weights", ylabel="seconds of a sync")
    changed = [100 * row["changed"] for row in values["changes"]]
    for way in SPARSE:
        for kind, style in (("dense", "--"), ("sparse", "-")):
            by_change.plot(
                changed, [row[f"{way}, {kind}"]["seconds"] for row in values["changes"]], style, marker="o", label=f"{way}, {kind}"
            )
    by_change.set(
        xscale="log", xlabel=f"% of the numbers that changed, {values['sparse_mib']} MiB", ylabel="seconds of a sync", ylim=(0, None)
    )
    for axes in (by_size, by_change):
        axes.grid(visible=True, linewidth=0.4)
        axes.legend(fontsize="x-small")
    figure.savefig(RESULTS / f"{STEM}.svg", metadata={"Date": None})
    pyplot.close(figure)
