"""The one way to wait: with a deadline, and a name for what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.cluster.errors import ClusterError

Check = Callable[[], str | None]
"""None when ready, else why not yet."""

_POLL_S = 0.05


def wait_until(what: str, check: Check, *, deadline_s: float, poll_s: float = _POLL_S) -> None:
    """Wait until ``check`` is content.

    Args:
        what: the thing waited for, as it should read in a message.
        check: returns None when ready, else why not yet; what it raises ends the wait.
        deadline_s: limit in seconds.
        poll_s: pause between two checks in seconds.

    Raises:
        ClusterError: the deadline passed; with the last reason.
    """
    end_s = time.monotonic() + deadline_s
    while (reason := check()) is not None:
        if time.monotonic() > end_s:
            raise ClusterError(f"{what}: not ready after {deadline_s:g} s: {reason}")
        time.sleep(poll_s)
