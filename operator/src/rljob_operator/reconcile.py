"""One reconcile of one RLJob, whatever triggered it: observe, decide, apply, one status write, events.

::

    queue --key--> observe: cache, plan of the spec, GET for a child whose absence would matter, events of pods that are created late,
                      |     Kueue's Workload of a RayJob that it holds
                      |
                      v
                   decide(observed, now)            pure; returns the desired outcome
                      |
                      v
                   apply: suspend patches, deletions, children of an attempt (RayJob last)
                      |        rejection or name conflict -> added to the observation -> decide again
                      v
                   status.render -> changed? -> one server-side apply -> answer into the cache -> events
                      |
                      v
                   next reconcile: immediately after recording a failure, else at the nearest deadline

Invariants: ONE-CHILD (names derive from the attempt, which only the stored status increments), QUIET (no write when nothing changed),
and the process may die between any two writes: the next reconcile finds what exists and continues.

====================  =====================================================================================
error                 handling
====================  =====================================================================================
AlreadyExistsError    ours (owner reference): continue; foreign: condition ChildNameTaken
RejectedError         a child is not made or repaired: condition ChildRejected; a RayJob is not suspended, resumed or deleted: in the
                      messages of the conditions, then back to the queue
NotFoundError         on create: the kind is not served, as RejectedError; on delete or patch: the object is gone, the cache is updated
ConflictError         the object is read again, then back to the queue
UnavailableError      back to the queue; a server's error or an unanswered request is reported before: of a child in condition
                      ApiUnavailable, otherwise as for RejectedError
====================  =====================================================================================
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from rljob_api import naming, validation
from rljob_api.errors import SpecInvalidError
from rljob_api.termination import shorten
from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.v1alpha1.rljob import API_VERSION, KIND
from rljob_api.validation import CheckedJob
from rljob_api.vocabulary import Reason
from rljob_operator import desired, events, frozen, status
from rljob_operator.cache import Cache, Source
from rljob_operator.clock import utc_now
from rljob_operator.decide import decide
from rljob_operator.errors import (
    AlreadyExistsError,
    ConflictError,
    KubeError,
    NotFoundError,
    RejectedError,
    UnansweredError,
    UnavailableError,
)
from rljob_operator.metrics import Metrics
from rljob_operator.model import Decision, Event, JobView, Key, Manifest, Observed
from rljob_operator.pod_warnings import PodWarnings
from rljob_operator.policies import failure
from rljob_operator.policies.admission import is_managed
from rljob_operator.protocol import FIELD_MANAGER, Kind, KubeClient
from rljob_operator.queue_notes import QueueNotes
from rljob_operator.review import Known, everything
from rljob_operator.settings import Settings

NUM_CHECKED_SPECS: Final = 256
"""Size of the cache of checked specs, of jobs that exist; one takes about 35 KiB, all 9 MB, and 0.4 ms to check again."""

NUM_UNFINISHED: Final = 4096
"""Maximum number of attempts remembered whose children could not all be created yet."""
_LATER_KINDS: Final = (str(Kind.ROLE_BINDING), str(Kind.RAYJOB))
"""Kinds that are created after all others, in this order."""

SERVER_ERROR: Final = 500
"""Lowest HTTP status of errors of the server, among them those of webhooks that do not answer."""
LABELS_RESTORED: Final = "LabelsRestored"
"""Reason of the event about a RayJob whose labels were edited."""
LABELS_REST: Final = timedelta(minutes=1)
"""Labels that are removed again sooner are removed by a program: restored with the queue's backoff, and without events."""
MAX_EVENT_MESSAGE: Final = 1024
"""Maximum length of an event message, in characters; the API server rejects longer ones."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obstacle:
    """Why the children of an attempt cannot be created; fields as in Observed."""

    taken_name: str | None = None
    is_taken_one_leaving: bool = False
    rejected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """What a job's spec was found to be, in one generation."""

    uid: str
    generation: int
    started: bool | None
    """Whether the job had started; None where that makes no difference."""
    found: CheckedJob | SpecInvalidError


