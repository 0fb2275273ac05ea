"""Everything the runtime raises on purpose, one picklable tree.

::

    RuntimeFault                     (RuntimeError)   something broke while running -> exit 3
    ├── SetupError                                    what the spec names is not on this machine or in this image -> exit 2
    ├── CallbackError                                 a callback of the caller's own raised
    ├── PluginError                                   a function of the user's own cannot be imported or called -> exit 2 at the start
    ├── ClusterError                                  nodes, placement group, Ray itself
    ├── WorkerLostError                               a worker process ended; names it, its exit and its log file
    │   ├── NodeLostError                             with its node, so that there is no place to start it again
    │   ├── WorkerStuckError                          a worker's process lives, and keeps none of its deadlines
    │   ├── BrokenGroupError                          a worker's collectives fail, because another rank of its group is gone or hangs
    │   └── EngineLostError                           an engine computes nothing any more, though its process may live
    ├── EngineDiedError                               the same as the engine itself says it, inside its process
    ├── WorkerFailedError                             a worker raised; carries its text
    ├── WeightSyncError                               versions, manifests or probes disagree, or the deadline passed
    │   ├── CorruptedWeightsError                     bytes of a sync are not those that were sent
    │   ├── SyncBrokenError                           a connection between trainer and engines broke, or does not answer
    │   └── WholeNeededError                          an engine got changes of weights that it does not have
    ├── CheckpointError                               unreadable, incomplete or foreign checkpoint; no space
    │   └── SupersededError                           another driver has taken over the checkpoints
    ├── RewardSetupError                              a reward function cannot be imported or called
    ├── RewardsFailedError                            rewards fail on everything
    ├── EnvironmentSetupError                         an environment does not take its parameters, or cannot be started
    ├── EpisodesFailedError                           most episodes end with an error of their environment
    ├── DataError                                     empty or malformed data
    │   └── FilteredOutError                          the dynamic-sampling filter keeps nothing
    ├── ModelError                                    model folder missing or not loadable
    ├── DownloadError                                 a model could not be downloaded to a node
    ├── OffloadError                                  state could not be moved, or is not to be used after such a failure
    │   ├── HostBudgetError                           spec.offload.hostMemoryBytes is too small
    │   ├── NoRoomError                               what should be on a device is more than its budget
    │   └── LeaseLostError                            devices are used after their lease was lost
    └── DeadlineError                (TimeoutError)   a wait ran out; says what it waited for
        ├── CallDeadlineError                         a worker did not answer a call; names both
        ├── StartupDeadlineError                      spec.startupDeadlineSeconds
        └── ActiveDeadlineError                       spec.activeDeadlineSeconds
    Interrupted                                       the user asked to stop -> exit 130
    └── Evicted                                       a pod of the job was asked to end

Each carries its ``reason``, the word that conditions show; whose fault it is follows from it (``Reason.is_machine_failure``). What to do
is said at the end of the message.
"""

from __future__ import annotations

from typing import ClassVar

from rljob_api.vocabulary import Reason


class RuntimeFault(RuntimeError):
    """Raised when a run cannot go on; caught by the CLI, which prints it and exits 3."""

    reason: ClassVar[Reason] = Reason.DRIVER_FAILED
    """What a condition calls it."""

    @property
    def retryable(self) -> bool:
        """Whether another attempt may go better: the machine failed, not the spec, the data or the user's code."""
        return self.reason.is_machine_failure


class SetupError(RuntimeFault):
    """Raised when this machine or image lacks what the spec asks for, before anything is started."""

    reason = Reason.SPEC_INVALID


class PluginError(RuntimeFault):
    """Raised when a function of the user's own that the spec names cannot be imported, or not be called as it has to be."""

    reason = Reason.SPEC_INVALID


class CallbackError(RuntimeFault):
    """Raised when a callback of ``rljob.run`` raised; names it, and is raised from its exception."""


class ClusterError(RuntimeFault):
    """Raised when the Ray cluster does not offer what the plan needs."""

    reason = Reason.NODES_MISMATCH


class ClusterLostError(RuntimeFault):
    """Raised when the control service of the Ray cluster has ended during the run."""

    reason = Reason.HEAD_LOST


class WorkerLostError(RuntimeFault):
    """Raised when a worker process is gone."""

    reason = Reason.WORKER_LOST

    def __init__(self, worker: str, exit_detail: str, log_file: str) -> None:
        """Keep the three facts a user needs; all strings so that it pickles."""
        super().__init__(worker, exit_detail, log_file)
        self.worker = worker
        self.exit_detail = exit_detail
        self.log_file = log_file

    def __str__(self) -> str:
        """One sentence naming the worker, its exit and its log."""
        return f"worker {self.worker} is gone ({self.exit_detail}); its log: {self.log_file}"


class NodeLostError(WorkerLostError):
    """Raised when a worker process is gone together with its node: the devices are gone, too, and nothing can be started there."""


class WorkerStuckError(WorkerLostError):
    """Raised when a worker keeps its deadlines no more although its process lives: it hangs or is stopped.

    Whoever survives a lost process survives it, once that process is ended.
    """

    def __str__(self) -> str:
        """One sentence naming the worker, the deadline with its remedy, and the log."""
        return f"worker {self.worker} is stuck: {self.exit_detail}; its log: {self.log_file}"


class BrokenGroupError(WorkerLostError):
    """Raised when the collectives of a worker fail: another rank of its process group ended, hangs or cannot be reached.

    The group computes nothing any more although this process lives. The rank that is gone is named instead where it is known in time.
    """

    def __str__(self) -> str:
        """One sentence naming the rank that noticed, what its collective said and its log."""
        return f"the process group of worker {self.worker} is broken ({self.exit_detail}); its log: {self.log_file}"


