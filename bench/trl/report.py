"""The figures as a table for the terminal and as markdown."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import machine_text

MIB = 2**20


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, TRL, RLJob) of one workload."""
    by_side = {side: [r for r in result["runs"] if r["side"] == side] for side in ("TRL", "RLJob")}
    summary = result["summary"]

    def both(label: str, text: Any) -> tuple[str, str, str]:
        return (label, *(text(side, by_side[side]) for side in ("TRL", "RLJob")))

    found = [
        both("updates/s, median", lambda side, _: f"{summary['updates_per_s'][side]:.3g}"),
        both("updates/s, each run", lambda _, runs: ", ".join(f"{r['updates_per_s']:.3g}" for r in runs)),
        both("seconds per step", lambda _, runs: _mean(runs, "step_mean_s", "{:.3f}")),
    ]
    for part in ("generate", "reward", "train", "sync", "rest"):
        found.append(both(f"  of which {part}", lambda _, runs, part=part: _part(runs, part)))
    found += [
        both("response tokens, mean", lambda _, runs: _length(runs, "mean")),
        both("  p50 / p90 / p99 / max", lambda _, runs: " / ".join(_length(runs, q) for q in ("p50", "p90", "p99", "max"))),
        both("reward, first step", lambda _, runs: _mean(runs, "reward_first", "{:.3f}")),
        both("reward, last five steps", lambda _, runs: _mean(runs, "reward_last", "{:.3f}")),
        both("peak memory, all processes", lambda _, runs: f"{max(r['peak_rss_bytes'] for r in runs) / MIB:.0f} MiB"),
        both("wall time of a run, including start-up", lambda _, runs: _mean(runs, "wall_s", "{:.0f} s")),
        both("load of other programs", lambda _, runs: _mean(runs, "foreign_load", "{:.1f}")),
    ]
    return found


def _mean(runs: list[dict[str, Any]], key: str, form: str) -> str:
    return form.format(sum(r[key] for r in runs) / len(runs))


def _part(runs: list[dict[str, Any]], part: str) -> str:
    values = [r["parts_mean_s"][part] for r in runs if part in r["parts_mean_s"]]
    return f"{sum(values) / len(values):.3f}" if values else "-"


def _length(runs: list[dict[str, Any]], key: str) -> str:
    values = [r["lengths"][key] for r in runs if key in r["lengths"]]
    if not values:
        return "-"
    if key == "max":
        return f"{max(values):.0f}"
    errors = [r["lengths"]["mean_error"] for r in runs if "mean_error" in r["lengths"]] if key == "mean" else []
    text = f"{sum(values) / len(values):.1f}"
    return f"{text} ± {max(errors):.1f}" if errors else text


def verdict(result: dict[str, Any]) -> str:
    """The ratio in a sentence."""
    summary = result["summary"]
    runs = len(result["runs"]) // 2
    spread = f" ({summary['ratio_lowest']:.2f} to {summary['ratio_highest']:.2f} over {runs} pairs)" if runs > 1 else ""
    word = "reached" if summary["reached"] else "missed"
    return f"RLJob makes {summary['ratio']:.2f} times TRL's updates per second{spread}; aim {summary['aim']:.1f} in each pair, {word}"


def pairs_of(result: dict[str, Any]) -> list[float]:
    """Ratios of RLJob's updates per second to TRL's, pair by pair of runs that followed each other."""
    by_side = {side: [r["updates_per_s"] for r in result["runs"] if r["side"] == side] for side in ("TRL", "RLJob")}
    return [own / trl for trl, own in zip(by_side["TRL"], by_side["RLJob"], strict=True)]


