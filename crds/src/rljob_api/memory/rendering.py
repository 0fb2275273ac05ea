"""An estimate as rows of text for the CLI, and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob_api.errors import counted
from rljob_api.memory.checks import arithmetic, where
from rljob_api.memory.model import KVCapacity, MemoryEstimate, PoolEstimate
from rljob_api.memory.units import show_bytes, show_count

MAX_POOLS = 16
"""Situations that are shown; the fullest come first."""
HEADERS = ("where", "phase", "needs", "of", "used")
NUM_TEXT_COLUMNS = 2
"""The others are numbers."""


def as_rows(memory: MemoryEstimate) -> list[tuple[str, ...]]:
    """One row per situation and phase, cells as in :data:`HEADERS`; the phase that needs most is marked with ``*``."""
    rows: list[tuple[str, ...]] = []
    for pool in memory.pools[:MAX_POOLS]:
        limit = "?" if pool.limit_bytes is None else show_bytes(pool.limit_bytes)
        for number, phase in enumerate(pool.phases):
            used = f"{phase.num_bytes / pool.limit_bytes:.0%}" if pool.limit_bytes else "?"
            mark = "*" if phase is pool.peak else ""
            rows.append((where(pool) if number == 0 else "", f"{phase.phase}{mark}", show_bytes(phase.num_bytes), limit, used))
    return rows


def peak_rows(memory: MemoryEstimate) -> list[tuple[str, ...]]:
    """One row per situation, of its fullest phase, cells as in :data:`HEADERS`; the fullest situation comes first."""
    rows: list[tuple[str, ...]] = []
    for pool in memory.pools[:MAX_POOLS]:
        limit = "?" if pool.limit_bytes is None else show_bytes(pool.limit_bytes)
        used = f"{pool.peak.num_bytes / pool.limit_bytes:.0%}" if pool.limit_bytes else "?"
        rows.append((where(pool), str(pool.peak.phase), show_bytes(pool.peak.num_bytes), limit, used))
    return rows


def as_text(memory: MemoryEstimate) -> str:
    """Everything for people: the table, the arithmetic of each peak, KV caches, notes. Ends with a newline."""
    lines: list[str] = []
    if memory.shape is not None:
        lines.append(f"model: {show_count(memory.shape.parameters)} parameters")
        lines += _table([HEADERS, *as_rows(memory)])
        lines += _peaks(memory.pools[:MAX_POOLS])
        if len(memory.pools) > MAX_POOLS:
            lines.append(f"and {len(memory.pools) - MAX_POOLS} further situations, none of them fuller")
        lines += [_capacity(cache) for cache in memory.capacities]
    lines += [f"note: {note}" for note in memory.notes]
    return "\n".join(lines) + "\n"


def as_document(memory: MemoryEstimate) -> dict[str, Any]:
    """The whole estimate as JSON-ready data; bytes are whole numbers."""
    return {
        "parameters": None if memory.shape is None else memory.shape.parameters,
        "pools": [_pool(pool) for pool in memory.pools],
        "kvCaches": [
            {
                "component": cache.component,
                "nodeGroup": cache.group,
                "bytes": cache.kv_bytes,
                "formula": cache.formula,
                "bytesPerToken": cache.bytes_per_token,
                "tokens": cache.tokens,
                "fullSequences": cache.full_sequences,
            }
            for cache in memory.capacities
        ],
        "notes": list(memory.notes),
    }


def _pool(pool: PoolEstimate) -> dict[str, Any]:
    return {
        "kind": pool.kind.value,
        "nodeGroup": pool.group,
        "count": pool.count,
        "first": pool.first,
        "limitBytes": pool.limit_bytes,
        "peakPhase": pool.peak.phase.value,
        "peakBytes": pool.peak.num_bytes,
        "phases": [
            {
                "phase": phase.phase.value,
                "bytes": phase.num_bytes,
                "terms": [
                    {
                        "component": term.component,
                        "kind": term.need.kind.value,
                        "name": term.need.name,
                        "formula": term.need.formula,
                        "processes": term.processes,
                        "bytes": term.num_bytes,
                    }
                    for term in phase.terms
                ],
            }
            for phase in pool.phases
        ],
    }


def _peaks(pools: Sequence[PoolEstimate]) -> list[str]:
    """The arithmetic of each peak, once for all pools that have the same."""
    places: dict[str, list[str]] = {}
    for pool in pools:
        places.setdefault(f"{pool.peak.phase}: {arithmetic(pool.peak)}", []).append(where(pool))
    return [f"{'; '.join(together)}, {text}" for text, together in places.items()]


def _capacity(cache: KVCapacity) -> str:
    size = f"{cache.component} KV cache per device of {cache.group}: {show_bytes(cache.kv_bytes)} ({cache.formula})"
    if cache.tokens is None or cache.full_sequences is None:
        return size
    return f"{size}, {cache.tokens:,} tokens, {counted(cache.full_sequences, 'full request')} of {cache.full_tokens:,} tokens"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    padded = [
        [cell.rjust(width) if number >= NUM_TEXT_COLUMNS else cell.ljust(width) for cell in column]
        for number, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
