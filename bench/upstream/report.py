"""The outcome of all examples as Markdown and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.upstream import corpus
from bench.upstream.outcome import OPEN, Outcome, owner_of

NAMES = {"roll": "ROLL", "rlinf": "RLinf"}
MAX_REASONS = 30


def in_scope(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """RL on text, with or without agents and experts."""
    return [outcome for outcome in outcomes if outcome.example.kind in (corpus.TEXT, corpus.MIXTURE, corpus.AGENTIC)]


def wrongly_accepted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Files that must be refused and were converted all the same."""
    return [o for o in outcomes if o.example.kind in corpus.REFUSED and o.refused is None]


def unowned(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Jobs that do not run for a reason that no planned work owns."""
    return [outcome for outcome in in_scope(outcomes) if OPEN in outcome.owners]


def data(outcomes: Sequence[Outcome], versions: dict[str, str], composed: dict[str, int] | None) -> dict[str, Any]:
    """Figures; names of files only where something is open."""
    scope = in_scope(outcomes)
    runnable = [outcome for outcome in scope if outcome.is_valid and not outcome.owners]
    ready = [outcome for outcome in runnable if not outcome.judges]
    still_open, accepted = unowned(outcomes), wrongly_accepted(outcomes)
    waiting = len(scope) - len(runnable) - len(still_open)
    return {
        "headline": f"{len(ready)} of {len(scope)} text jobs are valid and planned as they are, {len(runnable) - len(ready)} once their"
        f" judge's model is served, {waiting} wait for planned work or a missing file, {len(still_open)} are open; {len(accepted)} files"
        " that are not RL jobs of a language model were accepted",
        "versions": versions,
        "kinds": _kinds(outcomes),
        "mixtures": _mixtures(outcomes),
        "reasons": _reasons(outcomes),
        "waits": dict(Counter(owner for outcome in scope for owner in outcome.owners)),
        "open": [outcome.example.name for outcome in still_open],
        "wrongly_accepted": [outcome.example.name for outcome in accepted],
        "hydra": composed,
    }


def _kinds(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for framework, name in NAMES.items():
        for kind in corpus.KINDS:
            chosen = [o for o in outcomes if o.example.framework == framework and o.example.kind == kind]
            if chosen:
                rows.append(
                    {
                        "framework": name,
                        "kind": kind,
                        "files": len(chosen),
                        "refused": sum(o.refused is not None for o in chosen),
                        "crashed": sum(o.crashed is not None for o in chosen),
                        "valid": sum(o.is_valid for o in chosen),
                        "planned": sum(o.is_planned for o in chosen),
                        "functions": sum(o.functions > 0 for o in chosen),
                        "judges": sum(o.judges for o in chosen),
                        "waits": dict(sorted(Counter(owner for o in chosen for owner in o.owners).items())),
                    }
                )
    return rows


def _mixtures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Jobs on text or with agents that train a mixture of experts, by framework."""
    found = {}
    for framework, name in NAMES.items():
        chosen = [o for o in in_scope(outcomes) if o.example.framework == framework and o.is_mixture]
        if chosen:
            found[name] = {"files": len(chosen), "valid": sum(o.is_valid for o in chosen), "planned": sum(o.is_planned for o in chosen)}
    return found


def _reasons(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Reasons among jobs on text, most frequent first."""
    counts: Counter[str] = Counter()
    for outcome in in_scope(outcomes):
        counts.update(outcome.problems)
        counts.update([outcome.refused] if outcome.refused else [])
        counts.update([outcome.crashed] if outcome.crashed else [])
    return [{"reason": reason, "files": number, "owner": owner_of(reason)} for reason, number in counts.most_common(MAX_REASONS)]


def markdown(figures: dict[str, Any]) -> str:
    """The tables."""
    lines = ["# Upstream examples", "", f"{figures['headline']}.", ""]
    lines += [", ".join(f"{name} at {version}" for name, version in figures["versions"].items()) + ".", ""]
    lines += [
        "| | kind | files | refused | crashed | valid | planned | with rewards to write | with a judge to serve | waits for (files) |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in figures["kinds"]:
        waits = ", ".join(f"{owner} {number}" for owner, number in row["waits"].items())
        cells = [row[key] for key in ("framework", "kind", "files", "refused", "crashed", "valid", "planned", "functions", "judges")]
        lines.append("| " + " | ".join(str(cell) for cell in (*cells, waits)) + " |")
    if figures["mixtures"]:
        counts = (f"{m['valid']} of {m['files']} of {name} valid, {m['planned']} planned" for name, m in figures["mixtures"].items())
        lines += ["", f"Jobs whose model is a mixture of experts, on text or with agents: {'; '.join(counts)}."]
    lines += ["", "Reasons among jobs on text:", "", "| reason | files | owned by |", "|---|---|---|"]
    lines += [f"| {row['reason'].replace('|', '/')} | {row['files']} | {row['owner']} |" for row in figures["reasons"]]
    for key, title in (("open", "Open"), ("wrongly_accepted", "Accepted without being RL jobs of language models")):
        if figures[key]:
            lines += ["", f"{title}: {', '.join(figures[key])}."]
    if figures["hydra"] is not None:
        lines += ["", f"Composed as Hydra does: {figures['hydra']['equal']} of {figures['hydra']['files']} files of RLinf."]
    return "\n".join([*lines, ""])
