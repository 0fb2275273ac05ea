"""Moves storages between device and slabs, all of a switch or none of them.

A storage is emptied only when its copy has landed, and filled in full before this is reported; where a step fails, what was moved is moved
back. Tensor objects stay the same all along: only the memory behind their storage goes and comes, so optimizers, FSDP2's own views
(``_sharded_param_data``, ``_local_tensor``) and tied parameters need no update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rljob_runtime.offload.copies import Copies, Direction
from rljob_runtime.offload.slabs import Region
from rljob_runtime.offload.states import StateKind

POISON = 0xFF
"""Fills every byte of state that comes back without its content: NaN in all float formats, -1 in integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One storage of a switch."""

    kind: StateKind
    name: str
    """Name of the first tensor on it."""
    storage: torch.UntypedStorage
    size_bytes: int
    offset: int
    """Where in the kind's region; unused where nothing is copied."""
    region: Region | None
    """None: re-derivable, so not copied."""


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a store gets to know about a move."""

    account: Callable[[int], None]
    """Called with every change of device memory, in bytes."""
    undone: bool = False
    """The move failed and everything is where it was; False after a failure means that state is lost."""


def move_out(items: Sequence[Item], copies: Copies, dropped: Sequence[Callable[[], None]], ledger: Ledger) -> None:
    """Copy to the slabs and free on the device; what cannot be undone (drops, re-derivable state) comes last.

    Args:
        items: all on the device.
        copies: of the device.
        dropped: let their owners give state up.
        ledger: its ``undone`` tells after an error whether everything is on the device again. If not, what is not whole is empty.

    Raises:
        BaseException: whatever failed.
    """
    freed: list[Item] = []
    try:
        _copy_out([item for item in items if item.region is not None], copies, freed, ledger)
        for drop in dropped:
            drop()
    except BaseException:
        copies.drain()
        move_in([item for item in freed if item.storage.size() == 0], copies, Ledger(account=ledger.account))
        ledger.undone = True
        raise
    for item in items:
        if item.region is None:
            _free(item, ledger)


def move_in(items: Sequence[Item], copies: Copies, ledger: Ledger) -> None:
    """Take memory on the device and copy back from the slabs, which keep their bytes.

    Raises:
        BaseException: whatever failed; ``ledger.undone`` tells whether the slabs are certain to be as before.
    """
    taken: list[Item] = []
    try:
        _copy_in(items, copies, taken, ledger)
    except BaseException:
        try:
            copies.drain()  # a copy under way must not write into memory that is no longer ours
        finally:
            for item in taken:
                _free(item, ledger)
        ledger.undone = True
        raise


def _copy_out(items: Sequence[Item], copies: Copies, freed: list[Item], ledger: Ledger) -> None:
    copies.begin(Direction.OFFLOAD)
    flying: deque[tuple[Item, object]] = deque()
    flying_bytes = 0

    def land() -> None:
        nonlocal flying_bytes
        item, mark = flying.popleft()
        copies.wait(mark)
        flying_bytes -= item.size_bytes
        freed.append(item)
        _free(item, ledger)

    for item in items:
        assert item.region is not None
        device_bytes, done = _as_bytes(item.storage), 0
        for piece in item.region.pieces(item.offset, item.size_bytes):
            copies.copy(piece, device_bytes[done : done + piece.numel()])
            done += piece.numel()
        flying.append((item, copies.mark()))
        flying_bytes += item.size_bytes
        while flying and flying_bytes > copies.in_flight_bytes:
            land()
    while flying:
        land()


def _copy_in(items: Sequence[Item], copies: Copies, taken: list[Item], ledger: Ledger) -> None:
    for item in items:
        taken.append(item)
        item.storage.resize_(item.size_bytes)
        ledger.account(item.size_bytes)
        device_bytes, done = _as_bytes(item.storage), 0
        if item.region is None:
            device_bytes.fill_(POISON)
            continue
        copies.begin(Direction.LOAD)  # for each: its memory may have been used on the current stream a moment ago
        for piece in item.region.pieces(item.offset, item.size_bytes):
            copies.copy(device_bytes[done : done + piece.numel()], piece)
            done += piece.numel()
    copies.drain()


def _free(item: Item, ledger: Ledger) -> None:
    size_bytes = item.storage.size()
    if size_bytes:
        item.storage.resize_(0)
        ledger.account(-size_bytes)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's memory as one uint8 tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
