"""A strict fake of CUDA's copies and page-locking: what would be undefined on a device is an error here."""

from __future__ import annotations

import torch

from rljob_runtime.offload.copies import Direction

TORN = 77


class StrictFakeCuda:
    """Copies of one device and page-locked memory of one process; device memory is the host's.

    A copy is made when somebody waits for it, never earlier. Until then its target is torn, and its source must not change. Host memory
    of a copy has to be page-locked from before the copy until after it; with ``refuses``, nothing is locked and copies are made at once,
    as CUDA makes those of pageable memory.
    """

    in_flight_bytes = 0

    def __init__(self, *, refuses: str | None = None, fails_at: int | None = None) -> None:
        """``refuses``: why no memory can be locked; ``fails_at``: number of the copy that cannot be begun."""
        self.refuses = refuses
        self.fails_at = fails_at
        self.events: list[str] = []
        self.locked: dict[int, int] = {}
        """Address -> bytes."""
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Target, source, and what was in the source."""
        self._begun = 0
        self._made = 0
        self._direction: Direction | None = None

    def lock(self, address: int, size_bytes: int) -> str | None:
        self.events.append("lock")
        if self.refuses is not None:
            return self.refuses
        taken = [start for start, size in self.locked.items() if start < address + size_bytes and address < start + size]
        assert not taken, "memory is page-locked twice"
        self.locked[address] = size_bytes
        return None

    def unlock(self, address: int) -> str | None:
        self.events.append("unlock")
        assert address in self.locked, "memory is unlocked that is not page-locked"
        end = address + self.locked.pop(address)
        touched = [one for pair in self._pending for one in pair[:2] if address <= one.data_ptr() < end]
        assert not touched, "memory is unlocked while a copy may use it"
        return None

    def begin(self, direction: Direction) -> None:
        assert not self._pending, "copies of before were not waited for"
        self._direction = direction

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.numel() == source.numel()
        assert target.dtype == source.dtype == torch.uint8
        assert self._direction is not None, "a copy without a direction"
        if self._begun == self.fails_at:
            raise RuntimeError("CUDA error: a copy could not be begun")
        self._begun += 1
        self.events.append("copy")
        if self.refuses is not None:
            target.copy_(source)
            self._made += 1
            return
        host = target if self._direction is Direction.OFFLOAD else source
        first, end = host.data_ptr(), host.data_ptr() + host.numel()
        assert any(start <= first and end <= start + size for start, size in self.locked.items()), (
            "a copy of memory that is not page-locked"
        )
        self._pending.append((target, source, source.clone()))
        target.fill_(TORN)

    def mark(self) -> object:
        return self._begun

    def wait(self, mark: object) -> None:
        assert isinstance(mark, int)
        self.events.append(f"wait {mark}")
        while self._made < mark:
            target, source, before = self._pending.pop(0)
            assert torch.equal(source, before), "the source of a copy was changed before the copy was made"
            target.copy_(source)
            self._made += 1

    def drain(self) -> None:
        self.wait(self._begun)
        self.events[-1] = "drain"

    def release(self) -> None:
        raise AssertionError("staging has no memory to release")
