"""DeviceArbiter: which component is on which device, and which may use it. Runs in the driver's event loop.

::

    use(client, kinds) ── claim ──> queue ── first of all that overlap ──> devices held ── plan_switch, Mover ──> Lease
                                                                                                                   |
    departures of Always state <── dispatch <── devices given back (end of block, deadline, worker lost) <─────────+

| wait               | for                                        | bounded by                     | then                          |
|--------------------|--------------------------------------------|--------------------------------|-------------------------------|
| use, *_states      | earlier claims on its devices, its switch  | timeout_s                      | DeadlineError naming the rest |
| a lease            | its block                                  | hold_s                         | LeaseLostError, devices freed |
| one move           | a worker's offload or load                 | switch_timeout_s               | the client is broken          |
| a block that raised| its workers to be idle                     | switch_timeout_s               | the client is broken          |

Claims on overlapping devices are served in the order of arrival, others do not wait for each other. An owner who holds a lease does not
queue behind others, who may wait for that lease. A switch that has begun goes on to its end even when no claim waits for it any more.
State leaves after a block only when the event loop runs next, so that a block that follows at once loads while the other offloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.errors import DeadlineError, LeaseLostError, NoRoomError, OffloadError, RuntimeFault, WorkerLostError
from rljob_runtime.offload.accounts import CONTENT_FREE, ClientAccount, ProcessAccount
from rljob_runtime.offload.claims import ClaimBook
from rljob_runtime.offload.clients import POLICY_FIELDS, DeviceClient
from rljob_runtime.offload.journal import SwitchJournal
from rljob_runtime.offload.leases import Claim, Lease, Stage
from rljob_runtime.offload.moving import Mover
from rljob_runtime.offload.plan import Device, Direction, Move, Switch, SwitchRequest, Wave, plan_switch
from rljob_runtime.offload.records import DeviceResidency, LeaseEntry, MoveRecord, QueueEntry, SwitchRecord
from rljob_runtime.offload.states import Residence, StateKind

SWITCH_TIMEOUT_S = 300.0
HOLD_S = 3600.0


class DeviceArbiter:
    """Leases devices to clients and moves their state."""

    def __init__(
        self,
        budget_bytes: Mapping[Device, int],
        *,
        switch_timeout_s: float = SWITCH_TIMEOUT_S,
        hold_s: float = HOLD_S,
        on_switch: Callable[[SwitchRecord], None] = lambda record: None,
    ) -> None:
        """Begin with empty devices.

        Args:
            budget_bytes: what may be resident on each device.
            switch_timeout_s: deadline of one move of one worker.
            hold_s: deadline of a lease that sets none.
            on_switch: called after every switch that moved something, or tried to.
        """
        self._budget_bytes = dict(budget_bytes)
        self._switch_timeout_s = switch_timeout_s
        self._hold_s = hold_s
        self._journal = SwitchJournal(on_switch)
        self.clients: dict[str, ClientAccount] = {}
        self._workers: dict[str, tuple[ClientAccount, ProcessAccount]] = {}
        self._book = ClaimBook(budget_bytes)
        self._mover = Mover(self.clients, switch_timeout_s, self._retire)
        self._departing: dict[ClientAccount, None] = {}
        """Clients with state that is to leave."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatching = False
        self._closed = False

    def add(self, client: DeviceClient, *, resident: Iterable[StateKind] | None = None) -> None:
        """Add a client whose workers run; what is Always to leave while idle does so. Call in the event loop.

        Args:
            client: with a new name, on known devices.
            resident: kinds that are on its devices now; None: all of them.

        Raises:
            ValueError: the name is taken, or a device is unknown.
            NoRoomError: with what is there already it is over the budget of a device.
        """
        unknown = sorted(str(device) for device in client.devices if device not in self._budget_bytes)
        if client.name in self.clients or unknown:
            raise ValueError(f"client {client.name}: " + (f"no budget is known of {', '.join(unknown)}" if unknown else "added already"))
        account = ClientAccount(client, client.kinds if resident is None else frozenset(resident))
        totals = {device: sum(p.num_bytes for _, p in self._book.on[device]) for device in account.devices}
        for process in account.processes:
            for device in process.spec.devices:
                totals[device] += process.num_bytes
        full = [f"{d}: {num:,} B of {self._budget_bytes[d]:,} B" for d, num in totals.items() if num > self._budget_bytes[d]]
        if full:
            raise NoRoomError(f"{client.name} was started where others leave no room: {'; '.join(full)}; offload them before it starts")
        self.clients[client.name] = account
        for process in account.processes:
            self._workers[process.spec.worker.name] = (account, process)
            for device in process.spec.devices:
                self._book.on[device].append((account, process))
        self._let_leave(account, client.kinds, None)

    @asynccontextmanager
    async def use(
        self,
        client: str,
        kinds: Iterable[StateKind] | None = None,
        *,
        what: str,
        timeout_s: float,
        hold_s: float | None = None,
        owner: str | None = None,
        writes: Iterable[StateKind] = (),
        is_offload_states: bool | None = None,
    ) -> AsyncIterator[Lease]:
        """Hold the client's devices, with ``kinds`` in place, for the duration of the block.

        Args:
            client: name of an added client.
            kinds: what the block needs on the devices; None: everything. What it does not need makes room where room is needed.
            what: for messages, queue and timeline, such as ``train step 12``.
            timeout_s: of the wait for devices and state.
            hold_s: of the block; at its end the block is cancelled and the devices go to the next.
            owner: its leases do not wait for each other; None: the current asyncio task.
            writes: kinds that the block gives new content, so that they may come without (weights before a sync).
            is_offload_states: after the block, None: kinds whose policy is Always leave; False: everything stays until others need the
                room; True: everything leaves but what is Never to.

        Raises:
            DeadlineError: not there within ``timeout_s``; names what it waited for.
            LeaseLostError: the block ran past its deadline, or a worker of the client was lost meanwhile.
            NoRoomError: it cannot fit.
            OffloadError: a switch failed, or the client is broken, or its state has no content.
            WorkerLostError: a worker ended during the switch.
            ValueError: an unknown client or kind.
        """
        account = self._account(client)
        claim = self._claim(account, what, owner, hold_s, load=self._kinds(account, kinds), writes=frozenset(writes), works=True)
        await self._wait(claim, timeout_s)
        clean = False
        try:
            async with asyncio.timeout_at(claim.since_s + claim.hold_s) as limit:
                yield Lease(claim)
            clean = True
        except WorkerLostError as error:
            self.lost(error)
            raise
        except TimeoutError as error:
            if not limit.expired():
                raise
            self._expire(claim)
            raise LeaseLostError(f"{what}: {claim.owner} lost {client}: {claim.lost}") from error
        finally:
            if clean and not claim.lost:
                account.written(claim.writes)
            self._release(claim, clean=clean, leave=is_offload_states)
        if claim.lost:
            raise LeaseLostError(f"{what}: {claim.owner} lost {client} before its end: {claim.lost}")

    async def offload_states(
        self,
        client: str,
        kinds: Iterable[StateKind] | None = None,
        *,
        timeout_s: float,
        what: str | None = None,
        owner: str | None = None,
    ) -> None:
        """Take kinds off the client's devices, and out of a lease of the same owner, whatever the policy but Never; None: all that may.

        Raises:
            OffloadError: a kind is never to leave, or as for :meth:`use`.
            DeadlineError, WorkerLostError, ValueError: as for :meth:`use`.
        """
        account = self._account(client)
        asked = self._kinds(account, kinds)
        never = frozenset(kind for kind in asked if account.spec.policy(kind) is OffloadPolicy.NEVER)
        if never and kinds is not None:
            fields = ", ".join(f"components[].offload.{POLICY_FIELDS.get(kind, kind)}" for kind in sorted(never))
            raise OffloadError(f"{client}: {', '.join(sorted(never))} cannot be offloaded, {fields} is Never; change it to Auto or Always")
        claim = self._claim(account, what or f"offload {client}", owner, None, offload=asked - never)
        await self._wait(claim, timeout_s)
        self._release(claim, clean=True, leave=False)

    async def reload_states(
        self,
        client: str,
        kinds: Iterable[StateKind] | None = None,
        *,
        timeout_s: float,
        what: str | None = None,
        owner: str | None = None,
    ) -> None:
        """Bring kinds onto the client's devices; None: all. They stay until others need the room, or a later lease ends.

        Raises:
            NoRoomError, OffloadError, DeadlineError, WorkerLostError, ValueError: as for :meth:`use`.
        """
        account = self._account(client)
        claim = self._claim(account, what or f"load {client}", owner, None, load=self._kinds(account, kinds))
        await self._wait(claim, timeout_s)
        self._release(claim, clean=True, leave=False)

    load_states = reload_states

    def lost(self, error: WorkerLostError) -> None:
        """A worker's process is gone: its client loses its leases and is not to be used any more. Unknown workers are ignored."""
        if (found := self._workers.get(error.worker)) is not None:
            account, process = found
            process.die()
            self._retire(account, str(error))

    def revive(self, worker: str) -> None:
        """A lost worker, alone in its client, was replaced: all its state is on its devices, and leaves as that of a new client."""
        account, _ = self._workers[worker]
        account.revive()
        self._let_leave(account, account.spec.kinds, None)

    def queue(self) -> list[QueueEntry]:
        """Who waits, in order."""
        return self._book.queue_entries(_now_s())

    def leases(self) -> list[LeaseEntry]:
        """Who holds devices, in the order of their grants."""
        return self._book.lease_entries(_now_s())

    def residency(self) -> list[DeviceResidency]:
        """What is where, by device."""
        return [
            DeviceResidency(device=device, budget_bytes=budget, processes=tuple(t.residency(p) for t, p in self._book.on[device]))
            for device, budget in sorted(self._budget_bytes.items())
        ]

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the switches and waits since the last call."""
        return self._journal.take_metrics()

    async def settle(self) -> None:
        """Wait until nothing moves; what is queued behind leases still waits. Bounded by the moves' own deadlines."""
        while self._tasks or self._dispatching:
            await asyncio.gather(*self._tasks, asyncio.sleep(0), return_exceptions=True)

    async def aclose(self) -> None:
        """Refuse all who wait and give up what moves. Call when no worker is used any more."""
        self._closed = True
        self._schedule_dispatch()
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _account(self, client: str) -> ClientAccount:
        account = self.clients.get(client)
        if account is None:
            raise ValueError(f"no client is called {client!r}; there are {', '.join(sorted(self.clients)) or 'none'}")
        return account

    def _kinds(self, account: ClientAccount, kinds: Iterable[StateKind] | None) -> frozenset[StateKind]:
        has = account.spec.kinds
        asked = has if kinds is None else frozenset(kinds)
        if asked - has:
            raise ValueError(f"{account.name} has no {', '.join(sorted(asked - has))}; it has {', '.join(sorted(has))}")
        return asked

    def _claim(self, account: ClientAccount, what: str, owner: str | None, hold_s: float | None, **wanted: Any) -> Claim:
        """Queue a new claim."""
        if owner is None:
            task = asyncio.current_task()
            owner = task.get_name() if task is not None else "no task"
        claim = Claim(
            client=account,
            what=what,
            owner=owner,
            hold_s=self._hold_s if hold_s is None else hold_s,
            arrived_s=_now_s(),
            answer=asyncio.get_running_loop().create_future(),
            **wanted,
        )
        self._book.enqueue(claim)
        self._schedule_dispatch()
        return claim

    async def _wait(self, claim: Claim, timeout_s: float) -> None:
        """Until the claim is held; else it is withdrawn."""
        held = False
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(claim.answer)
            held = True
        except TimeoutError as error:
            if claim.answer.done() and claim.answer.exception() is error:
                raise
            reasons = "; ".join([*self._book.obstacles(claim, _now_s()), *self._book.earlier(claim)]) or "its lease came too late"
            raise DeadlineError(
                f"{claim.what}: {claim.owner} waited {timeout_s:.1f} s for the devices of {claim.client.name} ({claim.place}): {reasons}"
            ) from error
        finally:
            if not held:
                self._withdraw(claim)

    def _withdraw(self, claim: Claim) -> None:
        """Nobody waits for it any more."""
        claim.abandoned = True
        claim.answer.cancel()
        self._book.dequeue(claim)
        if claim.stage is Stage.HELD:
            self._release(claim, clean=True, leave=None)
        self._book.disown(claim)
        self._schedule_dispatch()

    def _schedule_dispatch(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Grant what can be granted, oldest first; then let leave what is not needed."""
        self._dispatching = False
        taken: set[Device] = set()
        for claim in self._book.in_turn():
            account = claim.client
            if account.broken or self._closed:
                why = f"{account.name} is not to be used: {account.broken}" if account.broken else "the arbiter is closed"
                self._answer(claim, OffloadError(f"{claim.what}: {why}"))
            elif (self._book.is_nested(claim) or taken.isdisjoint(claim.devices)) and self._book.is_free(claim):
                self._grant(claim)
            else:
                taken.update(claim.devices)
        if not self._closed:
            for account in list(self._departing):
                self._depart(account)

    def _grant(self, claim: Claim) -> None:
        """Give it its devices and begin its switch."""
        self._book.unpin_own(claim)
        try:
            switch = self._plan(claim)
        except OffloadError as error:
            self._answer(claim, error)
            return
        now_s = _now_s()
        self._journal.waited(now_s - claim.arrived_s)
        self._book.hold(claim, now_s)
        self._start(switch, claim, claim.client)

    def _plan(self, claim: Claim) -> Switch:
        near = {id(p): t.state(p, claim.load) for device in claim.devices for t, p in self._book.on[device] if p.alive}
        request = SwitchRequest(client=claim.client.name, what=claim.what, load=claim.load, offload=claim.offload, works=claim.works)
        try:
            return plan_switch(self._budget_bytes, list(near.values()), request)
        except NoRoomError as error:
            broken = {t.name: t.broken for device in claim.devices for t, _ in self._book.on[device] if t.broken}
            if not broken:
                raise
            why = "; ".join(f"{name} is broken ({cause})" for name, cause in broken.items())  # a machine's failure, not the spec's
            raise OffloadError(f"{error}. What may take the room: {why}") from error

    def _depart(self, account: ClientAccount) -> None:
        """Offload what is to leave; later, where a worker is busy."""
        if any(process.busy for process in account.processes):
            return  # its end dispatches again
        moves = []
        for process in account.processes:
            going = [k for k in sorted(account.leaving) if process.residence.get(k) is Residence.ON_DEVICE and not account.pins[k]]
            if going and process.alive and not account.broken:
                moves.append(Move(client=account.name, index=process.index, direction=Direction.OFFLOAD, kinds=tuple(going)))
        account.leaving.clear()
        del self._departing[account]
        if moves:
            self._start(Switch(waves=(Wave(offloads=tuple(moves), loads=()),)), None, account)

    def _start(self, switch: Switch, claim: Claim | None, account: ClientAccount) -> None:
        """Run a switch in a task of its own; its workers are busy until its end."""
        processes = [self.clients[client].processes[index] for client, index in switch.processes]
        for process in processes:
            process.busy = True
        moves: list[MoveRecord] = []
        begun_s = _now_s()
        task = self._spawn(self._mover.run(switch, moves))

        def ended(task: asyncio.Task[Any]) -> None:
            for process in processes:
                process.busy = False
            fault = OffloadError("the switch was given up") if task.cancelled() else task.exception() or task.result()
            if claim is not None:
                self._switched(claim, fault)
            self._schedule_dispatch()
            if moves:
                self._journal.ended(claim, account.name, begun_s, _now_s(), moves, fault)

        task.add_done_callback(ended)

    def _switched(self, claim: Claim, fault: BaseException | None) -> None:
        """The claim's switch has ended: it is held, or it failed."""
        account = claim.client
        if fault is None and account.broken:
            fault = OffloadError(f"{claim.what}: {account.name} is not to be used: {account.broken}")
        empty = account.undefined(claim.load) - claim.writes - CONTENT_FREE if claim.works else frozenset()
        if fault is None and empty:
            kinds = ", ".join(sorted(empty))
            fault = OffloadError(
                f"{claim.what}: {kinds} of {account.name} came back without content, because a sync writes it anyway; "
                f"sync first, in a block with writes={{{kinds}}}"
            )
        claim.stage, claim.since_s = Stage.HELD, _now_s()
        if fault is not None or claim.abandoned:
            self._release(claim, clean=True, leave=None)
        elif claim.works:
            claim.timer = asyncio.get_running_loop().call_later(claim.hold_s, self._expire, claim)
        self._answer(claim, fault)

    def _answer(self, claim: Claim, fault: BaseException | None) -> None:
        """Wake who waits for the claim."""
        self._book.dequeue(claim)
        if claim.answer.done():
            return
        if fault is None:
            claim.answer.set_result(None)
        else:
            claim.answer.set_exception(fault)

    def _release(self, claim: Claim, *, clean: bool, leave: bool | None) -> None:
        """Give the devices back; nothing where they were lost before. Not ``clean``: its workers may still be at work."""
        if claim.stage is not Stage.HELD:
            return
        account = claim.client
        self._unhold(claim)
        account.doubtful = account.doubtful or not clean
        if claim.works and not account.leases:
            if not account.doubtful:
                for process in account.processes:
                    process.working = False
            elif not account.broken:
                account.doubtful = False
                self._confirm_idle(account)
        if leave is not False and claim.works:
            self._let_leave(account, account.spec.kinds if not account.leases else claim.load, leave)

    def _unhold(self, claim: Claim) -> None:
        self._book.unhold(claim)
        self._schedule_dispatch()

    def _let_leave(self, account: ClientAccount, kinds: frozenset[StateKind], leave: bool | None) -> None:
        wanted = {OffloadPolicy.ALWAYS, OffloadPolicy.AUTO} if leave else {OffloadPolicy.ALWAYS}
        going = {kind for kind in kinds if account.spec.policy(kind) in wanted and not account.pins[kind]}
        if going and not account.broken:
            account.leaving |= going
            self._departing[account] = None
            self._schedule_dispatch()

    def _expire(self, claim: Claim) -> None:
        """The deadline of a lease has passed."""
        if claim.stage is Stage.HELD:
            claim.lost = f"it held the devices for {claim.hold_s:.1f} s, which was its limit"
            self._release(claim, clean=False, leave=None)

    def _retire(self, account: ClientAccount, why: str) -> None:
        """The client is not to be used any more, and holds nothing."""
        account.broken = account.broken or why
        account.leaving.clear()
        for claim in [c for c in self._book.granted if c.client is account]:
            claim.lost = why
            if claim.stage is Stage.HELD:
                self._unhold(claim)
        self._schedule_dispatch()

    def _confirm_idle(self, account: ClientAccount) -> None:
        """Its devices are not given away before its workers answer: a call that is left alone may still compute there."""
        for process in account.processes:
            if process.alive:
                process.busy = True
                self._spawn(self._ask_idle(account, process)).add_done_callback(partial(self._asked, process))

    async def _ask_idle(self, account: ClientAccount, process: ProcessAccount) -> None:
        name = process.spec.worker.name
        try:
            await process.spec.worker.call(Direction.OFFLOAD.value, (), timeout_s=self._switch_timeout_s)
            process.working = False
        except WorkerLostError as error:
            self.lost(error)
        except RuntimeFault as error:
            self._retire(account, f"{name} did not become idle after a block that ended early: {error}")

    def _asked(self, process: ProcessAccount, task: asyncio.Task[None]) -> None:
        process.busy = False
        self._schedule_dispatch()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now_s() -> float:
    return asyncio.get_running_loop().time()
