"""Stands in for ``torch_memory_saver``, by which SGLang gives device memory back, where CPU cores compute: the package needs CUDA's driver.

What the package does to CUDA memory this does to CPU memory: storages that are allocated inside ``region(tag)`` are remembered without
being kept alive, ``pause(tag)`` gives their memory back to the system, ``resume(tag)`` takes it again, so that every tensor over them stays
good. Their content comes back where the region asked for a backup, and is zero otherwise.

``RLJOB_MEMORY_LEDGER`` names a file that says at any time how many bytes each tag has: JSON, by tag. Like ``sgl_kernel`` beside it this is
on the path of the server's processes on CPU machines only.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEDGER_VARIABLE = "RLJOB_MEMORY_LEDGER"


@dataclass(slots=True)
class _Piece:
    """One storage."""

    reference: StorageWeakRef
    keeps: bool
    """Whether its content survives a pause."""
    size_bytes: int = 0
    """What it goes back to; 0 while it has its memory."""
    backup: torch.Tensor | None = None

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, while something uses it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return found


class _Recorder(TorchDispatchMode):
    """Notices every storage that is made inside it."""

    def __init__(self, pieces: dict[int, _Piece], keeps: bool) -> None:
        super().__init__()
        self._pieces = pieces
        self._keeps = keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            known = self._pieces.get(storage._cdata)
            if storage._cdata not in given and (known is None or known.reference.expired()):
                self._pieces[storage._cdata] = _Piece(StorageWeakRef(storage), self._keeps)
        return result


class TorchMemorySaver:
    """See the package's class of this name; what SGLang calls of it."""

    enabled = True

    def __init__(self) -> None:
        """Nothing is remembered yet."""
        self._pieces: dict[str, dict[int, _Piece]] = {}

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Remember what is allocated inside the block."""
        with _Recorder(self._pieces.setdefault(tag, {}), enable_cpu_backup):
            yield
        self._forget_dead(tag)
        self._write()

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Memory that is allocated inside the block is nobody's."""
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    def pause(self, tag: str) -> None:
        """Give the memory of a tag back."""
        self._forget_dead(tag)
        for piece in self._pieces.get(tag, {}).values():
            storage = piece.storage()
            if storage is None or not storage.nbytes() or not storage.resizable():
                continue
            piece.size_bytes = storage.nbytes()
            piece.backup = _bytes(storage).clone() if piece.keeps else None
            storage.resize_(0)
        _return_pages()
        self._write()

    def resume(self, tag: str) -> None:
        """Take it again."""
        for piece in self._pieces.get(tag, {}).values():
            storage = piece.storage()
            if storage is None or not piece.size_bytes:
                continue
            storage.resize_(piece.size_bytes)
            content = _bytes(storage)
            content.zero_() if piece.backup is None else content.copy_(piece.backup)
            piece.size_bytes, piece.backup = 0, None
        self._write()

    def _forget_dead(self, tag: str) -> None:
        pieces = self._pieces.get(tag, {})
        for key in [key for key, piece in pieces.items() if piece.reference.expired()]:
            del pieces[key]

    def _write(self) -> None:
        """Bring the ledger up to date, in one step for whoever reads it."""
        ledger = os.environ.get(LEDGER_VARIABLE)
        if ledger is None:
            return
        held = {tag: sum(storage.nbytes() for p in pieces.values() if (storage := p.storage())) for tag, pieces in self._pieces.items()}
        written = Path(f"{ledger}.{os.getpid()}")
        written.write_text(json.dumps(held))
        written.replace(ledger)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Memory behind the tensors in nested values."""
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]


def _return_pages() -> None:
    """Have the C library give freed pages back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """The package preloads a library here."""
    yield


torch_memory_saver = TorchMemorySaver()
"""What SGLang imports."""
