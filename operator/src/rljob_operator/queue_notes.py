"""Whether Kueue holds a job, and why: what its Workload says, such as which quota is missing or which job preempted it.

A suspended RayJob says nothing of it. Workloads are not watched: they change with every job of a queue. The one of a held job is read every
two minutes, and more often until it says something.

With ``manageJobsWithoutQueueName`` Kueue also holds RayJobs without a queue. All that tells them from others is that they have a Workload;
it is looked for each time before the operator would resume such a RayJob, which Kueue would suspend again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rljob_operator import views
from rljob_operator.errors import KubeError, NotFoundError
from rljob_operator.model import ChildView, JobView
from rljob_operator.policies.suspend import queue_check
from rljob_operator.protocol import Kind, KubeClient

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""Kueue's label on a Workload: the UID of what it is for."""
MAX_KNOWN = 10_000
"""Answers kept."""
QUOTA_RESERVED, EVICTED = "QuotaReserved", "Evicted"
"""Conditions of a Workload."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was found of a RayJob's Workload."""

    read: datetime
    is_there: bool = False
    note: str = ""


class QueueNotes:
    """Reads the Workloads of held RayJobs, each at most once per :func:`~.policies.suspend.queue_check`."""

    def __init__(self, client: KubeClient) -> None:
        """Nothing is known yet."""
        self._client = client
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """By UID of the RayJob."""
        self._failed: set[type[KubeError]] = set()

    async def noted(
        self, job: JobView, children: Iterable[ChildView], uid_of: Callable[[str], str | None], now: datetime
    ) -> tuple[ChildView, ...]:
        """The RayJobs of a job, by ``uid_of`` their names, with what Kueue says of those that it holds."""
        found = []
        for child in children:
            is_asked = child.suspend and not child.deleting and (child.queue or job.spec.get("suspend") is not True)
            if is_asked and (uid := uid_of(child.name)) is not None:
                known = await self._look(job.key.namespace, uid, now, is_expected=bool(child.queue))
                child = replace(child, queue_note=known.note, has_workload=known.is_there)
            found.append(child)
        return tuple(found)

    async def _look(self, namespace: str, uid: str, now: datetime, *, is_expected: bool) -> _Known:
        """What the Workload says; one that is not there is only waited for if ``is_expected``."""
        known = self._known.get(uid)
        if known is not None and (is_expected or known.is_there) and now - known.read < queue_check(known.note):
            return known
        is_there, note = (False, "") if known is None else (known.is_there, known.note)
        try:
            pages = [page async for page in self._client.pages(Kind.WORKLOAD, namespace, f"{JOB_UID_LABEL}={uid}")]
            workloads = [item for page in pages for item in page["items"]]
            is_there, note = bool(workloads), next((text for item in workloads if (text := _why(item))), "")
        except NotFoundError as error:
            if is_expected or is_there:  # else there is no Kueue, as in most clusters
                self._report(error)
        except KubeError as error:  # the status says less then
            self._report(error)
        known = self._known[uid] = _Known(read=now, is_there=is_there, note=note)
        self._known.move_to_end(uid)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _report(self, error: KubeError) -> None:
        if type(error) not in self._failed:
            self._failed.add(type(error))
            logger.warning("Workloads of Kueue cannot be read, so no condition says why jobs are queued: %s", error)


def _why(workload: Mapping[str, Any]) -> str:
    """Why a Workload has no quota; of one that was preempted and has not been looked at since, why it was."""
    entries = (workload.get("status") or {}).get("conditions") or ()
    conditions = {entry.get("type"): entry for entry in entries if isinstance(entry, Mapping)}
    for name, status in ((QUOTA_RESERVED, "False"), (EVICTED, "True")):
        entry = conditions.get(name)
        if entry is not None and entry.get("status") == status and entry.get("message"):
            return views.clean(str(entry["message"]), views.MAX_TEXT)
    return ""
