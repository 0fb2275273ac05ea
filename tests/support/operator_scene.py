"""Fluent builders: a healthy RLJob, modified by the test, then observed.

>>> scene().restarts(2).child(1, "Failed", job_status="FAILED", reason="AppFailed").decide()
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from rljob_api import termination
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.validation import CheckedJob, check
from rljob_api.vocabulary import Reason
from rljob_operator import status
from rljob_operator.decide import decide
from rljob_operator.model import ChildView, ClusterView, Decision, JobView, Key, Observed, PodView
from tests.unit.api.manifests import manifest

T0 = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
"""When the RLJob was created."""
NAME, UID = "math-grpo", "uid-of-job"
INVALID = SpecInvalidError([FieldError(path="spec.components[0].placement.ranks", value='"0-7"', problem="too many", remedy="use 0-1")])


def at(seconds: float) -> datetime:
    """A time after the job's creation."""
    return T0 + timedelta(seconds=seconds)


def time_text(seconds: int) -> str:
    """The same as a Kubernetes timestamp."""
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def spec(**changes: Any) -> dict[str, Any]:
    """A valid spec with three nodes in two groups."""
    raw = manifest()["spec"]
    raw["nodeGroups"] = [
        {"name": "train", "nodes": 2, "devicesPerNode": 1, "deviceResource": "cpu"},
        {"name": "infer", "nodes": 1, "devicesPerNode": 1, "deviceResource": "cpu"},
    ]
    raw["components"][0]["placement"] = {"nodeGroups": ["train"], "ranks": "0-1"}
    raw["components"][1]["placement"] = {"nodeGroups": ["infer"], "ranks": "0"}
    return raw | changes


@cache
def _checked(text: str) -> CheckedJob:
    return check(manifest() | {"metadata": {"name": NAME}, "spec": json.loads(text)})


def checked() -> CheckedJob:
    """The checked spec of the builders, whatever a test changes in its spec."""
    return _checked(json.dumps(spec()))


def pod(name: str, attempt: int = 1, **fields: Any) -> PodView:
    """A ready node, bound to a machine at once unless that is said of it; ``head=True`` makes it the head."""
    head = fields.pop("head", False)
    created = fields.get("created", at(1))
    values: dict[str, Any] = {
        "cluster": f"{NAME}-a{attempt}-c",
        "group": "headgroup" if head else "train",
        "is_head": head,
        "created": created,
        "deleting": False,
        "phase": "Running",
        "ready": True,
        "scheduled_at": None if fields.get("unschedulable") else created,
        "unschedulable": None,
        "waiting": None,
        "terminated": None,
    }
    return PodView(name=name, attempt=attempt, **(values | fields))


def child(attempt: int = 1, deployment_status: str = "", **fields: Any) -> ChildView:
    """A RayJob of the job."""
    values: dict[str, Any] = {
        "name": f"{NAME}-a{attempt}",
        "owner_uid": UID,
        "created": at(0),
        "deleting": False,
        "suspend": False,
        "job_status": "",
        "reason": "",
        "message": "",
        "cluster_name": "" if deployment_status in ("", "Suspended") else f"{NAME}-a{attempt}-c",
        "job_started": None,
    }
    return ChildView(attempt=attempt, deployment_status=deployment_status, **(values | fields))


def failed_log(reason: Reason, message: str = "it broke", worker: str | None = None) -> str:
    """A driver's log that ends with a termination message."""
    encoded = termination.encode(termination.DriverFailure(reason=reason, message=message, worker=worker))
    return f"Job entrypoint command failed with exit code 1\nTraceback\n{encoded}\n"


