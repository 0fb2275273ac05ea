"""Refusals and warnings of an estimate, with their arithmetic. Their number grows with node groups and components, never with devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat

from rljob_api.errors import FieldError, counted, show
from rljob_api.memory.estimating import TIGHT_SHARE, estimate
from rljob_api.memory.known_shapes import Served, shape_of
from rljob_api.memory.model import KVCapacity, MemoryEstimate, PhaseEstimate, PoolEstimate, PoolKind, Term
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.units import show_bytes
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.rljob import RLJobSpec

MAX_TERMS = 8
"""Terms that a message spells out; the smallest are summed up."""
MAX_REMEDIES = 3


def problems_of(spec: RLJobSpec, plan: Plan, shape: ModelShape | None = None, served: Served | None = None) -> list[FieldError]:
    """Refusals of a planned job.

    Args:
        spec: of the job.
        plan: of that spec.
        shape: of its model; None takes the number of parameters that the spec gives, if it does.
        served: of the models that Judges and Teachers have of their own; None likewise.
    """
    return problems(estimate(spec, plan, shape or shape_of(spec), served))


def problems(memory: MemoryEstimate) -> list[FieldError]:
    """What cannot work: pools that need more than there is, and KV caches without room for one full request."""
    return [*_fractions(memory), *_overfull(memory), *_too_small_caches(memory)]


def warnings(memory: MemoryEstimate) -> list[FieldError]:
    """What works but is tight: pools above :data:`TIGHT_SHARE`, KV caches in which requests will wait for each other."""
    return [*tight(memory), *_crowded_caches(memory)]


def _fractions(memory: MemoryEstimate) -> Iterator[FieldError]:
    seen: set[str] = set()
    for shared in memory.shared_fractions:
        if shared.path in seen:
            continue
        seen.add(shared.path)
        total = sum(share * count for _, share, count in shared.fractions)
        engines = chain.from_iterable(repeat(f"{name} {share:g}", count) for name, share, count in shared.fractions)
        terms = _sum(list(islice(engines, MAX_TERMS)), sum(count for _, _, count in shared.fractions) - MAX_TERMS)
        yield FieldError(
            path=shared.path,
            value=show(shared.value),
            problem=f"engines on device {shared.first}{_and_more(shared.count)} take {terms} = {total:g} of its memory, more than there is",
            remedy="make memoryFraction smaller, set kvCacheBytes, or give every engine its own devices",
        )


def _overfull(memory: MemoryEstimate) -> Iterator[FieldError]:
    for pools in _by_limit(memory.pools):
        worst, limit = pools[0], pools[0].limit_bytes
        if limit is not None and worst.peak.num_bytes > limit:
            count = sum(pool.count for pool in pools if pool.peak.num_bytes > limit)
            more = f"; {count - 1} more of {worst.group} are too small as well" if count > 1 else ""
            problem = f"{_needs(worst, limit)}: {arithmetic(worst.peak)}{more}"
            yield FieldError(path=worst.limit_path, value=_limit(worst), problem=problem, remedy=_remedy(worst))


def tight(memory: MemoryEstimate) -> Iterator[FieldError]:
    """Pools that fit, but above :data:`TIGHT_SHARE`."""
    for pools in _by_limit(memory.pools):
        worst, limit = pools[0], pools[0].limit_bytes
        if limit is not None and TIGHT_SHARE * limit < worst.peak.num_bytes <= limit:
            share = worst.peak.num_bytes / limit
            problem = f"{_needs(worst, limit)}, which is {share:.0%} and leaves little for fragments: {arithmetic(worst.peak)}"
            yield FieldError(path=worst.limit_path, value=_limit(worst), problem=problem, remedy=_remedy(worst))


def _too_small_caches(memory: MemoryEstimate) -> Iterator[FieldError]:
    for cache in _smallest_caches(memory.capacities):
        if cache.kv_bytes == 0:
            problem = f"{cache.component} has no memory left for a KV cache on {cache.group}: {cache.formula}"
            yield FieldError(path=cache.path, problem=problem, remedy=_CACHE_REMEDY)
        elif cache.full_sequences == 0:
            yield FieldError(
                path=cache.path,
                problem=f"{cache.component} {_holds(cache)}, but one request may have maxPromptTokens + maxResponseTokens = "
                f"{cache.full_tokens:,}, with which the engine does not start",
                remedy=f"{_CACHE_REMEDY}, or lower rollout.maxResponseTokens",
            )


def _crowded_caches(memory: MemoryEstimate) -> Iterator[FieldError]:
    for cache in _smallest_caches(memory.capacities):
        wanted = cache.wanted_sequences * cache.mean_tokens
        if cache.tokens is not None and cache.full_sequences and cache.tokens < wanted:
            yield FieldError(
                path=cache.path,
                problem=f"{cache.component} {_holds(cache)}; {counted(cache.wanted_sequences, 'request')} of {cache.mean_tokens:,} tokens "
                f"(the prompt and half a response) are {wanted:,}, so that some will wait or be computed again",
                remedy=f"{_CACHE_REMEDY}, or lower engine.maxRunningRequests to {max(1, cache.tokens // cache.mean_tokens)}",
            )


_CACHE_REMEDY = "raise engine.memoryFraction or engine.kvCacheBytes, or use a larger engine.tensorParallelSize"


def _holds(cache: KVCapacity) -> str:
    return (
        f"has a KV cache of {show_bytes(cache.kv_bytes)} on each device of {cache.group} ({cache.formula}), which holds "
        f"{cache.tokens:,} tokens of {cache.bytes_per_token:,} B"
    )


def _smallest_caches(capacities: Iterable[KVCapacity]) -> list[KVCapacity]:
    """One of each component: on the group where it holds least."""
    smallest: dict[str, KVCapacity] = {}
    for cache in capacities:
        other = smallest.setdefault(cache.component, cache)
        if cache.kv_bytes < other.kv_bytes:
            smallest[cache.component] = cache
    return list(smallest.values())


def _by_limit(pools: Iterable[PoolEstimate]) -> list[list[PoolEstimate]]:
    """Pools of each group and kind, the fullest first."""
    found: dict[str, list[PoolEstimate]] = {}
    for pool in pools:
        found.setdefault(pool.limit_path, []).append(pool)
    return [found[path] for path in sorted(found)]


def _limit(pool: PoolEstimate) -> str:
    """As the manifest has it: memory is a quantity, a budget of host memory a number."""
    return show(pool.limit_bytes if pool.kind is PoolKind.HOST else pool.limit_text)


def where(pool: PoolEstimate) -> str:
    """``device 0 of a800 and 7 like it``."""
    return f"{pool.kind} {pool.first} of {pool.group}{_and_more(pool.count)}"


def _and_more(count: int) -> str:
    return f" and {count - 1} like it" if count > 1 else ""


def _needs(pool: PoolEstimate, limit: int) -> str:
    need, there = show_bytes(pool.peak.num_bytes), show_bytes(limit)
    return f"{pool.kind} {pool.first} of {pool.group} needs {need} of {there} in phase {pool.peak.phase}"


def arithmetic(phase: PhaseEstimate) -> str:
    """Terms of a phase, the largest first: ``actor_train float32 weights 14.19 GiB (7.62B x 4 B / 2) + ...``."""
    terms = sorted(phase.terms, key=lambda term: -term.num_bytes)
    shown = [_term(term) for term in terms[:MAX_TERMS]]
    rest = sum(term.num_bytes for term in terms[MAX_TERMS:])
    return " + ".join([*shown, f"others {show_bytes(rest)}"] if rest else shown)


def _term(term: Term) -> str:
    times = f"{term.processes} x " if term.processes > 1 else ""
    formula = "" if term.need.formula == "constant" and not times else f" ({times}{term.need.formula})"
    return f"{term.component} {term.need.name} {show_bytes(term.num_bytes)}{formula}"


def _sum(parts: list[str], more: int) -> str:
    return " + ".join([*parts, f"{more} more"] if more > 0 else parts)


def _remedy(pool: PoolEstimate) -> str:
    """What would shrink the largest terms."""
    terms = sorted(pool.peak.terms, key=lambda term: -term.num_bytes)
    hints = list(dict.fromkeys(term.need.remedy for term in terms if term.need.remedy))[:MAX_REMEDIES]
    if pool.kind is PoolKind.DEVICE and len({term.component for term in terms}) > 1 and "offload.residency: Switching" not in hints:
        hints.append("devices that are not shared")
    if pool.kind is PoolKind.HOST:
        return f"raise it to {pool.peak.num_bytes} or more, or write {' or '.join(hints)}"
    return f"use {', or '.join(hints)}" if hints else f"use {pool.kind}s with more memory"
