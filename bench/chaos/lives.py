"""Lives of RLJobs: KubeRay's part, and what happens to a job that the operator has to answer; each ends in a state that is known before."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bench.chaos.outcome import FAILED, RECOVERED, WRONG, Outcome
from bench.operator.api import RAYJOBS, RLJOBS, Api
from bench.operator.scenarios import RUNNING, SUCCEEDED, job_manifest
from rljob_api import termination
from rljob_api.vocabulary import Reason

LAYER = "operator, real kube-apiserver"
DEADLINE_S = 120.0
"""Bound of the operator's answer to anything, on a machine that may be busy, with faults of the operator meanwhile."""
POLL_S = 0.1
CHILDREN = ("serviceaccounts", "pods")
KINDS = (
    "RayJob deleted", "driver lost a worker", "driver failed without a word", "head pod out of memory", "driver failed for the user's code",
    "status out of order", "stale status after the end", "account and Role deleted", "Ray job stopped by hand",
)  # fmt: skip


def failure(reason: Reason, message: str) -> dict[str, str]:
    """A RayJob's status after the driver's last line."""
    line = termination.encode(termination.DriverFailure(reason=reason, message=message))
    return {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": f"step 7\n{line}"}


@dataclass(kw_only=True)
class Life:
    """One RLJob from its creation to its end."""

    api: Api
    namespace: str
    name: str
    kind: str
    rng: random.Random
    outcome: Outcome | None = None
    attempt: int = 1
    faults: list[float] = field(default_factory=list)

    @property
    def job_path(self) -> str:
        return f"{RLJOBS.format(namespace=self.namespace)}/{self.name}"

    @property
    def child_path(self) -> str:
        return f"{RAYJOBS.format(namespace=self.namespace)}/{self.name}-a{self.attempt}"

    async def live(self) -> Outcome:
        """Begin, meet the fault, go on, end; what was promised and did not come is WRONG."""
        try:
            manifest = job_manifest(self.name)
            manifest["spec"]["failurePolicy"] = {"maxRestarts": 3, "restartBackoffSeconds": 1}
            await self.api.create(RLJOBS.format(namespace=self.namespace), manifest)
            await self._until_child()
            await self._pause()
            result, took_s = await self._meet()
            return Outcome(layer=LAYER, kind=self.kind, result=result, recovery_s=took_s)
        except (TimeoutError, RuntimeError, KeyError) as error:
            status = (await self.api.answer("GET", self.job_path))[1].get("status")
            return Outcome(
                layer=LAYER, kind=self.kind, result=WRONG, detail=f"{self.name}: {type(error).__name__}: {error}; status {status}"
            )

    async def _meet(self) -> tuple[str, float | None]:
        if self.kind == "status out of order":
            return await self._out_of_order()
        await self._status(RUNNING)
        await self._until_reason("Running", "Running")
        await self._pause()
        began_s = time.monotonic()
        match self.kind:
            case "stale status after the end":
                await self._end()
                await self._status(RUNNING | {"jobId": "late"})
                return RECOVERED, None  # the observer sees whether anything changes
            case "account and Role deleted":
                await self._delete_children()
                await self._end()
                return RECOVERED, None
            case "driver failed for the user's code" | "Ray job stopped by hand":
                wanted = Reason.REWARD_INVALID if self.kind.startswith("driver") else Reason.STOPPED
                stopped = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}
                await self._status(failure(wanted, "no module named keys") if self.kind.startswith("driver") else stopped)
                await self._until_reason("Failed", wanted)
                return FAILED, time.monotonic() - began_s
        await self._lose()
        self.attempt += 1
        await self._until_child()
        took_s = time.monotonic() - began_s
        await self._pause()
        await self._status(RUNNING)
        await self._end()
        return RECOVERED, took_s

    async def _lose(self) -> None:
        """End the attempt in a way that is followed by another one, and see that the status says why."""
        match self.kind:
            case "RayJob deleted":
                await self.api.call("DELETE", self.child_path)
                wanted = Reason.CHILD_DELETED
            case "driver lost a worker":
                await self._status(failure(Reason.WORKER_LOST, "worker actor_train-0 is gone (signal 9)"))
                wanted = Reason.WORKER_LOST
            case "driver failed without a word":
                await self._status({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": "step 7"})
                wanted = Reason.DRIVER_FAILED
            case "head pod out of memory":
                await self._head_killed()
                wanted = Reason.OUT_OF_MEMORY
            case _:
                raise KeyError(self.kind)

        def is_reported(found: dict[str, Any]) -> bool:
            return found.get("status", {}).get("lastFailure", {}).get("reason") == wanted

        await self._until(self.job_path, is_reported, f"lastFailure {wanted}")

    async def _out_of_order(self) -> tuple[str, float | None]:
        """The end is seen before the start, then a start that is too late."""
        began_s = time.monotonic()
        await self._status(SUCCEEDED)
        await self._until_reason("Succeeded", "Completed")
        took_s = time.monotonic() - began_s
        await self._status(RUNNING)
        return RECOVERED, took_s

    async def _end(self) -> None:
        await self._status(SUCCEEDED)
        await self._until_reason("Succeeded", "Completed")

    async def _head_killed(self) -> None:
        """The head's container ends with 137, OOMKilled, and KubeRay has not noticed yet."""
        _, parent = await self.api.answer("GET", self.child_path)
        cluster = f"{self.name}-{self.attempt}-c"
        owner = {
            "apiVersion": "ray.io/v1", "kind": "RayJob", "name": parent["metadata"]["name"], "uid": parent["metadata"]["uid"],
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        labels = parent["metadata"]["labels"] | {
            "ray.io/cluster": cluster, "ray.io/group": "headgroup", "ray.io/node-type": "head", "ray.io/is-ray-node": "yes",
        }  # fmt: skip
        await self._status(RUNNING | {"rayClusterName": cluster, "rayJobInfo": {"startTime": _now()}})
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        metadata = {"name": f"{cluster}-head", "labels": labels, "ownerReferences": [owner]}
        container = {"name": "ray", "image": "example.com/rljob-runtime:test"}
        await self.api.create(pods, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
        ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": _now()}}
        state = {
            "phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [{"name": "ray", "ready": False, "restartCount": 0, "image": "i", "imageID": "i", "state": ended}],
        }  # fmt: skip
        await self.api.patch_status(f"{pods}/{cluster}-head", state)
        gone = f"{pods}/{cluster}-head"

        async def remove() -> None:  # as KubeRay does with the pods of a RayJob that is deleted
            await self._until(self.job_path, lambda found: "lastFailure" in found.get("status", {}), "lastFailure")
            await self.api.answer("DELETE", f"{gone}?gracePeriodSeconds=0")  # the garbage collector may have been first

        await remove()

    async def _delete_children(self) -> None:
        for path in (
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.name}-rljob",
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}/roles/{self.name}-rljob",
        ):
            await self.api.call("DELETE", path)

    async def _status(self, status: dict[str, Any]) -> None:
        await self.api.patch_status(self.child_path, status)

    async def _until_child(self) -> None:
        await self._until(self.child_path, lambda found: found.get("kind") == "RayJob", f"RayJob of attempt {self.attempt}")

    async def _until_reason(self, condition: str, reason: str) -> None:
        def has(found: dict[str, Any]) -> bool:
            conditions = found.get("status", {}).get("conditions", [])
            return any((c["type"], c["status"], c["reason"]) == (condition, "True", reason) for c in conditions)

        await self._until(self.job_path, has, f"{condition}=True {reason}")

    async def _until(self, path: str, true: Callable[[dict[str, Any]], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not true((await self.api.answer("GET", path))[1]):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} not within {DEADLINE_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.random() * 0.6)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
