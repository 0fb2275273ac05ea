"""``python -m bench.figures``: the figures that the pages quote, each with the result it comes from; ``--write`` updates the pages.

A quote is literal text of a page with ``{}`` where a value is. The test in tests/unit/bench/test_figures.py compares every quote with its
result, and every other number of README.md that has a unit with :data:`NOT_MEASURED`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench import figure_values as read
from bench.measure import RESULTS, ROOT

README = "README.md"
FIGURES = "docs/figures.md"
NUMBER = r"-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?"
UNITS = r"(?:%|times\b|ms\b|s\b|seconds?\b|minutes?\b|min\b|hours?\b|[kKMGT]i?B\b|tokens/s|TFLOP/s|pairs\b|of \d|in \d+\b|to \d)"
MEASURED = re.compile(rf"(?<![\w.,/-]){NUMBER}(?=(?:\s|&nbsp;)?{UNITS})|(?<=[\d)] to ){NUMBER}|(?<=\d of ){NUMBER}")
"""Numbers that look like measured ones: with a unit, in a range, or as a part of a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """One passage of a page with figures of one result."""

    stem: str
    """The result's file in ``bench/results``, without ``.json``."""
    text: str
    """The passage; ``{}`` is a figure, white space is any white space. It occurs once in the page."""
    values: Callable[[Mapping[str, Any]], Sequence[str]]
    """The figures from the result, as the page prints them."""
    page: str = README


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A figure of a page beside the recorded one."""

    quote: Quote
    line: int
    span: tuple[int, int]
    printed: str
    recorded: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lines of a page between ``<!-- figures: NAME -->`` and ``<!-- /figures -->`` that a result contains."""

    name: str
    stem: str
    lines: Callable[[Mapping[str, Any]], list[str]]
    """Empty where the result does not have them yet: the page then keeps what it has."""
    page: str = README


class QuoteMissingError(ValueError):
    """Raised when a page does not have a passage exactly once; names both."""


