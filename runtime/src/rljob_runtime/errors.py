"""Everything the runtime raises on purpose, one picklable tree.

::

    RuntimeFault                     (RuntimeError)   something broke while running -> exit 3
    ├── ClusterError                                  nodes, placement group, Ray itself
    ├── WorkerLostError                               a worker process ended; names it, its exit and its log file
    ├── WorkerFailedError                             a worker raised; carries its text
    ├── WeightSyncError                               versions, manifests or probes disagree, or the deadline passed
    ├── CheckpointError                               unreadable, incomplete or foreign checkpoint; no space
    ├── RewardSetupError                              a reward function cannot be imported or called
    ├── DataError                                     empty or malformed data
    ├── ModelError                                    model folder missing or not loadable
    └── DeadlineError                (TimeoutError)   a wait ran out; says what it waited for
    Interrupted                                       the user asked to stop -> exit 130

Two questions each answers: whose fault (``retryable`` False means the spec or the data, True means the machine) and what
to do (the message ends with the remedy).
"""

from __future__ import annotations


class RuntimeFault(RuntimeError):
    """Raised when a run cannot go on; caught by the CLI, which prints it and exits 3."""

    retryable: bool = False


class ClusterError(RuntimeFault):
    """Raised when the Ray cluster does not offer what the plan needs."""

    retryable = True


class WorkerLostError(RuntimeFault):
    """Raised when a worker process is gone."""

    retryable = True

    def __init__(self, worker: str, exit_detail: str, log_file: str) -> None:
        """Keep the three facts a user needs; all strings so that it pickles."""
        super().__init__(worker, exit_detail, log_file)
        self.worker = worker
        self.exit_detail = exit_detail
        self.log_file = log_file

    def __str__(self) -> str:
        """One sentence naming the worker, its exit and its log."""
        return f"worker {self.worker} is gone ({self.exit_detail}); its log: {self.log_file}"


class WorkerFailedError(RuntimeFault):
    """Raised when a worker's method raised something that is not of this tree."""

    def __init__(self, worker: str, method: str, detail: str, log_file: str) -> None:
        """Keep where and what; all strings so that it pickles."""
        super().__init__(worker, method, detail, log_file)
        self.worker = worker
        self.method = method
        self.detail = detail
        self.log_file = log_file

    def __str__(self) -> str:
        """One sentence naming the worker, the call, the error and its log."""
        return f"worker {self.worker} failed in {self.method}: {self.detail}; its log: {self.log_file}"


class WeightSyncError(RuntimeFault):
    """Raised when engines and trainer do not hold the same weights after a sync."""

    retryable = True


class CheckpointError(RuntimeFault):
    """Raised when a checkpoint cannot be written or read."""


class RewardSetupError(RuntimeFault):
    """Raised when a reward cannot be set up; a reward that fails on one sample raises nothing."""


class DataError(RuntimeFault):
    """Raised when prompts cannot be produced."""


class ModelError(RuntimeFault):
    """Raised when a model or tokenizer cannot be loaded."""


class DeadlineError(RuntimeFault, TimeoutError):
    """Raised when a wait ran past its deadline; the message names what was awaited."""

    retryable = True


class Interrupted(BaseException):
    """Raised when the user interrupts the run; not a fault, so not in the tree above."""
