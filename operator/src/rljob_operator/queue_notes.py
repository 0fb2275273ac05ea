"""Why Kueue holds a job: what its Workload says, such as which quota is missing or which job preempted it.

A suspended RayJob says nothing of it. Workloads are not watched: they change with every job of a queue. The one of a held job is read every
two minutes, and more often until it says something.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from rljob_operator import views
from rljob_operator.errors import KubeError
from rljob_operator.model import ChildView, Key
from rljob_operator.policies.suspend import queue_check
from rljob_operator.protocol import Kind, KubeClient

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""Kueue's label on a Workload: the UID of what it is for."""
MAX_KNOWN = 10_000
"""Answers kept."""
QUOTA_RESERVED, EVICTED = "QuotaReserved", "Evicted"
"""Conditions of a Workload."""

logger = logging.getLogger(__name__)


class QueueNotes:
    """Reads the Workloads of held RayJobs, each at most once per :func:`~.policies.suspend.queue_check`."""

    def __init__(self, client: KubeClient) -> None:
        """Nothing is known yet."""
        self._client = client
        self._known: OrderedDict[str, tuple[datetime, str]] = OrderedDict()
        """By UID of the RayJob."""
        self._failed: set[type[KubeError]] = set()

    async def noted(
        self, key: Key, children: Iterable[ChildView], uid_of: Callable[[str], str | None], now: datetime
    ) -> tuple[ChildView, ...]:
        """The RayJobs of a job, by ``uid_of`` their names, with what Kueue says of those that it holds."""
        found = []
        for child in children:
            if child.queue and child.suspend and not child.deleting and (uid := uid_of(child.name)) is not None:
                child = replace(child, queue_note=await self._note(key.namespace, uid, now))
            found.append(child)
        return tuple(found)

    async def _note(self, namespace: str, uid: str, now: datetime) -> str:
        known = self._known.get(uid)
        text = "" if known is None else known[1]
        if known is not None and now - known[0] < queue_check(text):
            return text
        try:
            pages = [page async for page in self._client.pages(Kind.WORKLOAD, namespace, f"{JOB_UID_LABEL}={uid}")]
            text = next((note for page in pages for item in page["items"] if (note := _why(item))), "")
        except KubeError as error:  # the status says less then, and nothing else depends on it
            if type(error) not in self._failed:
                self._failed.add(type(error))
                logger.warning("Workloads of Kueue cannot be read, so no condition says why jobs are queued: %s", error)
        self._known[uid] = (now, text)
        self._known.move_to_end(uid)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return text


def _why(workload: Mapping[str, Any]) -> str:
    """Why a Workload has no quota; of one that was preempted and has not been looked at since, why it was."""
    entries = (workload.get("status") or {}).get("conditions") or ()
    conditions = {entry.get("type"): entry for entry in entries if isinstance(entry, Mapping)}
    for name, status in ((QUOTA_RESERVED, "False"), (EVICTED, "True")):
        entry = conditions.get(name)
        if entry is not None and entry.get("status") == status and entry.get("message"):
            return views.clean(str(entry["message"]), views.MAX_TEXT)
    return ""
