"""Why the containers of a pod are not created: the warnings of its node, such as a volume that cannot be mounted.

A pod says nothing of it: its containers wait with reason ContainerCreating for as long as a Secret is missing, a volume is attached to
another node, or an image is pulled. Only events tell which. They are read for few pods, rarely, and only where a pod has waited for long.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from rljob_operator import times, views
from rljob_operator.errors import KubeError
from rljob_operator.model import Key, Manifest, PodView
from rljob_operator.policies.startup import CREATION_CHECK, is_created_late
from rljob_operator.protocol import Kind, KubeClient

MAX_ASKED = 3
"""Pods of a job whose events are read; the others mostly wait for the same."""
MAX_KNOWN = 1_000
"""Answers kept."""
BLOCKING = frozenset(
    {
        "FailedMount",
        "FailedAttachVolume",
        "FailedMapVolume",
        "FailedCreatePodSandBox",
        "FailedCreatePodContainer",
        "FailedPrepareDynamicResources",
        "NetworkNotReady",
    }
)
"""Reasons of warnings about what containers are not created without; a failing pull is in the pod's own status."""
LASTING = timedelta(minutes=5)
"""A warning that was not repeated for so long is over: kubelets repeat these every two minutes."""
_CONSEQUENCES = ("Unable to attach or mount volumes",)
"""Begin messages that only repeat that another warning's problem persists."""

logger = logging.getLogger(__name__)


class PodWarnings:
    """Reads the events of pods, each pod's at most once per :data:`~.policies.startup.CREATION_CHECK`."""

    def __init__(self, client: KubeClient) -> None:
        """Nothing is known yet."""
        self._client = client
        self._known: OrderedDict[tuple[str, str], tuple[datetime, str | None]] = OrderedDict()
        self._failed: set[type[KubeError]] = set()

    async def explained(self, key: Key, pods: Iterable[PodView], now: datetime) -> tuple[PodView, ...]:
        """The pods, with the newest warning about those whose containers have not been created for long."""
        found, asked = [], 0
        for pod in pods:
            if is_created_late(pod, now) and asked < MAX_ASKED:
                asked += 1
                pod = replace(pod, warning=await self._warning(key.namespace, pod, now))
            found.append(pod)
        return tuple(found)

    async def _warning(self, namespace: str, pod: PodView, now: datetime) -> str | None:
        known = self._known.get((namespace, pod.name))
        if known is not None and now - known[0] < CREATION_CHECK:
            return known[1]
        selector = f"involvedObject.kind=Pod,involvedObject.name={pod.name},type=Warning"
        text = None if known is None else known[1]
        try:
            pages = [page async for page in self._client.pages(Kind.EVENT, namespace, field_selector=selector)]
            text = _newest([event for page in pages for event in page["items"]], max(now - LASTING, pod.creating_since or now))
        except KubeError as error:  # the status says less then, and nothing else depends on it
            if type(error) not in self._failed:
                self._failed.add(type(error))
                logger.warning("events of pods cannot be read, so no condition says why containers are not created: %s", error)
        self._known[namespace, pod.name] = (now, text)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return text


def _newest(events: Iterable[Manifest], since: datetime) -> str | None:
    """Reason and message of the newest warning; one that names the cause before others."""
    blocking = (event for event in events if event.get("reason") in BLOCKING)
    dated = [(when, event) for event in blocking if (when := _time(event)) is not None and when >= since]
    if not dated:
        return None
    _, event = max(dated, key=lambda item: (not str(item[1].get("message", "")).startswith(_CONSEQUENCES), item[0]))
    return views.clean(f"{event['reason']}: {event.get('message', '')}", views.MAX_TEXT)


def _time(event: Manifest) -> datetime | None:
    """When it was last seen."""
    series: dict[str, Any] = event.get("series") or {}
    texts = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((time for text in texts if (time := times.parse(text)) is not None), None)
