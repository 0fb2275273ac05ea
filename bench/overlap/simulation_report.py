"""Text and picture of the simulation."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS

STEM = "overlap-simulation"
EXPLANATION = """\
The scheduler, the fleet, the gate and the buffer are those of a job, on a virtual clock; engines, trainer and rewards are simulated
(`rljob_runtime.simulation`). Engines sample a token per response in constant time; a trainer's step takes a constant time, then all engines
stand still for the sync, as with updateMode InFlight. Steps after warm-up count, and the run goes on beyond them,
so that nothing runs empty.

- *bound*: no schedule makes a step shorter, not even one that knows all lengths: the largest of slots `W / K + d` (generation spread
  evenly over all slots, plus the stop), trainer `X` (training and sync), tail `(L + X + r d) / (r + 1)` (the longest response of a
  batch must be trained at most r versions after the one it began under), own groups `X` plus
  the longest of the `(1 - r) B` shortest groups (r < 1); at
  ratio 0 `max(W / K, L) + X`. Derived in `bench/overlap/bounds.py`.
- *unlimited*: the same with a ratio without limit, `max(W / K + d, X)`: ROLL Flash's (arXiv 2510.11345) time for alpha -> infinity,
  on which S_max rests.
- *promised*: ROLL Flash's upper bound on time, `max(W / K + L / (alpha + 1) + d, X)`, at ratio 0 Graham's `W / K + L + X`. It leaves
  out that training waits for its own batch, so that below ratio 1 it can be missed.