class Reconciler:
    """Drives one RLJob at a time towards its desired state."""

    def __init__(
        self,
        client: KubeClient,
        cache: Cache,
        settings: Settings,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime] = utc_now,
        known: Known = everything,
        storable: Known = everything,
    ) -> None:
        """``clock`` is the only time source of decisions.

        ``known`` leaves out what only a newer CRD has of a spec, ``storable`` what an older one lacks of a status.
        """
        self._client = client
        self._cache = cache
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._known = known
        self._storable = storable
        self._checked: OrderedDict[Key, _Checked] = OrderedDict()
        self._created: OrderedDict[tuple[str, int], set[tuple[str, str]]] = OrderedDict()
        """(UID of the job, attempt) -> kind and name of the children created so far, for attempts that are not complete yet."""
        self._labeled: OrderedDict[str, datetime] = OrderedDict()
        """UID of a RayJob -> when its labels were last restored."""
        self._warnings = PodWarnings(client)
        self._queue_notes = QueueNotes(client)
        self._event_names = itertools.count()

    def forget_checked(self) -> None:
        """Check every spec again: what ``known`` leaves out has changed."""
        self._checked.clear()

    async def reconcile(self, key: Key) -> datetime | None:
        """Reconcile one job. Returns when to reconcile it again even without an event; None: never.

        Raises:
            KubeError: a request failed; retry.
        """
        job = self._cache.job(key)
        if job is None or job.deleting:
            self._checked.pop(key, None)
            return None  # its children are garbage-collected through their owner references
        job = replace(job, spec=self._known(job.spec))
        now = self._clock()
        observed = await self._observe(job, now)
        decision = decide(observed, now)
        try:
            observed, decision = await self._apply(observed, decision, now)
        except (RejectedError, UnavailableError) as error:
            reported = _with_error(observed, decision, error)
            if reported is not None:
                await self._write_status(job, reported, decide(reported, now), now)
            raise
        await self._write_status(job, observed, decision, now)
        if decision.delete_job:
            await self._delete(Kind.RLJOB, key, key.name, job.uid)
            return None
        # The failure is recorded now; the next pass decides from the record.
        return now if decision.failure is not None else decision.next_check

    # --- observe -------------------------------------------------------------------------------------------------------------------

    async def _observe(self, job: JobView, now: datetime) -> Observed:
        await self._confirm(job)
        key, checked = job.key, self._check(job)
        children = (child for child in self._cache.children(key) if child.owner_uid == job.uid)
        return Observed(
            job=job,
            checked=checked,
            spec_hashes=self._hashes(job, checked),
            children=await self._queue_notes.noted(job, children, partial(self._cache.uid, Kind.RAYJOB, key), now),
            clusters=self._cache.clusters(key),
            pods=await self._warnings.explained(key, self._cache.pods(key), now),
            runtime_image=self._settings.runtime_image,
            runtime_ray_version=self._settings.runtime_ray_version,
        )

    async def _confirm(self, job: JobView) -> None:
        """Where the state of the current RayJob decides, ask the API server instead of the cache, which may lag."""
        attempt = job.status.get("attempt")
        if not attempt or _is_finished(job.status) or not is_managed(job):
            return
        name = naming.rayjob_name(job.key.name, attempt)
        is_known = any((child.name, child.attempt) == (name, attempt) for child in self._cache.children(job.key))
        if is_known and not self._is_head_leaving(job, attempt):
            return
        try:
            found = await self._client.get(Kind.RAYJOB, job.key.namespace, name)
        except NotFoundError:
            self._cache.forget(Kind.RAYJOB, job.key.namespace, name)
            return
        if _is_owned(found, job.uid):
            found = await self._with_labels(job, found, {naming.JOB_LABEL: job.key.name, naming.ATTEMPT_LABEL: str(attempt)})
        self._cache.put(Kind.RAYJOB, found, Source.OTHER)

    async def _with_labels(self, job: JobView, found: Manifest, labels: Mapping[str, str]) -> Manifest:
        """The RayJob with the labels that the watch selects by and the cache reads, which somebody may have edited.

        Without them it looks deleted while it runs. Until they can be restored nothing is decided about the job.

        Raises:
            ConflictError: somebody removes them again, at once or within :data:`LABELS_REST` after the last restoration.
        """
        metadata = found["metadata"]
        stored = metadata.get("labels") or {}
        lost = {name: value for name, value in labels.items() if stored.get(name) != value}
        if not lost:
            return found
        patch = {"metadata": {"uid": metadata["uid"], "labels": lost}}
        restored = await self._client.patch_merge(Kind.RAYJOB, job.key.namespace, metadata["name"], patch)
        stored, now, before = restored["metadata"].get("labels") or {}, self._clock(), self._labeled.get(metadata["uid"])
        self._labeled[metadata["uid"]] = now
        if len(self._labeled) > NUM_UNFINISHED:
            self._labeled.popitem(last=False)
        if any(stored.get(name) != value for name, value in lost.items()) or (before is not None and now - before < LABELS_REST):
            raise ConflictError(f"restore labels of RayJob {metadata['name']}", 409, f"somebody removes {', '.join(sorted(lost))} again")
        message = f"RayJob {metadata['name']}: labels that the operator needs were edited and are restored: {', '.join(sorted(lost))}."
        logger.warning("%s/%s: %s", job.key.namespace, job.key.name, message)
        await self._emit(job, Event(is_warning=True, reason=LABELS_RESTORED, message=message), now)
        return restored

    def _is_head_leaving(self, job: JobView, attempt: int) -> bool:
        """Whether a head pod is being deleted under a RayJob that runs, as far as is known.

        Either it is evicted, or KubeRay deletes it because the RayJob has ended or is being suspended: KubeRay stores that first, but the
        watch of RayJobs may lag behind that of pods.
        """
        runs = any(child.attempt == attempt and failure.runs_driver(child) for child in self._cache.children(job.key))
        return runs and any(pod.is_head and pod.attempt == attempt and pod.deleting for pod in self._cache.pods(job.key))

    async def _refresh(self, kind: Kind, key: Key, name: str) -> None:
        """Reread one object into the cache."""
        try:
            self._cache.put(kind, await self._client.get(kind, key.namespace, name), Source.OTHER)
        except NotFoundError:
            self._cache.forget(kind, key.namespace, name)

    def _hashes(self, job: JobView, checked: CheckedJob | SpecInvalidError) -> dict[str, str]:
        """Hashes of the spec; computed where a job begins or its spec has changed since the status was written."""
        recorded = job.status.get("specHashes")
        if isinstance(checked, SpecInvalidError):
            return {}
        if isinstance(recorded, Mapping) and job.status.get("observedGeneration") == job.generation and not _reports_change(job.status):
            return dict(recorded)
        return frozen.hashes(checked.job.spec)

    def _check(self, job: JobView) -> CheckedJob | SpecInvalidError:
        """Check the spec; cached, because the result is the same for a generation, before the start and after it."""
        known, started = self._checked.get(job.key), bool(job.status.get("attempt"))
        if known is None or (known.uid, known.generation) != (job.uid, job.generation) or known.started not in (None, started):
            found = _check(job)
            is_flawless = isinstance(found, CheckedJob) and not found.tolerated
            counts = None if is_flawless else started
            known = self._checked[job.key] = _Checked(uid=job.uid, generation=job.generation, started=counts, found=found)
            if len(self._checked) > NUM_CHECKED_SPECS:
                self._checked.popitem(last=False)
        self._checked.move_to_end(job.key)
        return known.found

    # --- apply ---------------------------------------------------------------------------------------------------------------------

    async def _apply(self, observed: Observed, decision: Decision, now: datetime) -> tuple[Observed, Decision]:
        """Carry out a decision. Returns the updated observation and the decision based on it, which has no further actions."""
        key = observed.job.key
        for name, suspend in decision.set_suspend.items():
            await self._suspend(key, name, suspend)
        for name in decision.delete_children:
            uid = self._cache.uid(Kind.RAYJOB, key, name)
            if uid is not None and await self._delete(Kind.RAYJOB, key, name, uid):
                # The cache knows already: the event of the deletion will change nothing there, and wake nobody.
                decision = replace(decision, next_check=now)
        if decision.create_attempt is None:
            return observed, decision
        if isinstance(observed.checked, SpecInvalidError):
            raise TypeError(f"decided to create attempt {decision.create_attempt} of {key}, whose spec is invalid")
        obstacle = await self._create_attempt(observed.job, observed.checked, decision.create_attempt)
        if obstacle is None:
            return observed, decision
        updated = replace(
            observed, taken_name=obstacle.taken_name, is_taken_one_leaving=obstacle.is_taken_one_leaving, rejected=obstacle.rejected
        )
        return updated, decide(updated, now)

    async def _create_attempt(self, job: JobView, checked: CheckedJob, attempt: int) -> _Obstacle | None:
        """Create the children of an attempt; returns what prevents it.

        The Role comes before its binding, which refers to it, and the RayJob last, because it uses all others. Children that an earlier
        try created before it failed or was cancelled are not requested again: that would use up the budget that the rest needs.
        """
        created = self._created.setdefault((job.uid, attempt), set())
        self._created.move_to_end((job.uid, attempt))
        if len(self._created) > NUM_UNFINISHED:
            self._created.popitem(last=False)
        objects = [o for o in desired.attempt_objects(job, checked, attempt, self._settings) if _identity(o) not in created]
        stages = (
            [o for o in objects if o["kind"] not in _LATER_KINDS],
            *([o for o in objects if o["kind"] == kind] for kind in _LATER_KINDS),
        )
        for stage in stages:
            outcomes = await asyncio.gather(*(self._ensure_once(job, manifest, created) for manifest in stage), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is not None:
                    self._created.pop((job.uid, attempt), None)  # the next try may be much later, and looks at every child again
                    return outcome
        self._created.pop((job.uid, attempt), None)
        return None

    async def _ensure_once(self, job: JobView, manifest: Manifest, created: set[tuple[str, str]]) -> _Obstacle | None:
        """:meth:`_ensure`, with the child added to ``created`` at once when it exists, so that neither an error nor a timeout loses it.

        Except for the RayJob: its creation completes the attempt, which must not rest on memory.
        """
        obstacle = await self._ensure(job, manifest)
        if obstacle is None and manifest["kind"] != Kind.RAYJOB:
            created.add(_identity(manifest))
        return obstacle

    async def _ensure(self, job: JobView, manifest: Manifest) -> _Obstacle | None:
        """Create one child unless it exists; returns what prevents it."""
        kind, name = Kind(manifest["kind"]), manifest["metadata"]["name"]
        try:
            stored = await self._client.create(manifest)
        except (RejectedError, NotFoundError) as error:
            return _Obstacle(rejected=f"{kind} {name}: {error.message}")
        except AlreadyExistsError:
            try:
                stored = await self._client.get(kind, job.key.namespace, name)
                if not _is_owned(stored, job.uid):
                    return _Obstacle(taken_name=f"{kind} {name}", is_taken_one_leaving="deletionTimestamp" in stored["metadata"])
                if kind is not Kind.RAYJOB and not _covers(stored, manifest):  # a RayJob is made once per attempt and never updated
                    # Created for an earlier attempt, by an earlier version of the operator, or modified externally.
                    repair = {**manifest, "metadata": {**manifest["metadata"], "uid": stored["metadata"]["uid"]}}
                    stored = await self._client.patch_merge(kind, job.key.namespace, name, repair)
            except RejectedError as error:
                return _Obstacle(rejected=f"{kind} {name} exists and cannot be brought up to date: {error.message}")
        if kind is Kind.RAYJOB:
            self._cache.put(kind, stored, Source.OTHER)
        return None

    async def _suspend(self, key: Key, name: str, suspend: bool) -> None:
        uid = self._cache.uid(Kind.RAYJOB, key, name)
        if uid is None:
            return  # deleted since it was observed; the deletion triggers a reconcile
        patch = {"metadata": {"uid": uid}, "spec": {"suspend": suspend}}
        try:
            self._cache.put(Kind.RAYJOB, await self._client.patch_merge(Kind.RAYJOB, key.namespace, name, patch), Source.OTHER)
        except NotFoundError:
            self._cache.forget(Kind.RAYJOB, key.namespace, name)
            raise
        except ConflictError:
            await self._refresh(Kind.RAYJOB, key, name)
            raise

    async def _delete(self, kind: Kind, key: Key, name: str, uid: str) -> bool:
        """Delete the object with this UID. Returns whether it is gone now: no finalizer keeps it, or it was gone before."""
        try:
            terminating = await self._client.delete(kind, key.namespace, name, uid)
        except NotFoundError:
            terminating = None
        except ConflictError:
            await self._refresh(kind, key, name)
            raise
        if terminating is None:
            self._cache.forget(kind, key.namespace, name)
        else:
            self._cache.put(kind, terminating, Source.OTHER)
        return terminating is None

    # --- status and events ---------------------------------------------------------------------------------------------------------

    async def _write_status(self, job: JobView, observed: Observed, decision: Decision, now: datetime) -> None:
        """Write the status if it changed, and only then emit events."""
        new = self._storable(status.render(observed, decision, now))
        if not status.changed(job.status, new):
            return
        # Its version is a precondition: a status derived from an older one, here or by an operator that has lost its lease, is void.
        metadata = {"name": job.key.name, "namespace": job.key.namespace, "uid": job.uid, "resourceVersion": job.version}
        try:
            stored = await self._client.apply_status({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": dict(new)})
        except NotFoundError:
            self._cache.forget(Kind.RLJOB, job.key.namespace, job.key.name)
            return  # deleted in the meantime; nothing to report
        except ConflictError:
            await self._refresh(Kind.RLJOB, job.key, job.key.name)
            raise
        self._cache.put(Kind.RLJOB, stored, Source.OTHER)
        failed = decision.conditions[ConditionType.FAILED]
        if failed.status is ConditionStatus.TRUE and not _is_finished(job.status):
            self._metrics.jobs_failed.labels(str(failed.reason)).inc()
        for event in events.events(job.status, new):
            await self._emit(job, event, now)

    async def _emit(self, job: JobView, event: Event, now: datetime) -> None:
        """Write one event; a failure is only counted, because the status holds the same information."""
        try:
            await self._client.create(_event_manifest(job, event, now, next(self._event_names)))
        except KubeError as error:
            self._metrics.events_lost.labels(type(error).__name__).inc()
            logger.warning("%s/%s: could not write event %s: %s", job.key.namespace, job.key.name, event.reason, error)


def _check(job: JobView) -> CheckedJob | SpecInvalidError:
    """Check the spec of a job; one that started with it keeps it, also where this version refuses it (see docs/design/0012)."""
    metadata = {"name": job.key.name, "namespace": job.key.namespace}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": job.spec}
    try:
        return validation.check(manifest)
    except SpecInvalidError as error:
        invalid = error.with_traceback(None)  # a traceback would keep its frames alive
    recorded = job.status.get("specHashes")
    if not job.status.get("attempt") or not isinstance(recorded, Mapping):
        return invalid
    try:
        checked = validation.check(manifest, started=True)
    except SpecInvalidError as error:
        return error.with_traceback(None)
    return invalid if frozen.changed(recorded, frozen.hashes(checked.job.spec)) else checked


def _with_error(observed: Observed, decision: Decision, error: RejectedError | UnavailableError) -> Observed | None:
    """The observation with the refused write; None if it is not reported: the server only asks to wait, or cannot be reached at all."""
    if isinstance(error, UnavailableError) and error.status < SERVER_ERROR and not isinstance(error, UnansweredError):
        return None
    if decision.create_attempt is not None:
        return replace(observed, unavailable=str(error))
    return replace(observed, refused=str(error))


def _is_finished(current: Mapping[str, Any]) -> bool:
    return any(
        entry["type"] == ConditionType.SUCCEEDED and entry["status"] != ConditionStatus.UNKNOWN for entry in current.get("conditions") or ()
    )


def _reports_change(current: Mapping[str, Any]) -> bool:
    return any(entry.get("reason") == Reason.SPEC_CHANGED for entry in current.get("conditions") or ())


def _is_owned(stored: Manifest, uid: str) -> bool:
    """Whether the object's controller is the RLJob with this UID."""
    return any(owner.get("controller") and owner["uid"] == uid for owner in stored["metadata"].get("ownerReferences") or ())


def _identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _covers(stored: Any, wanted: Any) -> bool:
    """Whether the stored object has every wanted value; values that the server added do not count."""
    if isinstance(wanted, dict):
        return isinstance(stored, dict) and all(name in stored and _covers(stored[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(stored, list) and len(stored) == len(wanted) and all(map(_covers, stored, wanted))
    return bool(stored == wanted)


def _event_manifest(job: JobView, event: Event, now: datetime, number: int) -> Manifest:
    """Manifest of an event about an RLJob, as ``kubectl describe`` shows it."""
    time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": Kind.EVENT.api_version,
        "kind": str(Kind.EVENT),
        "metadata": {"name": f"{job.key.name}.{int(now.timestamp() * 1e6):x}-{number:x}", "namespace": job.key.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": job.key.namespace,
            "name": job.key.name,
            "uid": job.uid,
        },
        "type": "Warning" if event.is_warning else "Normal",
        "reason": event.reason,
        "message": shorten(event.message, MAX_EVENT_MESSAGE),
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": os.environ.get("HOSTNAME", FIELD_MANAGER),
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
