"""The markdown of ``bench/results/agentic.md``."""

from __future__ import annotations

from collections.abc import Sequence

from bench.agentic.affinity import FIRST_TOKENS, GROUPS, OBSERVATION_TOKENS, SAMPLES, TURNS, Saved
from bench.agentic.rollout import ACTION_TOKENS, MAX_TURNS, Turns
from bench.agentic.steps import Rate

Pair = tuple[Turns, Turns]


def headline(steps: Sequence[Rate], turns: Sequence[Turns], cached: Sequence[Turns]) -> str:
    """The figures that stand for the rest."""
    most = max((rate for rate in steps if rate.subject == "FrozenLake in a worker"), key=lambda rate: rate.steps / rate.cpu_s)
    last = turns[-1]
    return (
        f"FrozenLake {most.steps / most.cpu_s:,.0f} steps/s and core; with an engine and {last.setting.episodes:,} episodes "
        f"{100 * last.overhead_share:.0f} % over engine and environment; two vLLM engines spare "
        f"{spared(cached[1]):.0%} of the prompt tokens with affinity, {spared(cached[0]):.0%} without"
    )


def markdown(steps: Sequence[Rate], turns: Sequence[Turns], cached: Sequence[Pair], simulated: Sequence[tuple[Saved, Saved]]) -> str:
    """All tables."""
    return "\n".join([*_steps(steps), *_turns(turns), *_cached(cached), *_simulated(simulated)]) + "\n"


def computed(found: Turns) -> float:
    """Prompt tokens that no cache spared, per turn."""
    return (found.prompt_tokens - found.cached_tokens) / found.turns


def spared(found: Turns) -> float:
    """Share of prompt tokens that were cached."""
    return found.cached_tokens / found.prompt_tokens


def _steps(rates: Sequence[Rate]) -> list[str]:
    return [
        "# Environments",
        "",
        "## Without an engine",
        "",
        "Every reply is answered immediately. Environment and worker share one thread; the caller, in the driver's place, has another in",
        "the same process, so both compete for the GIL. Episodes end after ten actions; eight consecutive episodes share a map.",
        "Steps per second and core are based on the CPU time of this process alone: the machine ran other work, too.",
        "",
        "| subject | episodes at once | steps/s | steps/s and core | µs per step | of which environment |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {rate.subject} | {rate.episodes} | {rate.steps / rate.wall_s:,.0f} | {rate.steps / rate.cpu_s:,.0f} | "
            f"{rate.wall_s / rate.steps * 1e6:.0f} | {rate.environment_s / rate.steps * 1e6:.0f} |"
            for rate in rates
        ),
        "",
    ]


def _turns(found: Sequence[Turns]) -> list[str]:
    return [
        "## With an engine",
        "",
        f"Turns of FrozenLake with vLLM, {ACTION_TOKENS} tokens each, a model of 0.3 million parameters with random weights, episodes of",
        f"{MAX_TURNS} turns. Driver, engine, and environment worker are separate processes. Overhead is the wall time above that of",
        "engine and environment one after the other; it is below 0 if the two work at the same time.",
        "",
        "| episodes at once | turns/s | ms per turn | engine | environment | overhead |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {t.setting.episodes:,} | {t.turns / t.wall_s:,.0f} | {_ms(t.wall_s, t)} | {_ms(t.engine_s, t)} | "
            f"{_ms(t.environment_s, t)} | {t.overhead_share:+.0%} |"
            for t in found
        ),
        "",
    ]


def _ms(seconds: float, found: Turns) -> str:
    return f"{1000 * seconds / found.turns:.2f}"


def _cached(found: Sequence[Pair]) -> list[str]:
    lines = [
        "## Histories that stay cached",
        "",
        "Two engines, one thread each, with vLLM's own counters of prompt tokens and of those found in its cache (whole blocks of 128",
        f"tokens on a CPU). Lakes of 10 x 10 cells, {MAX_TURNS} turns of about 115 tokens. *By load*: a turn goes to the least loaded",
        "engine, in case of a tie to the one where its episode began; *affinity*: as jobs route it. Only whole blocks are cached, so about",
        "180 tokens per turn are computed even if every history is cached. Windows contain unequal shares of early turns: compare the",
        "cached share. Turns per second depend on what else the machine did.",
        "",
        "| episodes at once | slots of an engine | routing | computed prompt tokens per turn | cached | turns/s |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for pair in found:
        for name, t in zip(("by load", "affinity"), pair, strict=True):
            lines.append(
                f"| {t.setting.episodes} | {t.setting.slots} | {name} | {computed(t):.0f} | {spared(t):.0%} | {t.turns / t.wall_s:,.0f} |"
            )
    return [*lines, ""]


def _simulated(found: Sequence[tuple[Saved, Saved]]) -> list[str]:
    lines = [
        "The same in virtual time with the real scheduler and fleet; an engine step takes a constant time plus a time per computed token.",
        f"A batch of {GROUPS} x {SAMPLES} episodes while another one is played, {TURNS} turns of {OBSERVATION_TOKENS} tokens and a",
        f"response of 32 after {FIRST_TOKENS}, environments that take 0.2 s on average. Nothing is ever evicted.",
        "",
        "| main cost | engines | slots of an engine | cached by load | with affinity | seconds by load | with affinity |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for by_load, kept in found:
        world = kept.world
        lines.append(
            f"| {world.machine.name} | {world.engines} | {world.slots} | {by_load.cached_tokens / by_load.prompt_tokens:.0%} | "
            f"{kept.cached_tokens / kept.prompt_tokens:.0%} | {by_load.wall_s:.0f} | {kept.wall_s:.0f} |"
        )
    return lines
