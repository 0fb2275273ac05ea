"""Carries out a planned switch on the workers, and keeps the books right whatever happens.

| the worker's answer                    | books                  | the move                    |
|----------------------------------------|------------------------|-----------------------------|
| a report                               | moved                  | done                        |
| OffloadError, rolled back              | as before              | tried once more, then fails |
| HostBudgetError                        | as before              | fails: it would again       |
| OffloadError, anything else it raised  | kinds and client BROKEN| fails                       |
| no answer in time, cancelled           | kinds and client BROKEN| fails                       |
| WorkerLostError                        | process gone, BROKEN   | fails                       |

After a failure the other moves of the wave end on their own, and later waves are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from operator import attrgetter

from rljob_runtime.errors import OffloadError, RuntimeFault, WorkerLostError
from rljob_runtime.offload.accounts import ClientAccount, ProcessAccount
from rljob_runtime.offload.plan import Move, Switch, Wave
from rljob_runtime.offload.records import MoveRecord
from rljob_runtime.offload.states import SwitchReport

ATTEMPTS = 2
"""Attempts of a move that is rolled back each time."""


class Mover:
    """Makes the calls of a switch."""

    def __init__(self, clients: Mapping[str, ClientAccount], timeout_s: float, retire: Callable[[ClientAccount, str], None]) -> None:
        """``timeout_s``: of one call. ``retire`` is called with the client that is broken, and why."""
        self._clients = clients
        self._timeout_s = timeout_s
        self._retire = retire

    async def run(self, switch: Switch, records: list[MoveRecord]) -> RuntimeFault | None:
        """Wave after wave; returns the first failure. ``records`` grows as moves end."""
        for wave in switch.waves:
            faults = await asyncio.gather(*(self._process(moves, records) for moves in _by_process(wave)), return_exceptions=True)
            first = next((fault for fault in faults if fault is not None), None)
            if isinstance(first, RuntimeFault):
                return first
            if first is not None:  # a defect; the others have ended all the same
                raise first
        return None

    async def _process(self, moves: list[Move], records: list[MoveRecord]) -> RuntimeFault | None:
        """One worker's moves of a wave, one after the other."""
        for move in moves:
            client = self._clients[move.client]
            fault = await self._move(client, client.processes[move.index], move, records)
            if fault is not None:
                return fault
        return None

    async def _move(self, client: ClientAccount, process: ProcessAccount, move: Move, records: list[MoveRecord]) -> RuntimeFault | None:
        fault: RuntimeFault | None = None
        for _ in range(ATTEMPTS):
            started_s = asyncio.get_running_loop().time()
            report: SwitchReport | None = None
            fault = None
            settled = False
            try:
                process.begin(move)
                report = await process.spec.worker.call(move.direction.value, move.kinds, timeout_s=self._timeout_s)
                process.finish(move, report)
                settled = True
                if not process.alive:  # it was found out elsewhere while the answer was on its way
                    fault = OffloadError(f"{process.spec.worker.name} ended during its {move.direction}: {client.broken}")
            except WorkerLostError as error:
                fault, settled = error, True
                process.die()
                self._retire(client, str(error))
            except RuntimeFault as error:
                fault = error
                if isinstance(error, OffloadError) and error.rolled_back:
                    process.undo(move)
                    settled = True
            finally:
                if not settled:
                    process.break_(move)
                    why = str(fault) if fault is not None else "the call was given up"
                    self._retire(client, f"{process.spec.worker.name}: {move.direction} of {', '.join(move.kinds)} failed: {why}")
                records.append(_record(process, move, started_s, report, fault))
            if fault is None or not settled or not process.alive or not fault.retryable:
                break
        return fault


def _by_process(wave: Wave) -> list[list[Move]]:
    moves: dict[tuple[str, int], list[Move]] = {}
    for move in (*wave.offloads, *wave.loads):
        moves.setdefault(attrgetter("client", "index")(move), []).append(move)
    return list(moves.values())


def _record(process: ProcessAccount, move: Move, started_s: float, report: SwitchReport | None, fault: RuntimeFault | None) -> MoveRecord:
    return MoveRecord(
        client=move.client,
        worker=process.spec.worker.name,
        devices=process.spec.devices,
        direction=move.direction,
        kinds=move.kinds,
        started_s=started_s,
        ended_s=asyncio.get_running_loop().time(),
        residence=process.residence[move.kinds[0]],
        report=report,
        error="" if fault is None else str(fault),
    )
