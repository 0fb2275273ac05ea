"""The figures as markdown."""

from __future__ import annotations

import math
from typing import Any

from bench.pairs import spread


def report(values: dict[str, Any]) -> str:
    """The figures as markdown."""
    where, switch = values["machine"], values["switch"]
    cuda = where["accelerator"] is not None
    lines = [
        f"# Offload on {where['accelerator'] or 'a CPU'}",
        "",
        f"Written by `python -m bench.offload --device {'cuda' if cuda else 'cpu'}` on {where['measured_at']}, in"
        f" {values['duration_s']:.0f} s: {where['processor']}, {where['cores']} cores, load {where['load_before']:.1f} before; Python"
        f" {where['python']}, torch {where['torch']}. What is compared and how: [bench/README.md](../README.md).",
        "",
        f"{switch['bytes'] / 2**20:,.0f} MiB of float32 parameters and AdamW states, chunks of {values['chunk_bytes'] // 2**20} MiB, "
        "all bytes equal afterwards.",
        "",
        *_rates(values),
        "",
        *_peers(values, cuda),
        "",
        "| memory | MiB |",
        "|---|---:|",
        *(
            f"| {text} | {switch[key] / 2**20:,.0f} |"
            for text, key in (
                ("on the device, loaded", "device_bytes_there"),
                ("on the device, offloaded", "device_bytes_away"),
                ("kept by the device's allocator, offloaded", "device_reserved_bytes_away"),
                ("peak on the device during switches", "device_peak_bytes_of_a_switch"),
                ("host memory kept for it", "host_bytes_kept"),
            )
        ),
        "",
        f"Host memory is allocated once, in {switch['reserve_s']:.3f} s; the first offload took {switch['first_offload_s']:.3f} s."
        + ("" if switch["release_s"] is None else f" In an offload, freeing memory in the driver takes {switch['release_s']:.3f} s."),
        "",
    ]
    return "\n".join(lines)


def _rates(values: dict[str, Any]) -> list[str]:
    """Rows of both directions against the limits."""
    limit, switch, both = values["limits"], values["switch"], values["duplex"]
    lines = ["| | seconds | GB/s | limit: bare copies, GB/s | share of the limit |", "|---|---:|---:|---:|---:|"]
    bare = "" if values["machine"]["accelerator"] else ", against memcpy alone"
    for name in ("offload", "load"):
        lines.append(_row(name + bare, switch[f"{name}_s"], switch[f"{name}_gb_per_s"], limit[f"{name}_gb_per_s"]))
    if "duplex_gb_per_s" in limit:
        return [*lines, _row("both at once", both["together_s"], both["together_gb_per_s"], limit["duplex_gb_per_s"])]
    return [
        *lines,
        _row("offload, against memcpy and free", switch["offload_s"], switch["offload_gb_per_s"], limit["offload_freed_gb_per_s"]),
        _row("load, against memcpy into new memory", switch["load_s"], switch["load_gb_per_s"], limit["load_fresh_gb_per_s"]),
    ]


def _peers(values: dict[str, Any], cuda: bool) -> list[str]:
    """Rows of what else one could do."""
    switch, both, peers, policy = (values[key] for key in ("switch", "duplex", "to_cpu", "cpu_offload_policy"))
    ours_s, theirs_s = peers["rljob_offload_s"] + peers["rljob_load_s"], peers["offload_s"] + peers["load_s"]
    extra_s = policy["policy_update_s"] - policy["resident_update_s"]
    pair_s = (switch["offload_s"] + switch["load_s"]) * policy["parameter_bytes"] / values["parameter_bytes"]
    even = "on a CPU this policy moves nothing" if not cuda else "no difference measured"
    if cuda and extra_s > 0:
        even = f"switching is faster from {max(1, math.ceil(pair_s / extra_s))} updates per phase on"
    stand_in = "" if cuda else " (here a clone stands for each direction)"
    return [
        "| comparison | ours | the other | |",
        "|---|---:|---:|---|",
        f"| two components swap: concurrently, or one after the other | {both['together_s']:.3f} s | {both['serial_s']:.3f} s |"
        f" {both['times']:.2f} times as fast |",
        f"| offloading and loading parameters, compared with `model.to`{stand_in} | {ours_s:.3f} s | {theirs_s:.3f} s |"
        f" offload {spread(peers['ratios']['offload'])} times as fast, load {spread(peers['ratios']['load'])} |",
        f"| an update: all resident, or with CPUOffloadPolicy | {policy['resident_update_s']:.3f} s | {policy['policy_update_s']:.3f} s |"
        f" a switch of this model and its states takes {pair_s:.3f} s: {even} |",
    ]


def _row(name: str, seconds: float, rate: float, limit: float) -> str:
    return f"| {name} | {seconds:.3f} | {rate:.2f} | {limit:.2f} | {100 * rate / limit:.0f} % |"