QUOTES = (
    Quote(
        stem="newcomer",
        text="then trains a tiny model to add. About {} minutes.",
        values=lambda v: [f"{read.way(v, 'clone')['total_s'] / 60:.0f}"],
    ),
    Quote(
        stem="newcomer",
        text="of free disk, of which the environment takes {}.",
        values=lambda v: [f"{read.way(v, 'clone')['environment_bytes'] / 1e9:.0f}"],
    ),
    Quote(stem="newcomer", text="[{} minutes](bench/results/newcomer.md), of which {} s of setup", values=read.newcomer_clone),
    Quote(stem="gpu_check-engines", text="Of the {} lines of `tools/gpu-check` that were measured last, {} passed", values=read.gpu_lines),
    Quote(stem="upstream", text="[{} of {}](bench/results/upstream.md) upstream text jobs", values=read.upstream),
    Quote(
        stem="placement",
        text="planning takes RLinf [{} times](bench/results/placement.md) as long from configuration to placement, the placement alone "
        "{} times",
        values=read.recorded_placement,
    ),
    Quote(stem="fidelity", text="[{} of {}](bench/results/fidelity.md) losses", values=read.agreeing),
    Quote(
        stem="overlap-real",
        text="one batch ahead, [{} times](bench/results/overlap-real.md) its own synchronous throughput",
        values=lambda v: read.ahead(v)[:1],
    ),
    Quote(stem="trl-i", text="[{} times](bench/results/trl-i.md) its updates per second ({} to {})", values=read.trl_range),
    Quote(stem="trl-i-ratio1", text="[{} times](bench/results/trl-i-ratio1.md) one batch ahead ({} to {})", values=read.trl_range),
    Quote(stem="trl-iii", text="[{} times](bench/results/trl-iii.md) with LoRA ({} to {})", values=read.trl_range),
    Quote(
        stem="trl-ii",
        text="[{} times](bench/results/trl-ii.md) with heavy-tailed responses ({} to {}), each in {} pairs",
        values=read.trl,
    ),
    Quote(
        stem="training",
        text="mixed lengths [{} times](bench/results/training.md) as fast, with equal lengths {} times",
        values=lambda v: [read.gradients(v, "mixed"), read.gradients(v, "long")],
    ),
    Quote(stem="chaos", text="[chaos](bench/results/chaos.md): {} of {} injected faults handled correctly", values=read.faults),
    Quote(
        stem="weightsync",
        text="1 GiB to two engines that generate in {} s (median of {}); through a file it takes {} times as long, "
        "as pickled objects {} times; with idle engines the fastest one reaches {} % of the speed of bare copies",
        values=read.sync,
    ),
    Quote(
        page=FIGURES,
        stem="gpu_check",
        text="state {} to {} %; peak of a step {} % at 0.5B, which failed, and {}, {}, and {} % at 1.5B, 3B, and 7B",
        values=read.gpu_memory,
    ),
    Quote(
        page=FIGURES,
        stem="trl-i",
        text="quickstart, synchronous | **{}** times TRL's, the median of {} pairs of the newest measurement ({} to {})",
        values=lambda v: read.in_order(read.trl(v), 0, 3, 1, 2),
    ),
    Quote(
        page=FIGURES,
        stem="trl-i-ratio1",
        text="the same, one batch ahead | **{}** times, the median of {} pairs of the newest measurement ({} to {})",
        values=lambda v: read.in_order(read.trl(v), 0, 3, 1, 2),
    ),
    Quote(
        page=FIGURES,
        stem="trl-ii",
        text="responses of 8 to 256 tokens with a heavy tail | **{}** times ({} to {} in {} pairs of {} measured steps per side)",
        values=read.trl_steps,
    ),
    Quote(
        page=FIGURES,
        stem="trl-iii",
        text="responses of 8 to 64 tokens | **{}** times ({} to {} in {} pairs of {} measured steps per side)",
        values=read.trl_steps,
    ),
    Quote(
        page=FIGURES,
        stem="placement",
        text="compared with RLinf's planner, from configuration to placement | {} times on recorded cases, {} times on random ones; "
        "the placement alone {} and {} times; 100,000 devices in {} s",
        values=lambda v: [*read.placement(v), read.largest_plan(v)],
    ),
    Quote(
        page=FIGURES,
        stem="fidelity",
        text="| {} of {} comparisons within 1e-5 (largest difference {}), {} known differences with reasons",
        values=read.fidelity,
    ),
    Quote(
        page=FIGURES,
        stem="overlap-real",
        text="one batch ahead **{}** times and two ahead {} times the synchronous throughput, bound {}; pairs of runs: {}",
        values=read.ahead,
    ),
    Quote(
        page=FIGURES,
        stem="weightsync",
        text="engines that only copy and generate, medians of {} | shared memory {} s; object store {} times that, gloo's broadcast {}, "
        "a safetensors file {}, pickled objects {}. With idle engines the fastest sync through shared memory reaches {} % of the speed "
        "of bare copies between the same processes",
        values=read.sync_all,
    ),
    Quote(
        page=FIGURES,
        stem="newcomer",
        text="empty caches | {} s: setup {} s, model and run {} s",
        values=read.newcomer_steps,
    ),
    Quote(
        page=FIGURES,
        stem="trl-i",
        text="A synchronous quickstart step took {} s in the newest measurement: generation {} s, training {} s, weight sync {} s, "
        "rewards {} s. TRL generates in {} s (one padded batch in Transformers) and spends {} s on the rest of its step",
        values=read.trl_parts,
    ),
    Quote(
        page=FIGURES,
        stem="overlap-real",
        text="reward after the same number of samples {}, {}, {}, and {} without correction",
        values=lambda v: [f"{one['reward_last_quarter']:.2f}" for one in v["summary"]],
    ),
    Quote(
        page=FIGURES,
        stem="curves",
        text="bands overlap in {} % of the windows of {} steps",
        values=lambda v: [f"{100 * v['overlap_share']:.0f}", str(v["window_steps"])],
    ),
    Quote(
        page=FIGURES,
        stem="curves",
        text="final rewards {} (RLJob) and {} (TRL)",
        values=lambda v: [f"{statistics.fmean(v['ends'][side]):.3f}" for side in ("RLJob", "TRL")],
    ),
)

BLOCKS = (
    Block(name="quickstart", stem="newcomer", lines=read.quickstart_transcript),
    Block(name="cluster", stem="newcomer", lines=read.cluster_transcript),
)

NOT_MEASURED = {
    "Time on GPUs so far is 83 minutes": "device time that was available: five times 15 minutes, and 8 (gpu_check-engines.md)",
    "1 GiB to two engines": "what the benchmark sends",
    "downloads 3.6 GB": "size of a download, from the package index",
    "needs 9 GB of free disk": "requirement: the environment, the model, and the run, rounded up",
    "5 GB of free memory": "requirement",
}
"""Numbers of README.md with a unit that no result contains: the passage, and what it is."""

UNCLEAN = frozenset({"gpu_check"})
"""Results without a commit, or of one with local changes (``+``). Measure one again on a clean commit and remove it here; never add one."""


@cache
def result(stem: str) -> Mapping[str, Any]:
    """A recorded result."""
    values: Mapping[str, Any] = json.loads((RESULTS / f"{stem}.json").read_text())
    return values