A schedule that does not know lengths cannot begin the longest response first; where the tail binds, that is the distance to the bound.
"""


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    machine, setting = values["machine"], values["configuration"]
    lines = [
        "# Overlap, simulated: throughput and staleness compared with their bounds",
        "",
        f"Written by `python -m bench.overlap simulation` on {machine['measured_at']}; {machine['processor']}, Python {machine['python']}. "
        "Times are virtual seconds, except in the last table.",
        "",
        *_summary(values),
        "",
        f"![throughput over the bound, staleness beside its closed form]({STEM}.svg)",
        "",
        EXPLANATION,
        f"{setting['groups_per_step']} prompts x {setting['samples_per_group']} samples per step, {setting['num_engines']} engines of "
        f"{setting['slots']} slots, {setting['token_s'] * 1e3:.0f} ms per token, sync {setting['sync_s']} s, "
        f"{setting['steps'] - setting['warmup_steps']} steps.",
        "",
        "| lengths | | mean tokens | standard deviation over mean | longest of a group |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {x['name']} | {x['text']} | {x['mean_tokens']:.0f} | {x['variation']:.2f} | {x['group_longest_tokens']:.0f} |"
            for x in values["lengths"]
        ),
        "",
    ]
    for balance in dict.fromkeys(row["balance"] for row in values["ratios"]):
        lines += _ratios(balance, [row for row in values["ratios"] if row["balance"] == balance])
    return "\n".join([*lines, *_speed_up(values["speed_up"]), *_modes(values["modes"]), *_cost(values["cost"])])


def least_share(values: dict[str, Any], ratio: float) -> float:
    """Smallest throughput over that with an unlimited ratio, over all distributions and balances."""
    return min(float(row["share_of_unlimited"]) for row in values["ratios"] if row["ratio"] >= ratio)


def _summary(values: dict[str, Any]) -> list[str]:
    dropped = sum(row["dropped_groups"] for row in values["ratios"])
    enough = next((r for r in sorted({row["ratio"] for row in values["ratios"]}) if least_share(values, r) >= 0.95), None)
    text = "No ratio reaches 95 % of an unlimited ratio's throughput everywhere."
    if enough is not None:
        text = (
            f"From ratio {enough:g} on throughput is at least {100 * least_share(values, enough):.1f} % of an unlimited ratio's, on every "
            "distribution and balance."
        )
    return [f"{text} Groups dropped as too old, all runs together: {dropped}."]


def _ratios(balance: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"## {balance.capitalize()}",
        "",
        "| lengths | ratio | samples/s | step s | bound s | binds | of the bound | promised s | of unlimited | staleness | expected | "
        "of tokens | trainer idle "
        "| slots used |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['lengths']} | {r['ratio']:g} | {r['samples_per_s']:.2f} | {r['step_s']:.1f} | {r['bound_s']:.1f} | {r['binds']} "
            f"| {100 * r['share_of_bound']:.1f} % | {r['promised_s']:.1f} | {100 * r['share_of_unlimited']:.1f} % | "
            f"{r['staleness_mean']:.2f} "
            f"| {r['staleness_expected']:.2f} | {r['token_staleness_mean']:.2f} | {100 * r['trainer_idle_share']:.0f} % "
            f"| {100 * r['slot_use_share']:.0f} % |"
        )
    note = {
        "balanced": "Engines and trainer weigh the same: where finished groups pile up is chance, and the closed form, which takes one "
        "side as the slower one, only marks the range.",
        "engines bound": "Expected: min(r, (G + X) / T), with G the longest response of a group and T = W / K + d.",
        "trainer bound": "Expected: r, since finished groups wait until the gate stops admission.",
    }[balance]
    return [*lines, "", note, ""]


def _speed_up(rows: list[dict[str, Any]]) -> list[str]:
    ratios = [point["ratio"] for point in rows[0]["overlapped"]]
    lines = [
        "## The same devices alternating, or divided",
        "",
        "Synchronous training gives all devices to generation (twice the slots, one queue), then all to training; overlapped, each has "
        "half of them permanently "
        "(both phases are equally long). S_max = 1 + (L + T_switch) / (W / K + T_train) takes Graham's upper bound for the alternating "
        "run, which the real one does not reach; the speedup is over the measured one. *Dealt*: every slot gets its responses beforehand.",
        "",
        "| lengths | L s | turns s | Graham s | dealt s | limit s | S_max | turns over limit | "
        + " | ".join(f"speed-up at {r:g}" for r in ratios)
        + " |",
        f"|---|{'---:|' * (7 + len(ratios))}",
    ]
    for r in rows:
        cells = [f"{p['speed_up']:.2f} ({100 * p['share_of_limit']:.0f} %)" for p in r["overlapped"]]
        lines.append(
            f"| {r['lengths']} | {r['longest_s']:.1f} | {r['turns_s']:.1f} | {r['turns_bound_s']:.1f} | {r['turns_dealt_s']:.1f} "
            f"| {r['limit_s']:.1f} | {r['s_max']:.2f} | {r['turns_s'] / r['limit_s']:.2f} | {' | '.join(cells)} |"
        )
    return [*lines, "", "In brackets: throughput over the limit, in which no device ever waits and no sync takes time.", ""]


def _modes(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Update modes (log-normal, balanced)",
        "",
        "| updateMode | ratio | step s | of unlimited | staleness | of tokens |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['mode']} | {r['ratio']:g} | {r['step_s']:.1f} | {100 * r['share_of_unlimited']:.1f} % | {r['staleness_mean']:.2f} "
            f"| {r['token_staleness_mean']:.2f} |"
        )
    return [*lines, ""]


def _cost(kinds: dict[str, Any]) -> list[str]:
    lines = [
        "## The scheduler's own cost",
        "",
        "CPU time of the driver's process per response, including the event loop, without simulated engines; ratio 1, half of the "
        "requests make a "
        "step.",
        "",
        "| requests in flight | " + " | ".join(kinds) + " |",
        f"|---:|{'---:|' * len(kinds)}",
    ]
    for position, point in enumerate(next(iter(kinds.values()))["points"]):
        cells = [f"{k['points'][position]['us_per_request']:.0f} µs ({k['points'][position]['engines']} engines)" for k in kinds.values()]
        lines.append(f"| {point['in_flight']:,} | {' | '.join(cells)} |")
    exponents = ["-" if k["exponent"] is None else f"{k['exponent']:.2f}" for k in kinds.values()]
    return [*lines, f"| exponent of the time per request | {' | '.join(exponents)} |", ""]


def draw(values: dict[str, Any]) -> None:
    """``results/overlap-simulation.svg``: above throughput over the unlimited ratio's, below staleness; a column per balance."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rljob", "svg.fonttype": "none"})
    from matplotlib import pyplot

    colors = dict(zip((x["name"] for x in values["lengths"]), ("tab:green", "tab:blue", "tab:red"), strict=True))
    balances = list(dict.fromkeys(row["balance"] for row in values["ratios"]))
    figure, grid = pyplot.subplots(2, len(balances), figsize=(11, 6.4), sharex=True, sharey="row", layout="constrained")
    for column, balance in enumerate(balances):
        above, below = grid[0][column], grid[1][column]
        for name, color in colors.items():
            rows = [row for row in values["ratios"] if row["balance"] == balance and row["lengths"] == name]
            places = range(len(rows))
            above.plot(places, [100 * r["share_of_unlimited"] for r in rows], color=color, marker="o", markersize=4, label=name)
            most = [100 * r["unlimited_s"] / r["bound_s"] for r in rows]
            above.plot(places, most, color=color, linestyle="--", linewidth=1, label=f"{name}: bound at that ratio")
            below.plot(places, [r["staleness_mean"] for r in rows], color=color, marker="o", markersize=4, label=name)
            expected = [r["staleness_expected"] for r in rows]
            if balance != "balanced":
                below.plot(places, expected, color=color, linestyle="--", linewidth=1, label=f"{name}: closed form")
        above.axhspan(95, 100, color="gray", alpha=0.2, linewidth=0)
        above.set_title(balance)
        below.set_xlabel("asyncGenerationRatio")
        below.set_xticks(range(len(rows)), [f"{r['ratio']:g}" for r in rows])
        for axes in (above, below):
            axes.grid(visible=True, linewidth=0.4)
    grid[0][0].set_ylabel("throughput, % of an unlimited ratio's")
    grid[1][0].set_ylabel("mean staleness, versions")
    grid[0][-1].legend(fontsize="x-small", loc="lower right")
    grid[1][0].legend(fontsize="x-small", loc="upper left")
    figure.savefig(RESULTS / f"{STEM}.svg", metadata={"Date": None})
    pyplot.close(figure)
