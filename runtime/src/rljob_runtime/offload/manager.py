"""State on the device for the duration of a block, off it afterwards, with the cost of both written down."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager

from rljob_runtime.offload.states import MemorySnapshot, StateKind, SwitchReport
from rljob_runtime.offload.store import StateStore


@contextmanager
def state_offload_manager(
    store: StateStore,
    *,
    include: Iterable[StateKind] | None = None,
    is_offload_states: bool = True,
    metrics: MutableMapping[str, float] | None = None,
    infix: str = "block",
) -> Iterator[None]:
    """Offload the complement of ``include``, load ``include``, run the block, offload everything; also if the block raises.

    Args:
        store: whose state moves.
        include: kinds that the block needs; None: all.
        is_offload_states: False leaves on the device what is there when the block ends.
        metrics: gets, always, ``time/<infix>/{load,execute,offload}_s``, ``offload/<infix>/{load,offload}_{bytes,gb_per_s}`` (bytes that
            traveled, 10^9 of them a second) and, at the moments ``start``, ``loaded``, ``executed`` and ``end``,
            ``memory/<infix>/<moment>/{allocated,reserved,peak,host_rss,pinned}_bytes``. What the complement's offload moves counts
            under ``offload``; peaks are those since the moment before. All are in the reference of metrics.
        infix: what the block is, such as a method's name.

    Raises:
        ValueError: ``infix`` is empty.
        OffloadError: a switch failed; from the block's own error where that came first.
    """
    if not infix:
        raise ValueError("infix is empty; metrics are named after it, so give it a word, such as 'score'")
    wanted = frozenset(StateKind if include is None else include)
    values: MutableMapping[str, float] = {} if metrics is None else metrics
    part = f"{infix}/"
    left = store.offload(frozenset(StateKind) - wanted)
    _write_memory(values, f"{part}start", left.before)
    _write_switch(values, part, "offload", [left])
    loaded = store.load(wanted)
    _write_memory(values, f"{part}loaded", loaded.after)
    _write_switch(values, part, "load", [loaded])
    started = time.perf_counter()
    try:
        yield
    finally:
        values[f"time/{part}execute_s"] = time.perf_counter() - started
        after = store.offload(StateKind) if is_offload_states else None
        executed = store.memory() if after is None else after.before
        _write_memory(values, f"{part}executed", executed)
        _write_memory(values, f"{part}end", executed if after is None else after.after)
        _write_switch(values, part, "offload", [left] if after is None else [left, after])


def _write_switch(values: MutableMapping[str, float], part: str, name: str, reports: list[SwitchReport]) -> None:
    seconds = sum(report.elapsed_s for report in reports)
    copied_bytes = sum(sum(report.copied_bytes.values()) for report in reports)
    values[f"time/{part}{name}_s"] = seconds
    values[f"offload/{part}{name}_bytes"] = float(copied_bytes)
    values[f"offload/{part}{name}_gb_per_s"] = copied_bytes / seconds / 1e9 if seconds > 0 else 0.0


def _write_memory(values: MutableMapping[str, float], part: str, memory: MemorySnapshot) -> None:
    for name in ("allocated", "reserved", "peak", "host_rss", "pinned"):
        values[f"memory/{part}/{name}_bytes"] = float(getattr(memory, f"{name}_bytes"))
