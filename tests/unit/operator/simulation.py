"""An in-memory API server and KubeRay, as far as one RLJob needs them, around the real decisions.

::

    user --edits--> World <--ticks-- KubeRay: RayJobs, clusters, pods advance
                      ^
                      +--writes-- operator: observe -> decide -> apply -> status; may die after any single write

The world checks ONE-CHILD after every change: one live RayJob, and one pod that runs a driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from rljob_api.vocabulary import Reason
from rljob_operator import status
from rljob_operator.decide import decide
from rljob_operator.model import ChildView, Decision, JobView, Manifest, Observed
from rljob_operator.policies.situation import is_live
from tests.support.operator_scene import NAME, at, checked, child, failed_log, pod, scene

TICK_S = 5
MAX_PASSES = 8
"""An operator that still writes after so many passes in a row is not going to stop."""

MakeObjects = Callable[[JobView, int], list[Manifest]]


class Died(RuntimeError):
    """Raised when the operator process dies right after a write."""


def attempt_objects(job: JobView, attempt: int) -> list[Manifest]:
    """Stand-in for the children of an attempt: a Role and the RayJob, the RayJob last."""
    name = f"{job.key.name}-a{attempt}"
    return [
        {"kind": "Role", "metadata": {"name": name}},
        {"kind": "RayJob", "metadata": {"name": name, "labels": {"rljob.dev/attempt": str(attempt)}}},
    ]


class World:
    """All objects, the time, and what happens to them."""

    def __init__(self, fates: Mapping[int, str], **spec: Any) -> None:
        """``fates``: attempt -> success, fail, stuck or run (forever); spec: changed fields."""
        self.now_s = 0
        self.fates = fates
        self.job: JobView | None = scene().spec(**spec).job
        self.helpers: set[tuple[str, str]] = set()
        self.children: dict[str, ChildView] = {}
        self.pods: dict[str, Any] = {}
        self.since: dict[str, int] = {}
        self.num_clusters = 0
        self.num_writes = 0
        self.dies_after: int | None = None
        self.most_live = 0

    # --- the API server: every method that the operator calls is one write

    def _wrote(self) -> None:
        self._check()
        self.num_writes += 1
        if self.num_writes == self.dies_after:
            raise Died

    def create(self, manifest: Manifest) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if (kind, name) in self.helpers or (name in self.children and kind == "RayJob"):
            return  # AlreadyExists, ours
        if kind == "RayJob":
            attempt = int(manifest["metadata"]["labels"]["rljob.dev/attempt"])
            self.children[name] = child(attempt, created=at(self.now_s))
            self.since[name] = self.now_s
        else:
            self.helpers.add((kind, name))
        self._wrote()

    def suspend(self, name: str, value: bool) -> None:
        self.children[name] = replace(self.children[name], suspend=value)
        self._wrote()

    def delete_child(self, name: str) -> None:
        self.children[name] = replace(self.children[name], deleting=True)
        self._wrote()

    def delete_job(self) -> None:
        """The garbage collector takes everything else with it."""
        self.job = None
        self.helpers.clear()
        self.children.clear()
        self.pods.clear()
        self._wrote()

    def write_status(self, new: dict[str, Any]) -> None:
        assert self.job is not None
        self.job = replace(self.job, status=deepcopy(new))
        self._wrote()

    # --- the user

    def edit(self, **spec: Any) -> None:
        assert self.job is not None
        self.job = replace(self.job, spec={**self.job.spec, **spec}, generation=self.job.generation + 1)

    def delete_rayjob(self, name: str) -> None:
        self.children[name] = replace(self.children[name], deleting=True)

    # --- KubeRay

    def tick(self) -> None:
        self.now_s += TICK_S
        for name in list(self.children):
            self._advance(name)
            self._check()
        for name, view in list(self.pods.items()):
            if view.deleting:
                del self.pods[name]

    def _advance(self, name: str) -> None:
        view = self.children[name]
        age_s = self.now_s - self.since[name]
        state = view.deployment_status
        if view.deleting:
            self._remove_pods(view)
            del self.children[name]
            return
        if state == "":
            self.num_clusters += 1
            self._become(name, deployment_status="Initializing", cluster_name=f"{name}-c{self.num_clusters}")
        elif state in ("Initializing", "Running") and view.suspend:
            self._become(name, deployment_status="Suspending")
        elif state == "Initializing" and age_s == TICK_S:
            self._make_pods(view)
        elif state == "Initializing" and age_s >= 3 * TICK_S and self.fates[view.attempt] != "stuck":
            self.pods = {key: replace(p, ready=p.cluster == view.cluster_name or p.ready) for key, p in self.pods.items()}
            self._become(name, deployment_status="Running", job_status="RUNNING", job_started=at(self.now_s))
        elif state == "Running" and age_s >= 6 * TICK_S:
            self._end(name, self.fates[view.attempt])
        elif state == "Suspending":
            self._remove_pods(view)
            if not any(p.cluster == view.cluster_name for p in self.pods.values()) or age_s > TICK_S:
                self._become(name, deployment_status="Suspended", job_status="", cluster_name="", job_started=None)
        elif state == "Suspended" and not view.suspend:
            self._become(name, deployment_status="")
        elif state in ("Complete", "Failed") and age_s >= TICK_S:
            self._remove_pods(view)

    def _end(self, name: str, fate: str) -> None:
        if fate == "success":
            self._become(name, deployment_status="Complete", job_status="SUCCEEDED")
        elif fate == "fail":
            message = failed_log(Reason.WORKER_LOST, "actor_train-0 is gone")
            self._become(name, deployment_status="Failed", job_status="FAILED", reason="AppFailed", message=message)

    def _become(self, name: str, **fields: Any) -> None:
        self.children[name] = replace(self.children[name], **fields)
        self.since[name] = self.now_s

    def _make_pods(self, view: ChildView) -> None:
        for suffix, group in (("head", "headgroup"), ("n0", "train"), ("n1", "train"), ("n2", "infer")):
            name = f"{view.cluster_name}-{suffix}"
            fields = {"cluster": view.cluster_name, "created": at(self.now_s), "ready": False, "head": suffix == "head"}
            self.pods[name] = replace(pod(name, view.attempt, **fields), group=group)

    def _remove_pods(self, view: ChildView) -> None:
        for name, p in self.pods.items():
            if p.attempt == view.attempt:
                self.pods[name] = replace(p, deleting=True, deletion_time=at(self.now_s))

    # --- what must always hold

    def _check(self) -> None:
        live = [view.name for view in self.children.values() if is_live(view)]
        heads = [p.name for p in self.pods.values() if p.is_head]
        self.most_live = max(self.most_live, len(live))
        assert len(live) <= 1, f"two live RayJobs at {self.now_s} s: {live}"
        assert len(heads) <= 1, f"two pods may run a driver at {self.now_s} s: {heads}"

    def objects(self) -> set[tuple[str, str]]:
        """Kind and name of all that is there."""
        names = self.helpers | {("RayJob", name) for name in self.children} | {("Pod", name) for name in self.pods}
        return names | ({("RLJob", NAME)} if self.job is not None else set())

    def outcome(self) -> Any:
        """The status without its times."""
        return None if self.job is None else timeless(self.job.status)


def reconcile(world: World, make: MakeObjects = attempt_objects) -> Decision | None:
    """One pass of the operator, as the reconciler does it."""
    if world.job is None:
        return None
    now = at(world.now_s)
    observed = Observed(
        job=world.job,
        checked=checked(),
        children=tuple(world.children.values()),
        clusters=(),
        pods=tuple(world.pods.values()),
    )
    decision = decide(observed, now)
    for name, value in decision.set_suspend.items():
        world.suspend(name, value)
    for name in decision.delete_children:
        world.delete_child(name)
    if decision.create_attempt is not None:
        for manifest in make(world.job, decision.create_attempt):
            world.create(manifest)
    new = status.render(observed, decision, now)
    if status.changed(world.job.status, new):
        world.write_status(new)
    if decision.delete_job:
        world.delete_job()
    return decision


def reconcile_until_quiet(world: World) -> None:
    """Reconcile until nothing is written any more, which must be soon."""
    for _ in range(MAX_PASSES):
        before = world.num_writes
        reconcile(world)
        if world.num_writes == before:
            return
    raise AssertionError(f"the operator still writes after {MAX_PASSES} passes at {world.now_s} s")


def run(world: World, until_s: int, edits: Mapping[int, Callable[[World], None]], *, dies_after: int | None, down_s: int) -> World:
    """Let time pass; the operator dies after one write and restarts ``down_s`` seconds later."""
    world.dies_after = dies_after
    back_s = 0
    for _ in _ticks(until_s):
        if world.now_s in edits:
            edits[world.now_s](world)
        if world.now_s >= back_s:
            try:
                reconcile_until_quiet(world)
            except Died:
                back_s = world.now_s + down_s
                if not down_s:
                    reconcile_until_quiet(world)
        world.tick()
    return world


def _ticks(until_s: int) -> Iterator[int]:
    yield from range(0, until_s, TICK_S)


def timeless(value: Any) -> Any:
    """A status without its timestamps, including those in messages."""
    if isinstance(value, dict):
        times = ("lastTransitionTime", "startTime", "completionTime", "time")
        return {key: timeless(item) for key, item in value.items() if key not in times}
    if isinstance(value, list):
        return [timeless(item) for item in value]
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "<time>", value) if isinstance(value, str) else value
