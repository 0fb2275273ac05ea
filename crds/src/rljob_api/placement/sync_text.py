"""A sync plan in words and ranges, for ``rljob plan``. Called by :meth:`SyncPlan.text`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from rljob_api.placement.sync_routes import PACKING_RANK, TRANSPORTS, SyncPlan, Transport

MAX_LISTED = 8
"""Numbers that a line repeats where they form no range."""
_WORDS = {Transport.SAME_DEVICE: "same device", Transport.SAME_NODE: "same node", Transport.NETWORK: "network"}


def render(plan: SyncPlan, max_lines: int) -> str:
    """See :meth:`SyncPlan.text`."""
    trainer, engines = plan.trainer, plan.engines
    head = (
        f"weight sync by {plan.backend}: {_count(len(trainer.ranks), 'trainer rank')} "
        f"({trainer.num_replicas} x tp {trainer.tensor_parallel_size}) to {_count(len(engines.engines), 'engine')} "
        f"(tp {engines.tensor_parallel_size}, pp {engines.pipeline_parallel_size})"
    )
    return "\n".join([head, f"  {_figures(plan)}", *(_whole(plan) if plan.moves_whole_tensors else _folded(plan, max_lines))])


def number_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order as short text: ``3``, ``0-3``, ``0-6 step 2``, ``0,2,0,2``; cut after some where there is no pattern."""
    first, last = numbers[0], numbers[-1]
    step = numbers[1] - first if len(numbers) > 1 else 0
    if all(number == first for number in numbers):
        return str(first)
    if step > 0 and len(numbers) > 2 and all(b - a == step for a, b in pairwise(numbers)):
        return f"{first}-{last}" if step == 1 else f"{first}-{last} step {step}"
    shown = ",".join(map(str, numbers[:MAX_LISTED]))
    return shown if len(numbers) <= MAX_LISTED else f"{shown},..,{last}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _figures(plan: SyncPlan) -> str:
    figures = plan.figures
    where = f"same device {figures.same_device:.1%}, same node {figures.same_node:.1%}, network {figures.network:.1%}"
    if figures.busiest_rank is None:
        return f"{where}; no byte leaves its device"
    return f"{where}; busiest sender: rank {figures.busiest_rank} with {figures.busiest_share:.1%}, ideal {figures.ideal_share:.1%}"


def _whole(plan: SyncPlan) -> list[str]:
    gather = "" if len(plan.trainer.ranks) == 1 else "all ranks gather, "
    return [f"  {gather}rank {PACKING_RANK} packs whole tensors; every engine loads them from the object store, one copy per node"]


def _folded(plan: SyncPlan, max_lines: int) -> list[str]:
    """A line per piece of a run of engines; the sources of all engines of the run stand on it."""
    pieces = list(islice(plan.routes(), len(plan.sources) // len(plan.engines.engines)))
    lines: list[str] = []
    shown = 0
    for start, stop in _runs(plan, len(pieces)):
        for offset, piece in enumerate(pieces[: max_lines - len(lines)]):
            sources = plan.sources[start * len(pieces) + offset : stop * len(pieces) : len(pieces)]
            shown += len(sources)
            transport = TRANSPORTS[plan.transports[start * len(pieces) + offset]]
            stage = f" stage {piece.stage}" if plan.engines.pipeline_parallel_size > 1 else ""
            lines.append(
                f"  {_named('engine', range(start, stop))}{stage} tp {piece.engine_shard}: "
                f"{_named('atom', range(piece.first_atom, piece.end_atom))} of {plan.num_atoms} "
                f"<- {_named('rank', sources)} ({_WORDS[transport]})"
            )
        if len(lines) == max_lines:
            break
    left_out = len(plan.sources) - shown
    return [*lines, f"  .. and {_count(left_out, 'more route')}"] if left_out else lines


def _runs(plan: SyncPlan, num_pieces: int) -> Iterator[tuple[int, int]]:
    """First and behind the last of successive engines whose routes differ in nothing but the source ranks."""
    start, wires = 0, plan.transports[:num_pieces]
    for engine in range(1, len(plan.engines.engines)):
        here = plan.transports[engine * num_pieces : (engine + 1) * num_pieces]
        if here != wires:
            yield start, engine
            start, wires = engine, here
    yield start, len(plan.engines.engines)


def _named(noun: str, numbers: Sequence[int]) -> str:
    text = number_ranges(numbers)
    return f"{noun} {text}" if text.isdigit() else f"{noun}s {text}"
