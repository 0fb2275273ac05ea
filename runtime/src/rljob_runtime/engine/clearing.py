"""How an engine forgets the requests of a driver that begins again; shared by engines that run requests in a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from rljob_runtime.errors import DeadlineError

if TYPE_CHECKING:
    from rljob_runtime.engine.protocol import Engine

LOOK_S = 1.0
"""How often to look whether somebody else collected the last response."""


def clear(engine: Engine, known: Callable[[], Collection[str]], timeout_s: float) -> None:
    """End all requests of ``engine`` and drop their responses.

    Args:
        engine: nobody submits to it meanwhile; a call of ``collect`` under way may take some of the responses.
        known: ids of requests whose responses nobody has collected.
        timeout_s: deadline.

    Raises:
        DeadlineError: a request did not end.
        EngineDiedError: the engine ended.
    """
    deadline = time.monotonic() + timeout_s
    engine.abort(tuple(known()))
    while left := known():
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineError(f"engine: {len(left)} requests did not end within {timeout_s:.0f} s of their abort")
        engine.collect(min(remaining_s, LOOK_S))