class Scene:
    """An observation under construction."""

    def __init__(self) -> None:
        self.job = JobView(
            key=Key(namespace="team", name=NAME), uid=UID, version="7", generation=1, created=T0, spec=spec(), status={}, deleting=False
        )
        self.checked: CheckedJob | SpecInvalidError = checked()
        self.children: list[ChildView] = []
        self.pods: list[PodView] = []
        self.clusters: list[ClusterView] = []
        self.hashes: dict[str, str] = {}
        self.taken_name: str | None = None
        self.rejected: str | None = None
        self.problem: str | None = None

    def spec(self, **changes: Any) -> Scene:
        """Change fields of the spec."""
        self.job = replace(self.job, spec={**self.job.spec, **changes})
        return self

    def restarts(self, maximum: int, backoff_s: int = 10, rules: tuple[tuple[str, str], ...] = ()) -> Scene:
        """Set the failure policy."""
        entries = [{"reason": reason, "action": action} for reason, action in rules]
        return self.spec(failurePolicy={"maxRestarts": maximum, "restartBackoffSeconds": backoff_s, "rules": entries})

    def suspended(self) -> Scene:
        """spec.suspend: true."""
        return self.spec(suspend=True)

    def queued(self) -> Scene:
        """In a Kueue queue."""
        return self.spec(queue={"name": "team-queue"})

    def invalid(self, error: SpecInvalidError = INVALID) -> Scene:
        """Make the spec invalid."""
        self.checked = error
        return self

    def changed(self, *names: str) -> Scene:
        """Change fields that cannot be changed, after the first attempt."""
        before = {"model": "of the model", "podTemplate": "of the template"}
        self.hashes = before | dict.fromkeys(names, "another one")
        return self.stored(specHashes=before)

    def stored(self, **fields: Any) -> Scene:
        """Put fields into the status."""
        self.job = replace(self.job, status={**self.job.status, **fields})
        return self

    def failed(self, attempt: int, reason: Reason = Reason.WORKER_LOST, seconds: int = 100, message: str = "it broke") -> Scene:
        """Record the failure of an attempt in the status."""
        entry = {"attempt": attempt, "reason": str(reason), "message": message, "time": time_text(seconds)}
        return self.stored(attempt=attempt, startTime=time_text(0), lastFailure=entry)

    def child(self, attempt: int = 1, deployment_status: str = "", **fields: Any) -> Scene:
        """Add a RayJob."""
        self.children.append(child(attempt, deployment_status, **fields))
        return self

    def gone_soon(self) -> Scene:
        """RayJobs are being deleted; KubeRay's finalizer keeps them."""
        self.children = [replace(each, deleting=True) for each in self.children]
        return self

    def gone(self) -> Scene:
        """No RayJob is left."""
        self.children = []
        return self

    def running(self, attempt: int = 1) -> Scene:
        """Add a RayJob whose driver is running, with all its pods."""
        self.child(attempt, "Running", job_status="RUNNING", job_started=at(30))
        return self.pod("head", attempt, head=True).nodes(attempt)

    def nodes(self, attempt: int = 1, **fields: Any) -> Scene:
        """Add all three nodes."""
        for index, group in enumerate(("train", "train", "infer")):
            self.pod(f"node-{index}", attempt, group=group, **fields)
        return self

    def pod(self, name: str, attempt: int = 1, **fields: Any) -> Scene:
        """Add a pod, or replace the one with that name."""
        self.pods = [p for p in self.pods if p.name != name] + [pod(name, attempt, **fields)]
        return self

    def cluster(self, name: str, replica_failure: str | None = None) -> Scene:
        """Add a RayCluster."""
        self.clusters.append(ClusterView(name=name, replica_failure=replica_failure))
        return self

    def taken(self, name: str) -> Scene:
        """Give the name of the child to an object with another owner."""
        self.taken_name = name
        return self

    def reject(self, message: str) -> Scene:
        """Have the API server reject the child."""
        self.rejected = message
        return self

    def unavailable(self, message: str) -> Scene:
        """Have the API server fail to create the child."""
        self.problem = message
        return self

    def deleting(self) -> Scene:
        """Mark the RLJob as being deleted."""
        self.job = replace(self.job, deleting=True)
        return self

    def observed(self) -> Observed:
        """The observation."""
        return Observed(
            job=self.job,
            checked=self.checked,
            spec_hashes=self.hashes,
            children=tuple(self.children),
            clusters=tuple(self.clusters),
            pods=tuple(self.pods),
            runtime_image="rljob-runtime:1",
            runtime_ray_version="2.60.0",
            taken_name=self.taken_name,
            rejected=self.rejected,
            unavailable=self.problem,
        )

    def decide(self, seconds: float = 60) -> Decision:
        """Decide at a given time."""
        return decide(self.observed(), at(seconds))

    def render(self, seconds: float = 60) -> dict[str, Any]:
        """The resulting status."""
        return status.render(self.observed(), self.decide(seconds), at(seconds))

    def written(self, seconds: float = 60) -> Scene:
        """A copy with the resulting status stored."""
        copy = deepcopy(self)
        kept = {"progress": self.job.status["progress"]} if "progress" in self.job.status else {}
        copy.job = replace(copy.job, status=self.render(seconds) | kept)
        return copy


def scene() -> Scene:
    """A healthy job, just created."""
    return Scene()


def summary(decision: Decision) -> dict[str, str]:
    """Conditions as short text, for example ``{"Accepted": "True SpecValid"}``."""
    return {str(type_): f"{decision.conditions[type_].status} {decision.conditions[type_].reason}" for type_ in ConditionType}
