"""The results as markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

STEM = "driver"
QUIET_LOAD = 0.5
Columns = Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]]
COLUMNS: Columns = (
    ("million tokens/s", lambda c: f"{c['tokens_per_s'] / 1e6:.2f}"),
    ("of one core", lambda c: f"{c['tokens_per_cpu_s'] / 1e6:.2f}"),
    ("responses/s", lambda c: f"{c['responses_per_s']:,.0f}"),
    ("CPU ns per token", lambda c: f"{c['cpu_ns_per_token']:.0f}"),
    ("CPU µs per response", lambda c: f"{c['cpu_us_per_response']:.0f}"),
    ("bytes per token in flight", lambda c: f"{c['bytes_per_token_in_flight']:.1f}"),
    ("at the peak", lambda c: f"{c['bytes_per_token_peak']:.0f}"),
)
PAUSES: Columns = (
    ("passes", lambda c: f"{c['passes']:,}"),
    ("longest ms", lambda c: f"{c['longest_pause']['ms']:.0f}"),
    ("of that stolen", lambda c: f"{c['longest_pause']['stolen_ms']:.0f}"),
    ("above 50 ms", lambda c: str(c["passes_above_50_ms"])),
    ("longest own ms", lambda c: f"{c['longest_own_pause']['own_ms']:.0f}"),
    ("of that work", lambda c: f"{c['longest_own_pause']['work_ms']:.0f}"),
    ("lock", lambda c: f"{c['longest_own_pause']['lock_ms']:.0f}"),
    ("own above 50 ms", lambda c: str(c["own_passes_above_50_ms"])),
    ("longest collection ms", lambda c: f"{c['longest_collection_ms']:.0f}"),
)
RATIOS: Columns = (
    ("CPU per response", lambda c: f"{c['cpu']:.2f}"),
    ("bytes at the peak", lambda c: f"{c['peak']:.2f}"),
    ("longest own pause", lambda c: f"{c['own']:.2f}"),
)
TEXT = """# The driver's data path

Written by `python -m bench driver`. The real driver, scheduler, fleet, buffer, rule and batches in one process; {workers}. Scripted workers
answer immediately, so the driver is the bottleneck; what they compute is not counted. Every call includes Ray's serialization
(pickle 5, buffers copied out of band), but there is no cluster: a call through Ray itself costs about a millisecond, per
message, not per token.

Machine: {processor}, {cores} cores, {memory:.0f} GiB, Python {python}; {date}. {load}

## Tokens, responses, bytes

CPU time counts all threads of the driver. Bytes are the increase of resident memory since before the first step: in flight, when all
responses of a step have arrived; at the peak, while rule and batches are computed. Of several runs of a case, the one with the least CPU
time is shown, but with the pauses of all.

{cases}
{model}
## Pauses

A pause is a pass of the event loop over everything that was ready: an event that arrives just after it began waits this long. All engines
answer at the same time. The driver's *own* part is its *work*, the CPU time of the loop's thread, and the *lock*, the time for which that
thread waited while other threads of the driver computed (an upper bound of waiting for the GIL), less what was *stolen*: time for which the
hypervisor ran something else on a core of this virtual machine, which Linux counts as CPU time of the thread (steal time, in steps of a
clock tick of 10 ms, that of the scripted workers included, so the own part may be too small by that). The rest of a pause is time
without a core, on a machine whose cores have other work. A garbage collection holds the GIL in whichever thread it runs.

{pauses}
Between these cases, on the same machine, a program of one thread that does nothing but the same short work over and over
(`bench.driver.floor`): no driver pauses less than its machine.

