"""What time it is: the API server's, so that a wrong or changing clock on the operator's node moves no deadline.

Times in objects are the API server's, and deadlines are counted from them. Every answer of the server has its time, to the second; between
two answers this process's monotonic clock goes on, which nobody can set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

TOLERANCE_S: Final = 2.0
"""Answers have whole seconds and are read some time after they were written: smaller differences are ignored."""
LATE_ANSWERS: Final = 10
"""Answers in a row that have to be behind before the clock goes back: single ones were only read late."""


def utc_now() -> datetime:
    """The time of this node, in UTC."""
    return datetime.now(UTC)


class ServerClock:
    """Belongs to one event loop."""

    def __init__(self, *, wall: Callable[[], datetime], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """``wall`` is the time until the server has answered for the first time."""
        self._wall = wall
        self._monotonic_s = monotonic_s
        self._began: datetime | None = None
        """Time of the server when the monotonic clock was 0."""
        self._num_behind = 0

    def now(self) -> datetime:
        """The current time, in UTC."""
        return self._wall() if self._began is None else self._began + timedelta(seconds=self._monotonic_s())

    def synchronize(self, date: str | None) -> None:
        """Take the header ``Date`` of an answer (RFC 9110, section 6.6.1); a missing or malformed one is ignored."""
        try:
            written = parsedate_to_datetime(date or "")
        except ValueError:
            return
        if written.tzinfo is None:
            written = written.replace(tzinfo=UTC)
        began = written - timedelta(seconds=self._monotonic_s())
        ahead_s = 0.0 if self._began is None else (began - self._began).total_seconds()
        self._num_behind = self._num_behind + 1 if ahead_s < -TOLERANCE_S else 0
        if self._began is None or ahead_s > TOLERANCE_S or self._num_behind == LATE_ANSWERS:
            self._began, self._num_behind = began, 0
