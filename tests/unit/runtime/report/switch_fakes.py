"""Fabricated switches for the tests of what people see of them."""

from rljob_runtime.offload.plan import Device, Direction
from rljob_runtime.offload.records import DeviceResidency, MoveRecord, ProcessResidency, SwitchRecord
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport

PARAMS, GRADS, OPTIMIZER, KV, OTHER = StateKind
MIB = 2**20
AWAY = {Direction.OFFLOAD: Residence.OFFLOADED, Direction.LOAD: Residence.ON_DEVICE}


def snapshot(allocated: int, pinned: int) -> MemorySnapshot:
    return MemorySnapshot(
        allocated_bytes=allocated * MIB,
        reserved_bytes=(allocated + 2) * MIB,
        peak_bytes=(allocated + 1) * MIB,
        host_rss_bytes=500 * MIB,
        pinned_bytes=pinned * MIB,
    )


def make_move(
    worker: str,
    direction: Direction,
    kinds: tuple[StateKind, ...],
    started_s: float,
    ended_s: float,
    *,
    devices: tuple[Device, ...] = (Device(0, 0),),
    error: str = "",
    residence: Residence | None = None,
) -> MoveRecord:
    """One call; each kind has 10 MiB."""
    sizes = dict.fromkeys(kinds, 10 * MIB)
    before, after = snapshot(10 * len(kinds), 0), snapshot(0, 10 * len(kinds))
    if direction is Direction.LOAD:
        before, after = after, before
    report = SwitchReport(
        direction=direction.value, copied_bytes=sizes, freed_bytes=sizes, elapsed_s=(ended_s - started_s) / 2, before=before, after=after
    )
    return MoveRecord(
        client=worker.rpartition("-")[0],
        worker=worker,
        devices=devices,
        direction=direction,
        kinds=kinds,
        started_s=started_s,
        ended_s=ended_s,
        residence=residence or AWAY[direction],
        report=None if error else report,
        error=error,
    )


def make_switch(*moves: MoveRecord, what: str = "training of step 1") -> SwitchRecord:
    """One switch of these moves."""
    return SwitchRecord(
        what=what,
        owner="driver",
        client=moves[0].client,
        waited_s=0.25,
        started_s=min(move.started_s for move in moves),
        ended_s=max(move.ended_s for move in moves),
        moves=moves,
    )


def make_residency(on_device: dict[str, dict[StateKind, Residence]], *devices: Device) -> list[DeviceResidency]:
    """All workers on all devices."""
    processes = tuple(
        ProcessResidency(client=worker.rpartition("-")[0], worker=worker, alive=True, broken="", states=states, num_bytes=7)
        for worker, states in on_device.items()
    )
    return [DeviceResidency(device=device, budget_bytes=100, processes=processes) for device in devices]
