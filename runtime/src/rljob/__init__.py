"""RLJob from Python: jobs with reward functions and callbacks of your own, and worker groups for loops of your own.

docs/python-api.md shows how. These names are stable; ``tests/golden/python-api.txt`` holds their signatures.
"""

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJob
from rljob_runtime.errors import CallbackError, Interrupted, RuntimeFault
from rljob_runtime.library.callbacks import Callback, Checkpoint, RunControl
from rljob_runtime.library.cluster import Cluster, Placement
from rljob_runtime.library.groups import Group, GroupFactory, create_group
from rljob_runtime.library.run import Outcome, RunResult, run
from rljob_runtime.library.worker import Worker, WorkerPlace
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import StepRecord

__all__ = [
    "Callback",
    "CallbackError",
    "Checkpoint",
    "Cluster",
    "Group",
    "GroupFactory",
    "Interrupted",
    "Outcome",
    "Placement",
    "RLJob",
    "RunControl",
    "RunResult",
    "RuntimeFault",
    "SpecInvalidError",
    "StateKind",
    "StepRecord",
    "Worker",
    "WorkerPlace",
    "create_group",
    "run",
]