{floor}
{growth}
{ray}
{before}"""


def markdown(values: Mapping[str, Any]) -> str:
    """The whole page."""
    machine, cases = values["machine"], values["cases"]
    size = cases[0]
    workers = (
        f"{size['engines']} engines with {size['slots']} requests each, {size['trainer_ranks']} trainer ranks (tensor parallel "
        f"{size['tensor_parallel']}), {size['reward_workers']} reward workers"
    )
    return TEXT.format(
        workers=workers,
        processor=machine["processor"],
        cores=machine["cores"],
        memory=machine["memory_bytes"] / 2**30,
        python=machine["python"],
        date=machine["measured_at"],
        load=_load(cases),
        cases=_table(cases, COLUMNS),
        model=_model(cases),
        pauses=_table(cases, PAUSES),
        floor=_floor(values["floor"]),
        growth=_growth(cases),
        ray=_ray(values["ray"]),
        before="\n".join(_earlier(earlier, cases) for earlier in values["before"]),
    )


def _floor(found: Mapping[str, Mapping[str, Any]]) -> str:
    texts = {"clock": "reads the clock", "memory": "takes half a megabyte of memory from the system, fills it, and gives it back"}
    lines = ["| the program | seconds | longest gap ms | above 50 ms |", "|---|---|---|---|"]
    for work, text in texts.items():
        values = found[work]
        lines.append(f"| {text} | {values['seconds']:.0f} | {values['longest_ms']:.0f} | {values['above_50_ms']} |")
    return "\n".join([*lines, ""])


def _load(cases: Sequence[Mapping[str, Any]]) -> str:
    loads = [case["foreign_load"] for case in cases]
    if max(loads) < QUIET_LOAD:
        return "During the runs no other program wanted a core."
    return (
        f"During the runs, {min(loads):.0f} to {max(loads):.0f} other programs wanted a core (means over the cases): wall times say "
        "little, and CPU times are longer than on a quiet machine."
    )


def _earlier(earlier: Mapping[str, Any], present: Sequence[Mapping[str, Any]]) -> str:
    """Tables of an earlier commit; one that was measured by an earlier form of this bench has no pauses that can be compared."""
    cases = earlier["cases"]
    tables = [_table(cases, COLUMNS)]
    if all("stolen_ms" in case.get("longest_own_pause", {}) for case in cases):
        tables += [_table(cases, PAUSES), "Now, as a ratio of that:\n", _ratios(cases, present)]
    return "\n".join([f"## {earlier['what']}\n", *tables])


def _ratios(before: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]) -> str:
    """Figures of the present cases over those of the same size before."""
    of_size = {_size(case): case for case in present}
    pairs = [(case, of_size[_size(case)]) for case in before if _size(case) in of_size]
    values = [
        {
            **case,
            "cpu": now["cpu_us_per_response"] / case["cpu_us_per_response"],
            "peak": now["bytes_per_token_peak"] / case["bytes_per_token_peak"],
            "own": now["longest_own_pause"]["own_ms"] / case["longest_own_pause"]["own_ms"],
        }
        for case, now in pairs
    ]
    return _table(values, RATIOS)


def _size(case: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(case[name] for name in ("prompts", "samples", "tokens", "engines", "ratio"))


def _table(cases: Sequence[Mapping[str, Any]], columns: Columns) -> str:
    head = ("prompts x samples x tokens", *(name for name, _ in columns))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    usual = max(case["engines"] for case in cases)
    for case in cases:
        size = f"{case['prompts']:,} x {case['samples']} x {case['tokens']:,}"
        size += f", {case['engines']} engines" if case["engines"] != usual else ""
        size += ", a batch ahead" if case["ratio"] else ""
        lines.append(f"| {' | '.join((size, *(show(case) for _, show in columns)))} |")
    return "\n".join([*lines, ""])


def _growth(cases: Sequence[Mapping[str, Any]]) -> str:
    longest = max(cases, key=lambda case: case["steps"])
    found = longest["rss_mib_at_step"]
    if longest["steps"] < 100:
        return ""
    every, half = longest["steps"] // 20, len(found) // 2
    slope_mib, _ = np.polyfit(np.arange(half, len(found)) * every, found[half:], 1)
    shown = ", ".join(f"{mib:.0f}" for mib in found)
    return (
        f"## Memory over {longest['steps']:,} steps\n\n"
        f"MiB, every {every} steps: {shown}. Over the second half {1e3 * slope_mib:+.1f} MiB per thousand steps (least squares).\n"
    )


def _model(cases: Sequence[Mapping[str, Any]]) -> str:
    """Cost per response and per token from the cases of one step's size in responses or tokens, by least relative squares."""
    fitted = [case for case in cases if case["steps"] < 100 and not case["ratio"]]
    lengths = np.array([case["tokens"] for case in fitted], dtype=np.float64)
    measured = np.array([case["cpu_us_per_response"] for case in fitted], dtype=np.float64)
    rows = np.stack([np.ones_like(lengths), lengths], axis=1) / measured[:, None]
    (response_us, token_us), *_ = np.linalg.lstsq(rows, np.ones_like(lengths), rcond=None)
    even = response_us / token_us
    return (
        f"CPU time is about {response_us:.0f} µs per response and {1e3 * token_us:.0f} ns per token (least squares over the cases of "
        f"large batches). Below about {even:,.0f} tokens, a response costs more than its tokens, and tokens per second are "
        "proportional to its length.\n"
    )


def _ray(found: Mapping[str, Any]) -> str:
    """One step through real actors, stage by stage."""
    lines = [
        "## Through Ray\n",
        f"One step of {found['step_tokens'] / 1e6:.1f} million tokens ({found['prompts']} x {found['samples']} x {found['tokens']:,}) "
        "through real Ray actors: 2 engines, the driver, 2 trainer ranks, one store. Bytes written are those of arrays, counting each "
        "copy; receivers do not copy. For comparison, a bare copy of as many bytes in the same run, by one thread.",
        "",
        "| stage | MB written | ms | bare copy ms | times |",
        "|---|---|---|---|---|",
    ]
    for stage in found["stages"]:
        copy = (f"{1e3 * stage['copy_s']:.1f}", f"{stage['seconds'] / stage['copy_s']:.1f}") if stage["copy_s"] else ("", "")
        lines.append(f"| {stage['stage']} | {stage['written_bytes'] / 1e6:.0f} | {1e3 * stage['seconds']:.1f} | {copy[0]} | {copy[1]} |")
    seconds, copy_s = (sum(stage[key] for stage in found["stages"]) for key in ("seconds", "copy_s"))
    lines.append(
        f"| all | {sum(stage['written_bytes'] for stage in found['stages']) / 1e6:.0f} | {1e3 * seconds:.1f} | {1e3 * copy_s:.1f} | "
        f"{seconds / copy_s:.1f} |"
    )
    return "\n".join([*lines, ""])
