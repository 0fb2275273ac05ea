"""What our switches reach, alone and two at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench.offload.limits import WIDTH, synchronize
from rljob_runtime.offload.copies import CudaCopies
from rljob_runtime.offload.memory import host_rss_bytes
from rljob_runtime.offload.slabs import HostSlabs
from rljob_runtime.offload.states import StateKind
from rljob_runtime.offload.store import StateStore

KINDS = (StateKind.PARAMS, StateKind.OPTIMIZER)


class TimedRelease(CudaCopies):
    """Also measures how long the driver takes to get freed memory back, which is part of an offload but no copy."""

    def __init__(self, device: torch.device) -> None:
        """Nothing measured yet."""
        super().__init__(device)
        self.seconds: list[float] = []

    def release(self) -> None:
        """As :class:`CudaCopies`."""
        started = time.perf_counter()
        super().release()
        self.seconds.append(time.perf_counter() - started)


class State:
    """Parameters and AdamW states of one policy, and the store that moves them."""

    def __init__(self, device: torch.device, layers: int, name: str = "bench") -> None:
        """Fill ``layers`` square float32 matrices and twice as much optimizer state with numbers that tell errors apart."""
        generator = torch.Generator(device).manual_seed(layers)
        self.slabs = HostSlabs(pinned=device.type == "cuda")
        self.copies = TimedRelease(device) if device.type == "cuda" else None
        self.store = StateStore(device, self.slabs, name=name, copies=self.copies)
        self.tensors = [torch.rand(WIDTH, WIDTH, device=device, generator=generator) for _ in range(3 * layers)]
        for index, tensor in enumerate(self.tensors):
            self.store.register(StateKind.PARAMS if index < layers else StateKind.OPTIMIZER, str(index), tensor)

    def checksums(self) -> list[int]:
        """One exact number per tensor: the sum of its bits as integers."""
        return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in self.tensors]


def switches(device: torch.device, layers: int, repeat: int) -> dict[str, Any]:
    """Offload and load of parameters and optimizer states."""
    state = State(device, layers)
    sums, total_bytes = state.checksums(), sum(t.nbytes for t in state.tensors)
    started = time.perf_counter()
    state.store.reserve(KINDS)
    reserve_s = time.perf_counter() - started
    first = state.store.offload(KINDS)
    rss_away_bytes = host_rss_bytes()
    state.store.load(KINDS)
    taken = state.slabs.allocations
    out = [(state.store.offload(KINDS), state.store.load(KINDS)) for _ in range(repeat)]
    release_s = statistics.median(state.copies.seconds[1:]) if state.copies is not None else None
    if state.checksums() != sums or state.slabs.allocations != taken:
        raise RuntimeError("state changed, or host memory was taken after warm-up")
    offload_s, load_s = (statistics.median(pair[i].elapsed_s for pair in out) for i in (0, 1))
    return {
        "bytes": total_bytes,
        "reserve_s": reserve_s,
        "first_offload_s": first.elapsed_s,
        "offload_s": offload_s,
        "load_s": load_s,
        "release_s": release_s,
        "offload_gb_per_s": total_bytes / offload_s / 1e9,
        "load_gb_per_s": total_bytes / load_s / 1e9,
        "host_bytes_kept": state.slabs.held_bytes,
        "host_rss_away_bytes": rss_away_bytes,
        "device_bytes_there": out[-1][0].before.allocated_bytes,
        "device_bytes_away": out[-1][0].after.allocated_bytes,
        "device_reserved_bytes_away": out[-1][0].after.reserved_bytes,
        "device_peak_bytes_of_a_switch": max(report.after.peak_bytes for pair in out for report in pair),
        "bit_equal": True,
    }


def duplex(device: torch.device, layers: int, repeat: int) -> dict[str, float]:
    """Two components change places: one leaves while the other comes back, in two threads, against one after the other."""
    first, second = State(device, layers, "first"), State(device, layers, "second")
    sums = first.checksums(), second.checksums()
    second.store.offload(KINDS)
    first.store.reserve(KINDS)

    def swap(leaving: State, coming: State, at_once: bool) -> float:
        synchronize(device)
        started = time.perf_counter()
        if at_once:
            failures: list[BaseException] = []
            threads = [threading.Thread(target=_run, args=(work, failures)) for work in (leaving.store.offload, coming.store.load)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise RuntimeError("a switch failed") from failures[0]
        else:
            leaving.store.offload(KINDS)
            coming.store.load(KINDS)
        return time.perf_counter() - started

    seconds: dict[bool, list[float]] = {True: [], False: []}
    for index in range(2 * (repeat + 1)):
        at_once = index % 4 < 2
        seconds[at_once].append(swap(first, second, at_once))
        first, second = second, first
    second.store.load(KINDS)
    first.store.load(KINDS)
    if {tuple(s.checksums()) for s in (first, second)} != {tuple(s) for s in sums}:
        raise RuntimeError("state changed")
    serial_s, together_s = (statistics.median(seconds[at_once][1:]) for at_once in (False, True))
    moved_bytes = 2 * sum(t.nbytes for t in first.tensors)
    return {"bytes": moved_bytes, "serial_s": serial_s, "together_s": together_s, "times": serial_s / together_s} | {
        "together_gb_per_s": moved_bytes / together_s / 1e9
    }


def _run(work: Callable[[Iterable[StateKind]], object], failures: list[BaseException]) -> None:
    try:
        work(KINDS)
    except RuntimeError as error:
        failures.append(error)
