"""Text and picture of the real jobs."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS, machine_text

STEM = "overlap-real"


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    machine = values["machine"]
    alone = [run for run in values["runs"] if run["ratio"] == 0]
    phases = {part: sum(run[f"{part}_s"] for run in alone) / len(alone) for part in ("generate", "reward", "train", "sync")}
    lines = [
        "# Overlap with vLLM on this machine",
        "",
        f"Written by `python -m bench.overlap real` on {machine['measured_at']}: {machine_text(machine)}.",
        "",
        f"![reward over samples]({STEM}.svg)",
        "",
        f"The quickstart's task on the {values['size']} tiny model, {values['steps']} steps, updateMode {values['mode']}. Trainer and "
        "engine have a thread each. The trainer is slowed down by work that changes no gradient (layers computed twice, many small passes, "
        f"no shared prompts). A second reward of weight 0 sleeps {values['latency_s'] * 1e3:.1f} ms per sample in "
        f"{values['reward_workers']} reward workers: it represents a remote sandbox and takes no CPU time. Its latency was chosen in a "
        "pilot run so that a batch's generation and rewards take as long as training and sync.",
        "",
        "With ratio 0 a step took, in seconds: " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in phases.items()) + ". "
        "The bound is (generate + reward + train + sync) / max(generate + reward, train + sync), from the ratio 0 run of the same pair. "
        "Generation and training need a core each; driver, Ray, and rewards share the rest: *cores* near the machine's number means "
        "that phases slow each other down, which the bound ignores. With a ratio above 0, rewards of one batch also overlap generation of "
        "the next, which the bound ignores, too, in the other direction.",
        "",
        "| | step s | samples/s | speed-up | bound | trainer idle | engine idle | slots used | staleness mean, max | cores "
        "| load of others | reward, last quarter |",
        f"|---|{'---:|' * 11}",
    ]
    for r in values["summary"]:
        spread = f" ({min(r['speed_ups']):.2f} to {max(r['speed_ups']):.2f})" if len(r["speed_ups"]) > 1 else ""
        idle = f"{100 * r['trainer_idle_share']:.0f} % | {100 * r['engine_idle_share']:.0f} % | {100 * r['slots_used_share']:.0f} %"
        lines.append(
            f"| {r['side']} | {r['step_s']:.3f} | {r['samples_per_s']:.0f} | {r['speed_up']:.2f}{spread} | {r['bound']:.2f} | {idle} "
            f"| {r['staleness_mean']:.2f}, {r['staleness_max']:.0f} | {r['cores']:.2f} | {r['foreign_load']:.1f} "
            f"| {r['reward_last_quarter']:.3f} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            "*Trainer idle*: share of the step waiting for a batch. *Engine idle*: 1 minus the generation of a batch with ratio 0 over the "
            "step; an engine that training slows down is busier than that. *Uncorrected*: log-prob times advantage (policyLoss Vanilla), "
            "no ratio over the behavior log-probs; every side trains the same number of samples.",
            "",
        ]
    )


def draw(values: dict[str, Any]) -> None:
    """``results/overlap-real.svg``: reward over samples and over seconds, mean of the pairs."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rljob", "svg.fonttype": "none"})
    import numpy as np
    from matplotlib import pyplot

    figure, (by_samples, by_time) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for row in values["summary"]:
        runs = [run for run in values["runs"] if run["side"] == row["side"]]
        reward = np.mean([run["reward"] for run in runs], axis=0)
        window = min(5, len(reward))
        smooth = np.convolve(reward, np.ones(window) / window, mode="valid")
        samples = np.cumsum(runs[0]["samples"])[window - 1 :]
        style = "-" if row["corrected"] else "--"
        by_samples.plot(samples, smooth, style, label=row["side"])
        by_time.plot(np.arange(window, len(reward) + 1) * row["step_s"], smooth, style, label=row["side"])
    by_samples.set(xlabel="samples trained", ylabel="mean reward, 5 steps")
    by_time.set(xlabel="seconds (steps x mean step)")
    for axes in (by_samples, by_time):
        axes.grid(visible=True, linewidth=0.4)
    by_samples.legend(fontsize="small")
    figure.savefig(RESULTS / f"{STEM}.svg", metadata={"Date": None})
    pyplot.close(figure)
