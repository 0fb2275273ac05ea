"""Memory of a process and its device at one moment: always on, well under a millisecond."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rljob_runtime.offload.states import MemorySnapshot

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_MIB = 2**20
_LOGGER = logging.getLogger(__name__)


def snapshot(
    device: torch.device, pinned_bytes: int, *, resident_bytes: int = 0, peak_bytes: int = 0, reset_peak: bool = True
) -> MemorySnapshot:
    """Read the counters.

    Args:
        device: CUDA is asked itself; a CPU has no allocator to ask, so there the next two arguments count.
        pinned_bytes: host memory kept for offloaded state.
        resident_bytes: of state on the device, if that is a CPU; what a store accounts for.
        peak_bytes: largest ``resident_bytes`` since the snapshot before, if the device is a CPU.
        reset_peak: the next peak starts here.
    """
    if device.type != "cuda":
        return MemorySnapshot(
            allocated_bytes=resident_bytes,
            reserved_bytes=resident_bytes,
            peak_bytes=max(peak_bytes, resident_bytes),
            host_rss_bytes=host_rss_bytes(),
            pinned_bytes=pinned_bytes,
        )
    stats: Mapping[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)  # one call; each of torch's accessors builds it again
    if reset_peak and stats:
        torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = _pool(stats, "allocated_bytes"), _pool(stats, "reserved_bytes")
    return MemorySnapshot(
        allocated_bytes=allocated["current"],
        reserved_bytes=reserved["current"],
        peak_bytes=allocated["peak"],
        host_rss_bytes=host_rss_bytes(),
        pinned_bytes=pinned_bytes,
    )


def _pool(stats: Mapping[str, Any], name: str) -> Mapping[str, int]:
    """One counter over all pools; zeros before the process's first CUDA allocation."""
    found: Mapping[str, int] = stats.get(name, {}).get("all", {"current": 0, "peak": 0})
    return found


def host_rss_bytes() -> int:
    """Resident memory of this process (``/proc/self/statm``, second field, in pages)."""
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def log_memory_usage(
    head: str, logger: logging.Logger | None = None, rank: int | None = None, *, memory: MemorySnapshot | None = None
) -> None:
    """Log one line about memory; every call logs, however many came before.

    Args:
        head: what the line is about.
        logger: gets it at level INFO; None: the one of this module.
        rank: of the process group; only that rank logs. None: all do.
        memory: what to print, such as a store's ``memory()``; None reads the current device, leaving its peak as it is, and takes all
            memory that this process has page-locked for what it keeps.
    """
    if rank is not None and dist.is_initialized() and dist.get_rank() != rank:
        return
    room = ""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info(device)  # what other processes use is in these two only
        room = f", {free / _MIB:.1f} free of {total / _MIB:.1f}"
        pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    else:
        device, pinned_bytes = torch.device("cpu"), 0
    if memory is None:
        memory = snapshot(device, pinned_bytes, reset_peak=False)
    (_LOGGER if logger is None else logger).info(
        "%s: device %.1f MiB allocated, %.1f reserved, %.1f peak%s; host %.1f MiB resident, %.1f pinned",
        head,
        memory.allocated_bytes / _MIB,
        memory.reserved_bytes / _MIB,
        memory.peak_bytes / _MIB,
        room,
        memory.host_rss_bytes / _MIB,
        memory.pinned_bytes / _MIB,
    )
