"""The figures as markdown."""

from __future__ import annotations

import statistics
from typing import Any

from bench.training.rows import SAMPLES_PER_PROMPT

MIB = 2**20


def ratios(result: dict[str, Any], other: str) -> list[float]:
    """RLJob's tokens a second over another side's, round by round."""
    rates = result["tokens_per_cpu_s"]
    return [own / others for own, others in zip(rates["RLJob"], rates[other], strict=True)]


def memory_error(row: dict[str, Any]) -> float:
    """Estimate of the peak over what was measured, minus 1."""
    return float(row["estimated"]["peak_bytes"] / row["measured"]["peak_bytes"] - 1)


def headline(values: dict[str, Any]) -> str:
    """What came out, in a line."""
    found = []
    if "speed" in values:
        lowest = min(statistics.median(ratios(row, "TRL")) for row in values["speed"]["rows"])
        found.append(f"at least {lowest:.2f} times TRL's tokens per second")
    if "memory" in values:
        errors = [100 * memory_error(row) for row in values["memory"]["rows"]]
        found.append(f"estimate of memory {min(errors):+.0f} to {max(errors):+.0f} % of the peaks of {len(errors)} trainers")
    return ", ".join(found)


def report(values: dict[str, Any]) -> str:
    """Everything that was measured."""
    lines = ["# The trainer's tokens per second and core, and its memory", "", "Written by `python -m bench.training`.", ""]
    if "speed" in values:
        lines += _speed(values["speed"])
    if "memory" in values:
        lines += _memory(values["memory"])
    return "\n".join(lines)


def _where(part: dict[str, Any]) -> str:
    machine = part["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['measured_at']}, commit {part['commit']}: {machine['processor']}, {machine['cores']} cores, "
        f"load of all programs {part['load_before']:.1f} before and {part['load_after']:.1f} after; {versions}."
    )


def _speed(part: dict[str, Any]) -> list[str]:
    rows = part["rows"]
    lines = [
        "## Tokens per second of CPU time",
        "",
        _where(part),
        "",
        f"One process, one thread; the sides alternately compute the gradients of the same batches, {len(rows[0]['tokens'])} rounds. "
        f"Equal on all sides: model, float32, batch, GRPO loss (gradient norms agree to {rows[0]['norm_tolerance']:.0e} in every round), "
        f"at most {rows[0]['token_budget']:,} tokens per pass with padding, all logits of a pass in memory at once. "
        "Tokens are those of prompts and responses, for each sequence. "
        f"{SAMPLES_PER_PROMPT} responses share a prompt, which RLJob may compute once. Included: RLJob's batching, TRL's "
        "own metrics and entropies. Excluded: the optimizer. TRL pads to the longest sequence of the batch, the plain loop to the longest "
        "of a pass and without a mask. Ratios are RLJob's rate over the other's, per round: median (range).",
        "",
        "| model | lengths | tokens | RLJob, tokens/s | TRL | plain loop | ratio to TRL | ratio to the plain loop |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        rates = [f"{statistics.median(row['tokens_per_cpu_s'][side]):,.0f}" for side in ("RLJob", "TRL", "plain loop")]
        beside = [_ratio_text(ratios(row, side)) for side in ("TRL", "plain loop")]
        model = f"{row['model']}, {row['parameters'] / 1e6:.1f} M"
        lines.append("| " + " | ".join([model, row["case"], f"{statistics.fmean(row['tokens']):,.0f}", *rates, *beside]) + " |")
    return [*lines, ""]


def _ratio_text(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def _memory(part: dict[str, Any]) -> list[str]:
    lines = [
        "## Memory of a training step",
        "",
        _where(part),
        "",
        "Rank 0 on the CPU, float32, two micro-batches of full length: the most bytes of tensors at one time, beside the fullest phase of "
        "*rljob plan*'s estimate without the process itself.",
        "",
        "| trainer | ranks | between steps, MiB | estimate | peak, MiB | estimate | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in part["rows"]:
        sizes = [f"{row[way][key] / MIB:.1f}" for key in ("state_bytes", "peak_bytes") for way in ("measured", "estimated")]
        lines.append("| " + " | ".join([row["case"], str(row["ranks"]), *sizes, f"{100 * memory_error(row):+.0f} %"]) + " |")
    return [*lines, ""]
