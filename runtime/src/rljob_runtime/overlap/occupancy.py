"""How much of the engines' capacity was in use: slots with a request over slots, averaged over time; and when a worker had work at all."""

from __future__ import annotations


class Occupancy:
    """Integrates the load over time, fed at every change; O(1) each."""

    def __init__(self, slots: int) -> None:
        """``slots``: requests that one engine computes at a time."""
        self._slots = slots
        self._used = 0
        self._since_s = 0.0
        self._began_s = 0.0
        self._slot_s = 0.0

    def change(self, running: int, time_s: float) -> None:
        """From ``time_s`` on so many requests are at the engine; those beyond its slots wait there."""
        self._slot_s += self._used * (time_s - self._since_s)
        self._used, self._since_s = min(running, self._slots), time_s

    def take(self, time_s: float) -> float:
        """Share of the slots in use since the last call, 0 to 1."""
        self.change(self._used, time_s)
        used, elapsed_s = self._slot_s, time_s - self._began_s
        self._slot_s, self._began_s = 0.0, time_s
        return used / (self._slots * elapsed_s) if elapsed_s > 0 else 0.0


class BusySpans:
    """From when to when a worker had work, fed at every change; O(1) each."""

    def __init__(self) -> None:
        """It has none."""
        self._since_s: float | None = None
        self._spans: list[tuple[float, float]] = []

    def change(self, is_busy: bool, time_s: float) -> None:
        """Whether it has work from ``time_s`` on."""
        if is_busy and self._since_s is None:
            self._since_s = time_s
        elif not is_busy and self._since_s is not None:
            self._spans.append((self._since_s, time_s))
            self._since_s = None

    def take(self, time_s: float) -> list[tuple[float, float]]:
        """(start, end) of all work since the last call; what goes on is cut here."""
        goes_on = self._since_s is not None
        self.change(False, time_s)
        self.change(goes_on, time_s)
        taken, self._spans = self._spans, []
        return [(start_s, end_s) for start_s, end_s in taken if end_s > start_s]
