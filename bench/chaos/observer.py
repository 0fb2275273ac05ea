"""What must hold at every moment, by watches of the real API server: ONE-CHILD, TERMINAL, attempts that count up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.operator.api import RAYJOBS, RLJOBS, Api

OVER = ("Complete", "Failed", "ValidationFailed")
JOB_LABEL, ATTEMPT_LABEL = "rljob.dev/job", "rljob.dev/attempt"


class Observer:
    """``async with``: notes violations from the first event to the last."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._collections = (RAYJOBS.format(namespace=namespace), RLJOBS.format(namespace=namespace))
        self.violations: list[str] = []
        self._live: dict[str, dict[str, str]] = {}
        """RLJob -> live RayJobs by UID."""
        self._over: dict[str, str] = {}
        """UID of an RLJob that is over -> its conditions."""
        self._attempts: dict[str, int] = {}
        self._finished: set[str] = set()
        """Names of RLJobs that are over."""

    async def __aenter__(self) -> Observer:
        sees = (self._rayjob, self._rljob)
        self._tasks = [
            asyncio.create_task(self._follow(collection, await self._api.version(collection), see))
            for collection, see in zip(self._collections, sees, strict=True)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            if task.done():
                self.violations.append(f"a watch of the observer ended: {task.exception()}")
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, collection: str, since: str, see: Any) -> None:
        async for kind, item in self._api.watch(collection, since):
            see(kind, item)

    def _rayjob(self, kind: str, item: dict[str, Any]) -> None:
        meta = item["metadata"]
        job = meta.get("labels", {}).get(JOB_LABEL)
        if job is None:
            return
        live = self._live.setdefault(job, {})
        over = item.get("status", {}).get("jobDeploymentStatus") in OVER
        if kind == "DELETED" or over or meta.get("deletionTimestamp"):
            live.pop(meta["uid"], None)
        else:
            live[meta["uid"]] = meta["name"]
        if len(live) > 1:
            self.violations.append(f"ONE-CHILD: {job} has {sorted(live.values())}")
        if kind != "ADDED":
            return
        if job in self._finished:
            self.violations.append(f"TERMINAL: {meta['name']} was made after {job} was over")
        attempt = int(meta["labels"][ATTEMPT_LABEL])
        if attempt <= self._attempts.get(job, 0):
            self.violations.append(f"attempt {attempt} of {job} was made after attempt {self._attempts[job]}")
        self._attempts[job] = attempt

    def _rljob(self, kind: str, item: dict[str, Any]) -> None:
        meta, conditions = item["metadata"], item.get("status", {}).get("conditions", [])
        over = any(c["type"] in ("Succeeded", "Failed") and c["status"] == "True" for c in conditions)
        text = json.dumps([[c["type"], c["status"], c["reason"], c.get("message")] for c in conditions])
        before = self._over.get(meta["uid"])
        if kind == "DELETED":
            return
        if before is not None and text != before:
            self.violations.append(f"TERMINAL: {meta['name']} was over with {before} and now says {text}")
        if over:
            self._over[meta["uid"]] = text
            self._finished.add(meta["name"])
