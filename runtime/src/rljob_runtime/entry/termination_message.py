"""Why a driver ended, as the one line that survives it: errors to :class:`rljob_api.termination.DriverFailure`.

A worker's error is explained by its log, where the driver can read it; the line carries the part that explains.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from rljob_api.errors import SpecInvalidError
from rljob_api.termination import DriverFailure
from rljob_api.vocabulary import Reason
from rljob_runtime.cluster.host import START_WORD, start_line
from rljob_runtime.errors import CallDeadlineError, Interrupted, RuntimeFault, WorkerFailedError, WorkerLostError

TAIL_BYTES = 1 << 16
TAIL_LINES = 20
TRACEBACK_CHARACTERS = 2000
EXPLAINS = re.compile(r"^Traceback \(most recent call last\)|^Fatal Python error|\bout of memory\b|^terminate called", re.IGNORECASE)
"""Where in a log the explanation of an end begins."""


def failure_of(error: BaseException) -> DriverFailure:
    """What the operator gets to know of ``error``; anything that is not of the runtime's own tree comes with its traceback."""
    if isinstance(error, SpecInvalidError):
        return DriverFailure(reason=Reason.SPEC_INVALID, message=str(error))
    if isinstance(error, WorkerFailedError | WorkerLostError | CallDeadlineError):
        return DriverFailure(reason=error.reason, message=f"{error}{_from_log(error.worker, error.log_file)}", worker=error.worker)
    if isinstance(error, RuntimeFault | Interrupted):
        return DriverFailure(reason=error.reason, message=str(error) or type(error).__name__)
    if isinstance(error, KeyboardInterrupt):
        return DriverFailure(reason=Reason.STOPPED, message="interrupted")
    text = "".join(traceback.format_exception(error)).rstrip()
    return DriverFailure(reason=Reason.DRIVER_FAILED, message=f"{type(error).__name__}: {error}\n{text[-TRACEBACK_CHARACTERS:]}")


def _from_log(worker: str, log_file: str) -> str:
    """The explaining part of a worker's log, or where else to look."""
    try:
        with Path(log_file).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "; it lies in the worker's own pod (kubectl logs), with spec.storage logs are kept together in the run folder"
    begins = [i for i, line in enumerate(lines) if line.startswith(f"{start_line(worker)} pid ") and f" {START_WORD} " in line]
    lines = lines[begins[-1] + 1 :] if begins else lines  # what earlier attempts wrote explains nothing
    found = [i for i, line in enumerate(lines) if EXPLAINS.search(line)]
    return "\n".join(["", *lines[found[-1] :][-TAIL_LINES:]]) if found else ""
