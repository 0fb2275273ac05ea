"""A component's running workers and the one way to lease the devices they compute on; every call finds its state there.

Used by the training loop for its phases, and by people who write their own loop.

::

    await reference.call("compute_logprobs", ids, lengths, 1.0)                              load, call, offload as the policies say
    await trainer.call("compute_logprobs", ids, lengths, 1.0, is_offload_states=False)       and keep it there
    async with trainer.resident([StateKind.PARAMS]): ...                                     several calls, one switch
    await rewards.offload_states(); await rewards.load_states()                              by hand

A group without an arbiter has devices of its own: its state is always there, calls run at once, and there is nothing to offload, so that
one loop works in every placement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.states import StateKind

GRACE_S = 30.0
"""How much longer than a call its lease lasts, so that a call that is late is named before its lease is lost."""

_owner: ContextVar[str | None] = ContextVar("owner", default=None)
"""Owner of the enclosing block's leases; tasks started inside it, as by ``asyncio.gather``, inherit it and do not wait for it."""
_blocks = count(1)


@contextmanager
def lease_owner(name: str) -> Iterator[None]:
    """All leases taken inside the block, by any group, belong to ``name`` and never wait for each other."""
    token = _owner.set(name)
    try:
        yield
    finally:
        _owner.reset(token)


