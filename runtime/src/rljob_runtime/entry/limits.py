"""What ends a run from outside of it: its deadline, and the end of its cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from rljob_runtime.errors import ActiveDeadlineError, ClusterLostError, RuntimeFault


class Ending(Protocol):
    """A cluster whose end can be waited for."""

    async def ended(self) -> str:
        """See :class:`~rljob_runtime.cluster.protocol.Cluster`."""


@contextlib.asynccontextmanager
async def within_active_deadline(active_deadline_s: int | None) -> AsyncIterator[None]:
    """The block is given up after so many seconds.

    Raises:
        ActiveDeadlineError: the deadline passed.
    """
    try:
        async with asyncio.timeout(active_deadline_s) as limit:
            yield
    except TimeoutError as error:
        if isinstance(error, RuntimeFault) or not limit.expired():  # a system call can time out, too
            raise
        raise ActiveDeadlineError(f"the run did not end within {active_deadline_s} s (spec.activeDeadlineSeconds)") from error


@contextlib.asynccontextmanager
async def while_cluster_lives(cluster: Ending) -> AsyncIterator[None]:
    """The block is given up when the cluster's control service ends: calls of workers would still be answered, but nothing else.

    Raises:
        ClusterLostError: the control service ended.
    """
    main = asyncio.current_task()
    assert main is not None
    ended: list[str] = []

    async def watch() -> None:
        ended.append(await cluster.ended())
        main.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not ended or main.uncancel():  # somebody else cancelled it, too
            raise
        raise ClusterLostError(ended[0]) from None
    finally:
        watching.cancel()
