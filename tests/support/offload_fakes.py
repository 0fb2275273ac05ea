"""Copies that fail or come late, and equality of bytes: shared by the tests of offload."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rljob_runtime.offload.copies import Direction, HostCopies
from rljob_runtime.offload.slabs import SMALLEST_CHUNK_BYTES, HostSlabs
from rljob_runtime.offload.states import StateKind
from rljob_runtime.offload.store import StateStore

CPU = torch.device("cpu")


def make_store(copies: object = None, *, budget_bytes: int | None = None, chunk_bytes: int = SMALLEST_CHUNK_BYTES) -> StateStore:
    """A store on the CPU with slabs of its own."""
    return StateStore(CPU, HostSlabs(pinned=False, budget_bytes=budget_bytes, chunk_bytes=chunk_bytes), name="policy", copies=copies)  # type: ignore[arg-type]


def two_kinds(copies: object = None, *, budget_bytes: int | None = None) -> tuple[StateStore, dict[str, torch.Tensor]]:
    """Three parameters and two optimizer states, float32."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(size, generator=generator) for name, size in {"a": 40_000, "b": 7, "c": 20_000, "m": 5, "v": 20_000}.items()
    }
    store = make_store(copies, budget_bytes=budget_bytes)
    for name, tensor in tensors.items():
        store.register(StateKind.PARAMS if name in "abc" else StateKind.OPTIMIZER, name, tensor)
    return store, tensors


def bytes_of(tensor: torch.Tensor) -> bytes:
    """All bytes of the tensor's values; of a copy, because a storage that NumPy has seen cannot be freed any more."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return copy.view(torch.uint8).numpy().tobytes() if copy.numel() else b""


class FailingCopies(HostCopies):
    """Raises at the copies with the given indices, counted over the store's life."""

    def __init__(self, *failing: int, error: Callable[[str], BaseException] = RuntimeError) -> None:
        self.failing = failing
        self.error = error
        self.count = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        index, self.count = self.count, self.count + 1
        if index in self.failing:
            target.fill_(77)  # torn, as a broken copy leaves it
            raise self.error(f"copy {index} failed")
        super().copy(target, source)


class LateCopies(HostCopies):
    """Makes copies only when somebody waits for them, as a stream does; memory that went away meanwhile is an error."""

    in_flight_bytes = 3 * SMALLEST_CHUNK_BYTES

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.most_pending_bytes = 0

    def begin(self, direction: Direction) -> None:
        if direction is Direction.OFFLOAD:
            assert not self.pending, "copies of the switch before were not waited for"

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.pending.append((target, source))
        self.most_pending_bytes = max(self.most_pending_bytes, sum(s.numel() for _, s in self.pending))

    def mark(self) -> object:
        return self.done + len(self.pending)

    def wait(self, mark: object) -> None:
        assert isinstance(mark, int)
        while self.done < mark:
            target, source = self.pending.pop(0)
            for tensor in (target, source):
                storage = tensor.untyped_storage()
                assert storage.size() >= tensor.storage_offset() + tensor.numel(), "freed before its copy was done"
            target.copy_(source)
            self.done += 1

    def drain(self) -> None:
        self.wait(self.done + len(self.pending))
