"""Webhooks that are down or hang while jobs are made and changed: what may be ignored is, and what may not is named in the status."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

from bench.chaos.lives import DEADLINE_S, POLL_S
from bench.operator.api import RAYJOBS, RLJOBS, Api
from bench.operator.scenarios import RUNNING, SUCCEEDED, job_manifest
from tests.integration.operator_world import webhooks

OTHERS_FAIL, OWN_FAIL = "webhook of RayJobs down, Fail", "webhook of RLJobs down, Fail"
OTHERS_IGNORED, OWN_IGNORED = "webhook of RayJobs down, Ignore", "webhook of RLJobs down, Ignore"
HANGS = "webhook of RayJobs hangs, Ignore"
SHORT_KINDS = (OTHERS_FAIL, OTHERS_IGNORED, OWN_FAIL, OWN_IGNORED)
KINDS = (*SHORT_KINDS, HANGS)
HANG_S = 12
"""Timeout of a webhook that hangs; the default is 10."""
COLLECTION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
MERGE = "application/merge-patch+json"
Test = Callable[[dict[str, Any]], bool]


class Place(Protocol):
    """Where it happens."""

    api: Api
    namespace: str
    numbers: Any


async def meet(place: Place, kind: str) -> float:
    """One fault of this kind, and what it must not keep from happening.

    Returns:
        Seconds from the first job that is made meanwhile to its RayJob.

    Raises:
        TimeoutError: something did not happen, which the message names.
        RuntimeError: the API server refused what it should not have.
    """
    work = {OTHERS_FAIL: _held_up, OWN_FAIL: _refused_to_users}.get(kind, _ignored)
    return await _Fault(place, kind).run(work)


class _Fault:
    """One webhook."""

    def __init__(self, place: Place, kind: str) -> None:
        self.api, self.namespace, self.kind = place.api, place.namespace, kind
        number = next(place.numbers)
        self.configuration = f"{place.namespace}-hook-{number}"
        self.hook = f"{self.configuration}.example.com"
        self.names = [f"hook-{number}-{letter}" for letter in "abcdefgh"]
        """Names of jobs; the first is there before the webhook."""
        self.labels = {"chaos": self.configuration} if kind == OWN_FAIL else {}
        """Labels of the jobs that it is about; a webhook that refuses all jobs of users leaves nothing else to try."""

    async def run(self, work: Any) -> float:
        await self.make(self.names[0])
        await self.until_child(self.names[0])
        port: AbstractContextManager[Any] = nullcontext() if self.kind.endswith("Fail") else webhooks.endpoint(hangs=self.kind == HANGS)
        with port as endpoint:
            took_s: float = await work(self, endpoint)
        return took_s

    @asynccontextmanager
    async def registered(self, endpoint: webhooks.Endpoint | None) -> AsyncIterator[None]:
        await self.api.create(
            COLLECTION,
            webhooks.configuration(
                self.configuration, self.namespace, webhooks.dead_port() if endpoint is None else endpoint.port,
                "rljobs" if "RLJobs" in self.kind else "rayjobs", policy=self.kind.split()[-1],
                timeout_s=HANG_S if self.kind == HANGS else 10, labels=self.labels or None,
                authority=b"" if endpoint is None else endpoint.authority,
            ),
        )  # fmt: skip
        try:
            yield
        finally:
            await self.api.call("DELETE", f"{COLLECTION}/{self.configuration}")

    def job_path(self, name: str) -> str:
        return f"{RLJOBS.format(namespace=self.namespace)}/{name}"

    def child_path(self, name: str) -> str:
        return f"{RAYJOBS.format(namespace=self.namespace)}/{name}-a1"

    def manifest(self, name: str) -> dict[str, Any]:
        made = job_manifest(name)
        made["metadata"]["labels"] = self.labels
        return made

    async def make(self, name: str) -> None:
        await self.api.create(RLJOBS.format(namespace=self.namespace), self.manifest(name))

    async def suspend(self, name: str) -> None:
        await self.api.call("PATCH", self.job_path(name), {"spec": {"suspend": True}}, MERGE)

    async def until(self, path: str, true: Test, what: str) -> None:
        await self.until_asked(lambda: self.api.answer("GET", path), lambda status, found: status < 300 and true(found), what)

    async def until_asked(self, ask: Callable[[], Any], true: Callable[[int, dict[str, Any]], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            status, found = await ask()
            if true(status, found):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} not within {DEADLINE_S:.0f} s: {status} {json.dumps(found)[:1500]}")
            await asyncio.sleep(POLL_S)

    async def until_child(self, name: str) -> None:
        await self.until(self.child_path(name), lambda found: found.get("kind") == "RayJob", f"RayJob of {name}")

    async def until_suspended(self, name: str) -> None:
        await self.until(self.child_path(name), lambda found: found["spec"].get("suspend") is True, f"suspension of {name}-a1")

    async def until_named(self, name: str, reason: str) -> None:
        """Until condition Running is false for this reason and names the webhook."""

        def is_named(found: dict[str, Any]) -> bool:
            running = _condition(found, "Running")
            return (running.get("status"), running.get("reason")) == ("False", reason) and self.hook in running["message"]

        await self.until(self.job_path(name), is_named, f"{self.hook} in the status of {name}")

    async def until_not_named(self, name: str) -> None:
        def is_silent(found: dict[str, Any]) -> bool:
            return self.hook not in json.dumps(found.get("status", {}).get("conditions"))

        await self.until(self.job_path(name), is_silent, f"an end of {self.hook} in the status of {name}")


def _condition(found: dict[str, Any], type_: str) -> dict[str, Any]:
    return next((c for c in found.get("status", {}).get("conditions", []) if c["type"] == type_), {})


async def _held_up(fault: _Fault, endpoint: None) -> float:
    """No RayJob can be made or changed: the statuses name the webhook, and all is done once it is gone."""
    there, new = fault.names[:2]
    label = {"metadata": {"labels": {"probe": "1"}}}
    async with fault.registered(endpoint):
        await fault.until_asked(
            lambda: fault.api.answer("PATCH", f"{fault.child_path(there)}?dryRun=All", label, MERGE),
            lambda status, found: status >= 400 and fault.hook in found["message"],
            "a refusal by the webhook",
        )
        began_s = time.monotonic()
        await fault.make(new)
        await fault.suspend(there)
        await fault.until_named(new, "ApiUnavailable")
        await fault.until_named(there, "Suspended")
    await fault.until_child(new)
    took_s = time.monotonic() - began_s
    await fault.until_suspended(there)
    for name in (there, new):
        await fault.until_not_named(name)
    return took_s


async def _ignored(fault: _Fault, endpoint: webhooks.Endpoint) -> float:
    """The webhook is asked, and its silence keeps nothing from being made or changed while it is there."""
    async with fault.registered(endpoint):
        for name in fault.names[1:]:  # the API server learns of it in a moment
            asked, began_s = endpoint.num_asked, time.monotonic()
            await fault.make(name)
            await fault.until_child(name)
            took_s = time.monotonic() - began_s
            if endpoint.num_asked > asked:
                break
        else:
            raise TimeoutError(f"the API server made {len(fault.names) - 1} jobs without asking {fault.hook}")
        asked = endpoint.num_asked
        await fault.suspend(name)
        await fault.until_suspended(name)
        if endpoint.num_asked == asked:
            raise TimeoutError(f"the suspension of {name} was stored without asking {fault.hook}")
    return took_s


async def _refused_to_users(fault: _Fault, endpoint: None) -> float:
    """Nobody can make a job, and the refusal names the webhook; a job that is there ends as it should meanwhile."""
    there, new = fault.names[:2]
    jobs = RLJOBS.format(namespace=fault.namespace)
    await fault.api.patch_status(fault.child_path(there), RUNNING)
    await fault.until(fault.job_path(there), lambda found: _condition(found, "Running").get("status") == "True", f"{there} running")
    async with fault.registered(endpoint):
        await fault.until_asked(
            lambda: fault.api.answer("POST", f"{jobs}?dryRun=All", fault.manifest(new)),
            lambda status, found: status >= 400 and fault.hook in found["message"],
            "a refusal by the webhook",
        )
        began_s = time.monotonic()
        await fault.api.patch_status(fault.child_path(there), SUCCEEDED)
        await fault.until(fault.job_path(there), lambda found: _condition(found, "Succeeded").get("status") == "True", f"end of {there}")
    await fault.until_asked(
        lambda: fault.api.answer("POST", jobs, fault.manifest(new)), lambda status, _: status < 300, "a job after the webhook's end"
    )
    await fault.until_child(new)
    return time.monotonic() - began_s
