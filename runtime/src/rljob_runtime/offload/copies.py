"""How bytes travel between device and slabs: on CUDA over own streams, on the CPU as plain copies; one code path above both."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import torch

IN_FLIGHT_BYTES = 256 * 2**20
"""How far copies run ahead of the host on CUDA: long enough to keep the bus busy, short enough for memory to be freed as it lands."""


class Direction(StrEnum):
    """Which way bytes go."""

    OFFLOAD = "offload"
    LOAD = "load"


class Copies(Protocol):
    """One device's copies; used from one thread, one direction at a time."""

    in_flight_bytes: int
    """Bytes that may be under way before the oldest is waited for."""

    def begin(self, direction: Direction) -> None:
        """Later copies go this way, after everything the current stream was given so far."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between uint8 tensors of equal length; it may still be under way when this returns."""
        ...

    def mark(self) -> object:
        """A point behind all copies given so far."""
        ...

    def wait(self, mark: object) -> None:
        """Return when the copies before the mark are done."""
        ...

    def drain(self) -> None:
        """Return when all copies are done; the current stream then sees them."""
        ...

    def release(self) -> None:
        """Give freed device memory to other processes."""
        ...


class HostCopies:
    """The CPU as device: copies are done when they return."""

    in_flight_bytes = 0

    def begin(self, direction: Direction) -> None:
        """Nothing to order."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A memcpy."""
        target.copy_(source)

    def mark(self) -> None:
        """Everything is done already."""

    def wait(self, mark: object) -> None:
        """Everything is done already."""

    def drain(self) -> None:
        """Everything is done already."""

    def release(self) -> None:
        """The C library decides when the system gets memory back."""


class CudaCopies:
    """Asynchronous copies through pinned memory, one stream for each direction, events instead of device-wide synchronization.

    ``record_stream`` is not needed: whoever frees or reuses memory waits for the event behind its copy first, and holds it until then.
    """

    in_flight_bytes = IN_FLIGHT_BYTES

    def __init__(self, device: torch.device) -> None:
        """Make the two streams."""
        self._device = device
        self._streams = {direction: torch.cuda.Stream(device) for direction in Direction}
        self._active = self._streams[Direction.OFFLOAD]

    def begin(self, direction: Direction) -> None:
        """The direction's stream waits for the current one, which made the bytes or allocated their place."""
        self._active = self._streams[direction]
        self._active.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue on the direction's stream."""
        with torch.cuda.stream(self._active):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """An event; waiting for it sleeps instead of spinning."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._active)
        return event

    def wait(self, mark: object) -> None:
        """Sleep until the event."""
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def drain(self) -> None:
        """Both streams, because a roll-back may follow copies of the other direction."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            event.synchronize()

    def release(self) -> None:
        """Return cached blocks to the driver; without it freed memory stays this process's."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


def copies_for(device: torch.device) -> Copies:
    """The copies of a device.

    Raises:
        ValueError: neither a CPU nor a CUDA device.
    """
    if device.type == "cuda":
        return CudaCopies(device)
    if device.type == "cpu":
        return HostCopies()
    raise ValueError(f"device is {device}; offload knows cpu and cuda")
