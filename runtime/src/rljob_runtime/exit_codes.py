"""Exit codes of ``rljob run`` and of the driver in a pod; README lists them for users."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    INVALID = 2
    """The spec, its arguments or something they name is invalid; nothing was started."""
    FAILED = 3
    """The run failed; the newest checkpoint is kept."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM: the step was finished or dropped and a checkpoint written."""
