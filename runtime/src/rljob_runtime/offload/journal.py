"""What the arbiter writes down about its switches: records for who listens, metrics for who asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rljob_runtime.offload.leases import Claim
from rljob_runtime.offload.records import MoveRecord, SwitchRecord, switch_metrics

DEPARTURE = "leaving while idle"
"""Purpose of a switch that no claim asked for."""


class SwitchJournal:
    """Switches and waits since metrics were last taken."""

    def __init__(self, on_switch: Callable[[SwitchRecord], None]) -> None:
        """``on_switch`` is called after every switch."""
        self._on_switch = on_switch
        self._switches: list[SwitchRecord] = []
        self._waits_s: list[float] = []

    def waited(self, seconds: float) -> None:
        """A request got its devices after so long."""
        self._waits_s.append(seconds)

    def ended(
        self, claim: Claim | None, client: str, begun_s: float, ended_s: float, moves: Sequence[MoveRecord], fault: BaseException | None
    ) -> None:
        """A switch is over; ``claim`` is None where state left on its own."""
        record = SwitchRecord(
            what=DEPARTURE if claim is None else claim.what,
            owner="" if claim is None else claim.owner,
            client=client,
            waited_s=0.0 if claim is None else begun_s - claim.arrived_s,
            started_s=begun_s,
            ended_s=ended_s,
            moves=tuple(moves),
            error="" if fault is None else str(fault),
        )
        self._switches.append(record)
        self._on_switch(record)

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        metrics = switch_metrics(self._switches, self._waits_s)
        self._switches, self._waits_s = [], []
        return metrics