def origin(stem: str) -> tuple[str, str]:
    """(date, commit) of a result; empty where not recorded."""
    machine = result(stem).get("machine") or {}
    return (machine.get("measured_at") or "", machine.get("commit") or "") if isinstance(machine, dict) else ("", "")


def unclean(stem: str) -> bool:
    """Whether it is unknown which state of the code a result belongs to."""
    date, commit = origin(stem)
    return not date or not commit or commit == "unknown" or commit.endswith("+")


def found(quote: Quote, page: str) -> Iterator[Found]:
    """The figures of one quote.

    Raises:
        QuoteMissingError: the page does not have the passage exactly once.
        ValueError: the result has another number of figures than the passage.
    """
    pattern = rf"({NUMBER})".join(r"\s+".join(re.escape(word) for word in part.split(" ")) for part in quote.text.split("{}"))
    places = list(re.finditer(pattern, page))
    if len(places) != 1:
        raise QuoteMissingError(
            f"{quote.page}: found {len(places)} times, not once: {quote.text!r} ({quote.stem}.json). Remedy: change the quote in "
            "bench/figures.py together with the page"
        )
    (place,), recorded = places, quote.values(result(quote.stem))
    if len(recorded) != len(place.groups()):
        raise ValueError(f"{quote.text!r} has {len(place.groups())} figures, {quote.stem}.json gives {len(recorded)}: {recorded}")
    for number, value in enumerate(recorded, 1):
        line = page.count("\n", 0, place.start(number)) + 1
        yield Found(quote=quote, line=line, span=place.span(number), printed=place[number], recorded=value)


def rewritten(name: str, page: str) -> str:
    """A page with the recorded figures and blocks."""
    every = [one for quote in QUOTES if quote.page == name for one in found(quote, page)]
    for one in sorted(every, key=lambda one: one.span, reverse=True):
        page = page[: one.span[0]] + one.recorded + page[one.span[1] :]
    for block in BLOCKS:
        lines = block.lines(result(block.stem)) if block.page == name else []
        if lines:
            page = _with_block(page, block, lines)
    return page


def _with_block(page: str, block: Block, lines: Sequence[str]) -> str:
    begin, end = f"<!-- figures: {block.name} -->\n", "<!-- /figures -->"
    before, marker, rest = page.partition(begin)
    _, closing, after = rest.partition(end)
    if not marker or not closing:
        raise QuoteMissingError(f"{block.page}: has no {begin.strip()} ... {end}")
    return f"{before}{begin}" + "\n".join([*lines, ""]) + f"{end}{after}"


def unexplained(page: str) -> list[tuple[int, str]]:
    """(line, number with what follows) of README's numbers that are neither quoted from a result nor in :data:`NOT_MEASURED`."""
    known = [one.span for quote in QUOTES if quote.page == README for one in found(quote, page)]
    for passage in NOT_MEASURED:
        known += [place.span() for place in re.finditer(r"\s+".join(re.escape(word) for word in passage.split(" ")), page)]
    block = r"<!-- figures: .*?<!-- /figures -->"
    code = [place.span() for place in re.finditer(rf"{block}|^```.*?^```|`[^`\n]+`|\]\([^)]*\)", page, re.MULTILINE | re.DOTALL)]
    missing = []
    for place in MEASURED.finditer(page):
        if not any(begin <= place.start() and place.end() <= end for begin, end in [*known, *code]):
            missing.append((page.count("\n", 0, place.start()) + 1, page[place.start() : place.end() + 30].split("\n")[0]))
    return missing


def main() -> int:
    """Returns 1 where a page differs from the results and ``--write`` was not given."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the recorded figures into the pages")
    write = parser.parse_args().write
    differing = 0
    for name in sorted({quote.page for quote in QUOTES} | {block.page for block in BLOCKS}):
        file = Path(ROOT / name)
        page = file.read_text()
        for one in (one for quote in QUOTES if quote.page == name for one in found(quote, page)):
            state = "" if one.printed == one.recorded else f", recorded {one.recorded}"
            print(f"{name}:{one.line}: {one.printed}{state} ({one.quote.stem}, {', '.join(origin(one.quote.stem))})")
        if (new := rewritten(name, page)) != page:
            differing += 1
            if write:
                file.write_text(new)
    print(f"of results without a clean commit: {', '.join(sorted(UNCLEAN))}")
    if differing and not write:
        print("python -m bench.figures --write writes the recorded figures", file=sys.stderr)
    return 1 if differing and not write else 0


if __name__ == "__main__":
    sys.exit(main())