class EngineLostError(WorkerLostError):
    """Raised when an engine computes nothing any more although its process may live.

    Its thread ended, a process of its own died, its device failed, or it made no progress. Whoever survives a lost process survives it.
    """

    def __str__(self) -> str:
        """One sentence naming the engine, what became of it and its log."""
        return f"engine {self.worker} is lost ({self.exit_detail}); its log: {self.log_file}"


class EngineDiedError(RuntimeFault):
    """Raised when an engine is called whose own thread ended, by a fault or by ``shutdown``; the message carries the cause.

    The engine does not know what its worker is called: the cluster makes it an :class:`EngineLostError` on its way to the driver.
    """

    reason = Reason.WORKER_LOST


class WorkerFailedError(RuntimeFault):
    """Raised when a worker's method raised something that is not of this tree."""

    reason = Reason.WORKER_FAILED

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

    reason = Reason.WEIGHT_SYNC_FAILED


class CorruptedWeightsError(WeightSyncError):
    """Raised when bytes of a sync are not those that were sent; sent once more they may be."""


class SyncBrokenError(WeightSyncError):
    """Raised when a connection between trainer and engines broke or does not answer; over others the sync may work."""


class WholeNeededError(WeightSyncError):
    """Raised when an engine gets changes of weights that it does not have; sent again, all weights travel whole."""


class OffloadError(RuntimeFault):
    """Raised when state cannot be moved between device and host, and when a component is used whose state is broken since.

    A fresh attempt starts from a checkpoint with whole copies, so that it may go better.
    """

    reason = Reason.OFFLOAD_FAILED

    def __init__(self, message: str, rolled_back: bool = False) -> None:
        """``rolled_back``: everything is where it was before the call, so that it may be tried again."""
        super().__init__(message, rolled_back)
        self.message = message
        self.rolled_back = rolled_back

    def __str__(self) -> str:
        """The message alone."""
        return self.message


class HostBudgetError(OffloadError):
    """Raised when offloaded state needs more host memory than the spec allows; nothing has moved, and another attempt ends the same."""

    reason = Reason.SPEC_INVALID


class NoRoomError(OffloadError):
    """Raised when what should be on a device at the same time is more than its budget; carries the arithmetic, which no retry changes."""

    reason = Reason.SPEC_INVALID


class LeaseLostError(OffloadError):
    """Raised when devices are used after their lease was lost: its deadline passed, or a worker of its holder ended."""

    reason = Reason.DEADLINE_EXCEEDED


class CheckpointError(RuntimeFault):
    """Raised when a checkpoint cannot be written or read."""

    reason = Reason.CHECKPOINT_FAILED


class SupersededError(CheckpointError):
    """Raised when another driver has taken over the checkpoints of this run."""


class RewardSetupError(RuntimeFault):
    """Raised when a reward cannot be set up; a reward that fails on one sample raises nothing."""

    reason = Reason.REWARD_INVALID


class RewardsFailedError(RuntimeFault):
    """Raised when rewards fail on nearly all samples, so that the run would never get a batch."""

    reason = Reason.REWARD_INVALID


class EnvironmentSetupError(RuntimeFault):
    """Raised when an environment cannot be set up; one that fails in an episode raises nothing: its episode does not count."""

    reason = Reason.SPEC_INVALID


class EpisodesFailedError(RuntimeFault):
    """Raised when most episodes end with an error of their environment, so that the run would never get a batch."""

    reason = Reason.WORKER_FAILED


class DataError(RuntimeFault):
    """Raised when prompts cannot be produced."""

    reason = Reason.DATA_INVALID


class FilteredOutError(DataError):
    """Raised when the dynamic-sampling filter kept none of many groups in a row: no training would come of going on."""


class ModelError(RuntimeFault):
    """Raised when a model or tokenizer cannot be loaded."""

    reason = Reason.MODEL_INVALID


class DownloadError(RuntimeFault):
    """Raised when files of a model do not reach a node although the Hub has them; the next attempt goes on with those that did."""


class DeadlineError(RuntimeFault, TimeoutError):
    """Raised when a wait ran past its deadline; the message names what was awaited."""

    reason = Reason.DEADLINE_EXCEEDED


class CallDeadlineError(DeadlineError):
    """Raised when a worker did not answer a call in time: it hangs, or the deadline is too short."""

    def __init__(self, worker: str, method: str, limit: str, log_file: str) -> None:
        """Keep what was asked of whom, and the limit with its unit; all strings so that it pickles."""
        super().__init__(worker, method, limit, log_file)
        self.worker = worker
        self.method = method
        self.limit = limit
        self.log_file = log_file

    def __str__(self) -> str:
        """One sentence naming the worker, the call and the log."""
        return f"worker {self.worker} did not finish {self.method} within {self.limit}; its log: {self.log_file}"

    @property
    def stuck(self) -> WorkerStuckError:
        """The same as the loss of the worker, for whoever survives one."""
        return WorkerStuckError(self.worker, f"it did not finish {self.method} within {self.limit}", self.log_file)


class StartupDeadlineError(DeadlineError):
    """Raised when the workers were not ready within spec.startupDeadlineSeconds."""

    reason = Reason.STARTUP_DEADLINE_EXCEEDED


class ActiveDeadlineError(DeadlineError):
    """Raised when the run did not end within spec.activeDeadlineSeconds."""

    reason = Reason.ACTIVE_DEADLINE_EXCEEDED


class Interrupted(BaseException):
    """Raised when the user interrupts the run; not a fault, so not in the tree above."""

    reason: ClassVar[Reason] = Reason.STOPPED


class Evicted(Interrupted):
    """Raised when a pod of the job is asked to end: a drain, a preemption, or its deletion."""

    reason = Reason.EVICTED
