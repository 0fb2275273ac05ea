"""A component's running workers, for people who write their own loop: every call finds its state on the devices.

::

    await reference.call("compute_logprobs", ids, lengths, 1.0)                              load, call, offload as the policies say
    await trainer.call("compute_logprobs", ids, lengths, 1.0, is_offload_states=False)       and keep it there
    async with trainer.resident([StateKind.PARAMS]): ...                                     several calls, one switch
    await rewards.offload_states(); await rewards.load_states()                              by hand

A role without an arbiter has devices of its own, or shares them while everything stays: its state is always there, calls run at once,
and there is nothing to offload, so that one loop works in every placement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.states import StateKind

GRACE_S = 30.0
"""How much longer than a call its lease lasts, so that a call that is late is named before its lease is lost."""

_owner: ContextVar[str | None] = ContextVar("owner", default=None)
"""Of the block around; tasks that are started in it, such as those of ``asyncio.gather``, belong to it and do not wait for it."""
_blocks = count(1)


class Role:
    """The workers of one component."""

    def __init__(
        self, name: str, workers: Sequence[Worker], *, timeout_s: float, arbiter: DeviceArbiter | None = None, tenants: Sequence[str] = ()
    ) -> None:
        """Take nothing yet.

        Args:
            name: of the component.
            workers: by rank.
            timeout_s: of a wait for devices and state, and of a call, where they say nothing else.
            arbiter: of the devices, if they are shared.
            tenants: the workers as the arbiter knows them; none: one that has the component's name.
        """
        self.name = name
        self.workers = tuple(workers)
        self._timeout_s = timeout_s
        self._arbiter = arbiter
        self._tenants = tuple(tenants) or (name,)

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
            timeout_s: of the wait for devices and state, and again of the call; None: the role's.

        Raises:
            ValueError: ``each`` is not one per worker, or comes with ``args``; or a kind that the workers do not have.
            DeadlineError: devices, state or an answer did not come in time.
            OffloadError, NoRoomError, LeaseLostError, WorkerLostError: as of :meth:`DeviceArbiter.use`.
            RuntimeFault: the first that a worker raised; the others are left to end on their own, before anybody gets their devices.
        """
        if each is not None and (args or len(each) != len(self.workers)):
            raise ValueError(
                f"{self.name}.{method}: each has arguments for {len(each)} workers, there are {len(self.workers)}, and there are "
                f"{len(args)} arguments for all; give one entry per worker and no others"
            )
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        held = self.resident(include, is_offload_states=is_offload_states, timeout_s=limit_s, hold_s=limit_s + GRACE_S, what=method)
        async with held:
            given = [args] * len(self.workers) if each is None else each
            return await gather_all([w.start(method, *own) for w, own in zip(self.workers, given, strict=True)], limit_s)

    @asynccontextmanager
    async def resident(
        self,
        kinds: Iterable[StateKind] | None = None,
        *,
        is_offload_states: bool | None = None,
        timeout_s: float | None = None,
        hold_s: float | None = None,
        what: str = "block",
    ) -> AsyncIterator[None]:
        """Keep state on the devices during a block of several calls, which nobody else's call interrupts.

        Blocks of several roles may be nested if there is room for all of them.

        Args:
            kinds: what the calls need; None: all.
            is_offload_states: after the block, as of :meth:`call`.
            timeout_s: of the wait for devices and state; None: the role's.
            hold_s: of the block; at its end the devices go to the next. None: as the arbiter says.
            what: for messages and the timeline.

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
        about = f"{self.name}.{what}"
        async with AsyncExitStack() as stack:
            if len(self._tenants) > 1:  # their switches go on at the same time; below comes only what was lost meanwhile
                await self._move(arbiter.reload_states, asked, _left_s(deadline_s), about, owner)
            for tenant in self._tenants:
                wait_s = _left_s(deadline_s)
                lease = arbiter.use(
                    tenant, asked, what=about, timeout_s=wait_s, hold_s=hold_s, owner=owner, is_offload_states=is_offload_states
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
        """Of all tenants at the same time; the first failure is raised, the other moves end on their own."""
        asked = None if kinds is None else tuple(kinds)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        await asyncio.gather(*(move(tenant, asked, timeout_s=limit_s, what=what, owner=owner) for tenant in self._tenants))


def _me() -> str:
    task = asyncio.current_task()
    return "nobody" if task is None else task.get_name()


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - asyncio.get_running_loop().time(), 0.0)
