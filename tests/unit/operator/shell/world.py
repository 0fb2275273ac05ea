"""The operator around the fake API server, with a scripted KubeRay and a clock that the test controls."""

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rljob_api.naming import ATTEMPT_LABEL, JOB_LABEL
from rljob_api.reading import manifest
from rljob_operator.cache import Cache, Source
from rljob_operator.errors import KubeError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key, Manifest
from rljob_operator.protocol import Kind
from rljob_operator.reconcile import Reconciler
from rljob_operator.resync import Resync
from rljob_operator.settings import Settings
from tests.unit.operator.shell.fake_kube import Died, FakeKube

START = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(runtime_image="registry.example/rljob-runtime:1", runtime_ray_version="2.60.0")
KEY = Key(namespace="team", name="math")
QUICKSTART = Path(__file__).parents[4] / "examples" / "quickstart.yaml"
Outcome = Callable[[int], str]
"""Attempt -> how its driver ends."""


def rljob(name: str = "math", **spec: Any) -> Manifest:
    job: Manifest = copy.deepcopy(dict(manifest.read(QUICKSTART.read_text()).data))
    job["metadata"] = {"name": name, "namespace": "team"}
    job["spec"] |= spec
    return job


class KubeRay:
    """Acts as KubeRay and the kubelet: each step advances every RayJob by one state."""

    def __init__(self, kube: FakeKube, clock: Callable[[], datetime], outcome: Outcome) -> None:
        self.kube = kube
        self.outcome = outcome
        self._clock = clock

    def step(self) -> bool:
        """Whether anything changed."""
        before = len(self.kube.events), len(self.kube.objects)
        self.kube.finish_deletions()
        for name in self.kube.names(Kind.RAYJOB):
            self._advance(self.kube.one(Kind.RAYJOB, name))
        return before != (len(self.kube.events), len(self.kube.objects))

    def _advance(self, rayjob: Manifest) -> None:
        name, status = rayjob["metadata"]["name"], rayjob.get("status", {})
        attempt = int(rayjob["metadata"]["labels"][ATTEMPT_LABEL])

        def report(state: str, job: str = "", **more: Any) -> None:
            self.kube.set_status(Kind.RAYJOB, "team", name, jobDeploymentStatus=state, jobStatus=job, **more)

        match status.get("jobDeploymentStatus", ""), bool(rayjob["spec"].get("suspend")):
            case (("" | "Suspended"), True):
                report("Suspended")
            case (("" | "Suspended"), False):
                report("Initializing", rayClusterName=f"{name}-c")
                self._make_cluster(rayjob, attempt)
            case (("Initializing" | "Running"), True):
                self._remove_cluster(name)
                report("Suspended")
            case "Initializing", False:
                for pod in self.kube.names(Kind.POD):
                    self.kube.set_status(Kind.POD, "team", pod, phase="Running", conditions=[{"type": "Ready", "status": "True"}])
                started = self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")
                report("Running", "RUNNING", rayJobInfo={"startTime": started})
            case "Running", False:
                end = self.outcome(attempt)
                if end == "SUCCEEDED":
                    report("Complete", "SUCCEEDED")
                elif end == "FAILED":
                    report("Failed", "FAILED", reason="AppFailed", message="Job entrypoint command failed with exit code 1\nboom")
                if end != "RUNNING":
                    self._remove_cluster(name)

    def _make_cluster(self, rayjob: Manifest, attempt: int) -> None:
        name = rayjob["metadata"]["name"]
        labels = {JOB_LABEL: rayjob["metadata"]["labels"][JOB_LABEL], ATTEMPT_LABEL: str(attempt)}
        owner = {"kind": "RayJob", "name": name, "uid": rayjob["metadata"]["uid"], "controller": True}
        metadata = {"namespace": "team", "labels": labels, "ownerReferences": [owner]}
        self.kube.add({"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {**metadata, "name": f"{name}-c"}})
        groups = ["headgroup", *(g["groupName"] for g in rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"])]
        for group in groups:
            kind = "head" if group == "headgroup" else "worker"
            more = {"ray.io/cluster": f"{name}-c", "ray.io/group": group, "ray.io/node-type": kind}
            pod = {**metadata, "name": f"{name}-{group}", "labels": {**labels, **more}}
            self.kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "status": {"phase": "Pending"}})

    def _remove_cluster(self, rayjob: str) -> None:
        for kind in (Kind.POD, Kind.RAYCLUSTER):
            for name in self.kube.names(kind):
                if name.startswith(f"{rayjob}-"):
                    self.kube.remove(kind, "team", name)


class World:
    """A cluster with the operator process, which may die and restart."""

    def __init__(self, outcome: Outcome = lambda attempt: "SUCCEEDED") -> None:
        self.now = START
        self.kube = FakeKube(lambda: self.now)
        self.kuberay = KubeRay(self.kube, lambda: self.now, outcome)
        self.errors: list[str] = []
        self.most_live = 0
        """Maximum number of RayJobs that had or were about to get a cluster at the same time."""
        self.is_booted = False
        self.settings = SETTINGS

    def upgrade(self, image: str, ray_version: str) -> None:
        """Replace the operator by one with other defaults."""
        self.settings = replace(SETTINGS, runtime_image=image, runtime_ray_version=ray_version)
        self.is_booted = False

    async def boot(self) -> None:
        """Start a new process, with no memory of an earlier one."""
        self.cache, self.metrics = Cache(), Metrics()
        self.pending: set[Key] = set()
        self.due: dict[Key, datetime] = {}
        self.kube.events.clear()  # watches begin after the list
        self.reconciler = Reconciler(self.kube, self.cache, self.settings, self.metrics, clock=lambda: self.now)
        self.resync = Resync(self.kube, self.cache, self.pending.add, namespaces=(), metrics=self.metrics)
        await self.resync.first()
        self.is_booted = True

    def deliver(self) -> None:
        """Deliver the pending watch events."""
        delivered, self.kube.events[:] = list(self.kube.events), []
        for type_, kind, obj in delivered:
            key = self.cache.remove(kind, obj) if type_ == "DELETED" else self.cache.put(kind, obj, Source.WATCH)
            if key is not None:
                self.pending.add(key)

    async def work(self) -> None:
        """Reconcile every pending job once."""
        for key in sorted(self.pending):
            self.pending.discard(key)
            self.due.pop(key, None)
            try:
                check = await self.reconciler.reconcile(key)
            except KubeError as error:
                self.errors.append(str(error))
                check = self.now + timedelta(seconds=1)
            if check is not None and check <= self.now:
                self.pending.add(key)
            elif check is not None:
                self.due[key] = check
            self._count_live()

    async def settle(self, *, until: Callable[[], bool] = lambda: False, hours: float = 24, slow_watch: bool = False) -> None:
        """Continue until nothing happens any more, ``until`` holds, or hours have passed; a dead process is restarted."""
        end = self.now + timedelta(hours=hours)
        for _ in range(2000):
            try:
                if not self.is_booted:
                    await self.boot()
                if not (slow_watch and self.pending):
                    self.deliver()
                if until():
                    return
                if self.pending:
                    await self.work()
                    continue
                if self.kuberay.step():
                    continue
                if not self.due or min(self.due.values()) > end:
                    return
                self.now = max(self.now, min(self.due.values()))
                self.pending |= {key for key, due in self.due.items() if due <= self.now}
            except Died:
                self.kube.die_after_write = None
                self.is_booted = False
        raise AssertionError(f"not settled after 2000 rounds: {self.kube.writes[-10:]}, {self.errors[-3:]}")

    async def stall(self) -> str:
        """Begin an attempt whose first pod gets a node that does not create its containers. Returns the pod's name."""
        await self.settle(until=lambda: bool(self.kube.names(Kind.POD)))
        name = self.kube.names(Kind.POD)[0]
        since = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
        self.kube.set_status(Kind.POD, "team", name, phase="Pending", conditions=[bound])
        self.kuberay.step = lambda: False  # type: ignore[method-assign]
        return name

    def status(self, name: str = "math") -> Manifest:
        return self.kube.one(Kind.RLJOB, name).get("status", {})

    def condition(self, type_: str, name: str = "math") -> tuple[str, str]:
        found = next(c for c in self.status(name)["conditions"] if c["type"] == type_)
        return found["status"], found["reason"]

    def created(self, kind: Kind) -> list[str]:
        """Names of what the operator created, in order."""
        return [write.split()[2] for write in self.kube.writes if write.startswith(f"create {kind} ")]

    def end_state(self) -> Any:
        """What must be the same however often the process died."""
        objects = {}
        for (kind, _, name), obj in self.kube.objects.items():
            if kind is not Kind.EVENT:
                copied = copy.deepcopy(obj)
                for field in ("uid", "resourceVersion", "generation", "ownerReferences"):
                    copied["metadata"].pop(field, None)
                objects[f"{kind} {name}"] = copied
        return objects

    def _count_live(self) -> None:
        live = [
            name
            for name in self.kube.names(Kind.RAYJOB)
            if self.kube.one(Kind.RAYJOB, name).get("status", {}).get("jobDeploymentStatus") not in ("Complete", "Failed", "Suspended")
        ]
        self.most_live = max(self.most_live, len(live))
