"""What can leave a device, and where it is: the words that arbiter, copies, trainers and engines share. Data only, no torch.

::

    ON_DEVICE ── offload ──> OFFLOADING ──> OFFLOADED
        ^                        |              |
        +──────── LOADING <──────+──── load ────+        a failure in between ends in BROKEN, which only a restart leaves
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class StateKind(StrEnum):
    """A part of what a component keeps on its device."""

    PARAMS = "params"
    """Weights: a trainer's float32 masters, a reference's or an engine's weights, frozen LoRA bases included."""
    GRADS = "grads"
    """Gradients between two micro-batches; re-derivable between two updates."""
    OPTIMIZER = "optimizer"
    """AdamW's moments."""
    KV_CACHE = "kv_cache"
    """An engine's cache; re-derivable, so never copied."""
    OTHER = "other"
    """Buffers, and what a backend can free besides: CUDA graphs, workspaces, communicators."""


class Residence(StrEnum):
    """Where a kind of state of one component is."""

    ON_DEVICE = "OnDevice"
    OFFLOADING = "Offloading"
    OFFLOADED = "Offloaded"
    LOADING = "Loading"
    BROKEN = "Broken"
    """A copy failed half-way: nothing may use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Memory of one worker's process and device at one moment."""

    allocated_bytes: int
    """Bytes of tensors on the device."""
    reserved_bytes: int
    """Held by the device's allocator."""
    peak_bytes: int
    """Largest ``allocated_bytes`` since the snapshot before."""
    host_rss_bytes: int
    """Resident memory of the process."""
    pinned_bytes: int
    """Host memory kept for offloaded state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """One offload or load of one worker."""

    direction: str
    """``offload`` or ``load``."""
    copied_bytes: Mapping[StateKind, int]
    """Bytes that traveled, by kind."""
    freed_bytes: Mapping[StateKind, int]
    """Bytes given back (offload) or taken (load) on the device, by kind; more than copied where state is re-derivable."""
    elapsed_s: float
    before: MemorySnapshot
    after: MemorySnapshot
    undefined: frozenset[StateKind] = field(default_factory=frozenset)
    """Kinds that are on the device again without their content: it was not copied, and must be written before use."""