class WorkerGroup:
    """The workers of one component."""

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        *,
        timeout_s: float,
        arbiter: DeviceArbiter | None = None,
        clients: Sequence[str] | None = None,
    ) -> None:
        """Take nothing yet.

        Args:
            name: the component's name.
            workers: in rank order.
            timeout_s: default deadline of a wait for devices and state, and of a call.
            arbiter: of the devices, if they are shared.
            clients: the device clients that the arbiter knows these workers by; None: a single one with the component's name.
        """
        self.name = name
        self.workers = tuple(workers)
        self._timeout_s = timeout_s
        self._arbiter = arbiter
        self._clients = (name,) if clients is None else tuple(clients)

    @property
    def shares_devices(self) -> bool:
        """Whether other components use some of its devices, so that computing there needs a lease."""
        return self._arbiter is not None

    @property
    def leased_ranks(self) -> tuple[int, ...]:
        """Ranks of the workers that compute under a lease: all, or, where each worker is a client of its own, those that share devices."""
        if not self.shares_devices:
            return ()
        if self._clients == (self.name,):
            return tuple(range(len(self.workers)))
        return tuple(rank for rank, worker in enumerate(self.workers) if worker.name in self._clients)

    async def call(
        self,
        method: str,
        *args: Any,
        each: Sequence[Sequence[Any]] | None = None,
        is_offload_states: bool | None = None,
        include: Iterable[StateKind] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call all workers at the same time, with their state in place; values come by rank.

        Args:
            method: of the workers.
            args: the same for all.
            each: instead of ``args``, the arguments of each worker, by rank.
            is_offload_states: afterwards, None: what is Always leaves, the rest when others need the room; True: all leaves that may;
                False: all stays until others need the room.
            include: kinds that the call needs; nothing else is loaded. None: all.
            timeout_s: of the wait for devices and state, and again of the call; None: the group's.

        Raises:
            ValueError: ``each`` is not one per worker, or comes with ``args``; or a kind that the workers do not have.
            DeadlineError: devices, state or an answer did not come in time.
            OffloadError, NoRoomError, LeaseLostError, WorkerLostError: as of :meth:`DeviceArbiter.use`.
            RuntimeFault: the first that a worker raised; the others are left to end on their own, before their devices are given to others.
        """
        if each is not None and (args or len(each) != len(self.workers)):
            raise ValueError(
                f"{self.name}.{method}: each has arguments for {len(each)} workers, there are {len(self.workers)}, and there are "
                f"{len(args)} arguments for all; give one entry per worker and no others"
            )
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        held = self.resident(
            include, is_offload_states=is_offload_states, timeout_s=limit_s, hold_s=limit_s + GRACE_S, what=f"{self.name}.{method}"
        )
        async with held:
            given = [args] * len(self.workers) if each is None else each
            return await gather_all([w.start(method, *own) for w, own in zip(self.workers, given, strict=True)], limit_s)

    @asynccontextmanager
    async def resident(
        self,
        kinds: Iterable[StateKind] | None = None,
        *,
        is_offload_states: bool | None = None,
        writes: Iterable[StateKind] = (),
        timeout_s: float | None = None,
        hold_s: float | None = None,
        what: str | None = None,
    ) -> AsyncIterator[None]:
        """Keep state on the devices during a block of several calls, which no other component's call interrupts.

        Blocks of several groups may be nested if there is room for all of them.

        Args:
            kinds: what the calls need; None: all.
            is_offload_states: after the block, as for :meth:`call`.
            writes: kinds that the block gives new content, so that they may come without (an engine's weights before a sync).
            timeout_s: of the wait for devices and state; None: the group's.
            hold_s: of the block; at its end the devices go to the next. None: the arbiter's default.
            what: for messages and the timeline, such as ``training of step 3``; None: a block of this group.

        Raises:
            DeadlineError, OffloadError, NoRoomError, LeaseLostError, WorkerLostError, ValueError: as of :meth:`DeviceArbiter.use`.
        """
        outer, arbiter = _owner.get(), self._arbiter
        if arbiter is None:
            yield
            return
        owner = outer or f"{_me()}, block {next(_blocks)}"
        asked = None if kinds is None else tuple(kinds)
        deadline_s = asyncio.get_running_loop().time() + (self._timeout_s if timeout_s is None else timeout_s)
        about = what or f"{self.name}.block"
        written = tuple(writes)
        async with AsyncExitStack() as stack:
            if len(self._clients) > 1 and not written:  # switch concurrently; the leases below only wait for what was lost meanwhile
                await self._move(arbiter.reload_states, asked, _left_s(deadline_s), about, owner)
            for client in self._clients:
                lease = arbiter.use(
                    client,
                    asked,
                    what=about,
                    timeout_s=_left_s(deadline_s),
                    hold_s=hold_s,
                    owner=owner,
                    writes=written,
                    is_offload_states=is_offload_states,
                )
                await stack.enter_async_context(lease)
            _owner.set(owner)
            try:
                yield
            finally:
                _owner.set(outer)

    async def offload_states(self, kinds: Iterable[StateKind] | None = None, *, timeout_s: float | None = None) -> None:
        """Take kinds off the devices, whatever the policy but Never; None: all that may leave. Returns when it is done.

        Raises:
            OffloadError, DeadlineError, WorkerLostError, ValueError: as of :meth:`DeviceArbiter.offload_states`.
        """
        if self._arbiter is not None:
            await self._move(self._arbiter.offload_states, kinds, timeout_s, f"{self.name}.offload_states", _owner.get() or _me())

    async def reload_states(self, kinds: Iterable[StateKind] | None = None, *, timeout_s: float | None = None) -> None:
        """Bring kinds onto the devices; None: all. They stay until others need the room, or a later call ends.

        Raises:
            NoRoomError, OffloadError, DeadlineError, WorkerLostError, ValueError: as of :meth:`DeviceArbiter.reload_states`.
        """
        if self._arbiter is not None:
            await self._move(self._arbiter.reload_states, kinds, timeout_s, f"{self.name}.reload_states", _owner.get() or _me())

    load_states = reload_states

    async def _move(self, move: Any, kinds: Iterable[StateKind] | None, timeout_s: float | None, what: str, owner: str) -> None:
        """Move all clients at the same time; the first failure is raised, the other moves end on their own."""
        asked = None if kinds is None else tuple(kinds)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        await asyncio.gather(*(move(client, asked, timeout_s=limit_s, what=what, owner=owner) for client in self._clients))


def _me() -> str:
    task = asyncio.current_task()
    return "no task" if task is None else task.get_name()


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - asyncio.get_running_loop().time(), 0.0)
