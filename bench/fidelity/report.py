"""Tables of the fidelity bench."""

from __future__ import annotations

from typing import Any

from bench.fidelity.batches import KINDS, SHARED
from bench.fidelity.compare import TOLERANCE

NAMES = {"trl": "TRL", "verl": "verl"}


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    machine, versions = values["machine"], values["versions"]
    used = "; ".join(f"{NAMES[peer]} {found[peer]} (torch {found['torch']})" for peer, found in versions.items())
    worst = values["worst"]
    return "\n".join(
        [
            "# Fidelity: RLJob's losses and advantages compared with TRL's and verl's",
            "",
            f"Written by `python -m bench.fidelity` on {machine['measured_at']}: {used}, RLJob on torch {machine['versions']['torch']}; "
            f"float32, {values['seeds']} seeds. What is compared and how: [bench/README.md](../README.md).",
            "",
            "## What is shared",
            "",
            f"{values['agree']} of {values['compared']} comparisons agree within {TOLERANCE:g} (absolute up to 1, relative above) in "
            f"every loss, gradient and advantage; the largest is {worst['value']:.1e} ({worst['case']}, {NAMES[worst['peer']]}). "
            "Gradients are with respect to log-probs, entropies and values of every token.",
            "",
            f"| variant | {' | '.join(NAMES.values())} | batches | results |",
            f"|---|{'---:|' * len(NAMES)}---|---|",
            *(_shared_row(row) for row in values["shared"]),
            "",
            "Batches: " + "; ".join(f"*{kind}*: {KINDS[kind]}" for kind in SHARED) + ". *All*: all of these.",
            "",
            "## What differs, and why",
            "",
            "| case | peer | result | RLJob | peer | why |",
            "|---|---|---|---:|---:|---|",
            *(_difference_row(row) for row in values["differences"]),
            "",
            "A row shows the result, and the element of it, with the largest difference. `d_x` is the gradient with respect to x.",
            "",
        ]
    )


def _shared_row(row: dict[str, Any]) -> str:
    cells = [_cell(row["peers"].get(peer)) for peer in NAMES]
    kinds = "all" if set(row["batches"]) == set(SHARED) else ", ".join(row["batches"])
    return f"| {row['case']} | {' | '.join(cells)} | {kinds} | {', '.join(row['results'])} |"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    text = f"{found['value']:.1e}"
    return (
        text
        if found["value"] <= TOLERANCE
        else f"**{text}** ({found['batch']}, {found['result']}: {found['ours']:g} for {found['theirs']:g})"
    )


def _difference_row(row: dict[str, Any]) -> str:
    agree = " **They agree.**" if row["value"] <= TOLERANCE else ""
    return f"| {row['case']} | {NAMES[row['peer']]} | {row['result']} | {row['ours']:.4g} | {row['theirs']:.4g} | {row['why']}{agree} |"