def history(values: dict[str, Any]) -> list[str]:
    """All measurements of each workload, where there are several: machine, day and pairs of each, median and range over all pairs."""
    lines = []
    for key in [w["key"] for w in values["workloads"]] if values.get("earlier") else []:
        found = [(m["machine"], w) for m in (values, *values["earlier"]) for w in m["workloads"] if w["key"] == key]
        pooled = [pair for _, result in found for pair in pairs_of(result)]
        lines += [
            f"## ({key}) on all machines",
            "",
            f"{statistics.median(pooled):.2f} times in the median of {len(pooled)} pairs ({min(pooled):.2f} to {max(pooled):.2f}).",
            "",
            "| measured | commit | machine | pairs | load of other programs |",
            "|---|---|---|---|---:|",
        ]
        for machine, result in found:
            pairs = ", ".join(f"{pair:.2f}" for pair in pairs_of(result))
            load = max(run["foreign_load"] for run in result["runs"])
            where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
            lines.append(f"| {machine['measured_at']} | {machine.get('commit', '-')} | {where} | {pairs} | at most {load:.1f} |")
        lines.append("")
    return lines


def lengths_text(result: dict[str, Any]) -> str | None:
    """Whether both sides sampled lengths from one distribution; None where lengths were not kept."""
    found = result["summary"]["lengths_differ_by"]
    if found is None:
        return None
    largest, bound = found["largest_difference"], found["chance_5_percent"]
    word = "no more than chance explains" if largest <= bound else "more than chance explains: the comparison is not fair"
    return (
        f"Response lengths of the two sides differ by at most {largest:.3f} in their distribution functions (chance: {bound:.3f}), {word}"
    )


def settings_text(settings: dict[str, Any]) -> str:
    """TRL's settings in a line."""
    return f"{settings['generation']}, {settings['threads']} threads, {settings['micro_batch']} sequences per pass"


def own_text(tried: dict[str, Any]) -> str:
    """RLJob's settings in a line."""
    trainer_threads, engines, engine_threads = tried["own"]
    return f"threads of the trainer {trainer_threads}, engines {engines}, threads of each {engine_threads}"


def show(console: Console, result: dict[str, Any]) -> None:
    """Print one workload's table."""
    table = Table(title=f"({result['key']}) {result['title']}", title_justify="left")
    table.add_column("")
    table.add_column("TRL", justify="right")
    table.add_column("RLJob", justify="right")
    for row in rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(verdict(result))
    if text := lengths_text(result):
        console.print(text)


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    machine = values["machine"]
    lines = [
        "# RLJob against TRL's GRPOTrainer on a CPU",
        "",
        f"Written by `python -m bench.trl` on {machine['measured_at']}: {machine_text(machine)}. "
        "What is compared and how: [bench/README.md](../README.md).",
        "",
    ]
    for result in values["workloads"]:
        lines += [f"## ({result['key']}) {result['title']}", "", f"{verdict(result)}.", ""]
        if text := lengths_text(result):
            lines += [f"{text}.", ""]
        lines += [
            f"{result['num_parameters']:,} parameters, vocabulary of {result['vocab_size']}; {result['batch']}; "
            f"{result['runs'][0]['steps']} steps measured after {result['warmup_steps']} of warm-up, "
            f"{len(result['runs']) // 2} runs of each side, alternating.",
            "",
            "| | TRL | RLJob |",
            "|---|---:|---:|",
        ]
        lines += [f"| {label.replace('  ', '&emsp;')} | {trl} | {own} |" for label, trl, own in rows(result)]
        lines += ["", f"TRL's settings: {settings_text(result['trl_settings'])}. Chosen from:", ""]
        lines += [f"- {settings_text(c)}: {_outcome(c)}" for c in result["tuning"]]
        lines += ["", f"RLJob's settings: {own_text(result['rljob_tuning'][0])}.", ""]
        lines += [f"- {own_text(c)}: {c['step_s']:.3f} s per step" for c in result["rljob_tuning"] if "step_s" in c]
        lines += [""]
    return "\n".join([*lines, *history(values)])


def _outcome(candidate: dict[str, Any]) -> str:
    if "error" in candidate:
        return f"failed ({candidate['error']})"
    return f"{candidate['step_s']:.3f} s a step"
