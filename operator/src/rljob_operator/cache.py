"""In-memory state of the watched kinds, grouped by RLJob; fed by watches, lists and the answers to own writes. No I/O.

::

    watch event, page of a list, answer to an own write --put--> newer resourceVersion wins --> views by job --> observe()

An RLJob is kept as compressed JSON and decoded on access (a quickstart takes less than 2 kB); of its children only what decisions need
is kept. The cost of an operation does not depend on the number of jobs, except for a sweep after a full list.

Read-your-writes: the answer to an own write is stored at once, and an older event that arrives later has no effect. The version of a
deleted object is remembered for a while, so that a late answer to an own write cannot resurrect it.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from pydantic_core import from_json, to_json

from rljob_api.naming import JOB_LABEL
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator import views
from rljob_operator.model import ChildView, ClusterView, JobView, Key, Manifest, PodView
from rljob_operator.protocol import WATCHED, Kind

NUM_TOMBSTONES: Final = 20_000
"""Maximum number of deleted objects whose version is remembered."""

View = ChildView | ClusterView | PodView
ObjectKey = tuple[Kind, str, str]
"""Kind, namespace, name."""


class Source(Enum):
    """Where an object came from."""

    WATCH = auto()
    """A watch."""
    LIST = auto()
    """A list that a watch has just begun before: what is older than the watch, it will not deliver."""
    OTHER = auto()
    """A periodic list, a read, or the answer to an own write; the watch has yet to deliver it."""


@dataclass(slots=True)
class _Job:
    version: int
    packed: bytes
    reason: str
    is_new: bool
    """Without a status."""


@dataclass(slots=True)
class _Child:
    version: int
    uid: str
    view: View


@dataclass(slots=True)
class _JobEntry:
    """One RLJob and its RayJobs, and the RayClusters and pods that carry its label."""

    job: _Job | None = None
    children: dict[tuple[Kind, str], _Child] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.job is None and not self.children


class Cache:
    """Views of the watched kinds."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Start empty; ``clock_s`` measures how far a watch lags."""
        self._clock_s = clock_s
        self._entries: dict[Key, _JobEntry] = {}
        self._owners: dict[ObjectKey, Key] = {}
        self._tombstones: OrderedDict[ObjectKey, int] = OrderedDict()
        self._undelivered: dict[Kind, dict[ObjectKey, tuple[int, float]]] = {kind: {} for kind in WATCHED}
        self._reasons: Counter[str] = Counter()

    # --- reads ------------------------------------------------------------------------------------------------------------------------

    def job(self, key: Key) -> JobView | None:
        """The RLJob, or None if it is not known."""
        entry = self._entries.get(key)
        return None if entry is None or entry.job is None else views.job_view(_unpack(entry.job.packed))

    def children(self, key: Key) -> tuple[ChildView, ...]:
        """RayJobs that the job controls, or that carry its label and have no RLJob as controller, by attempt."""
        return tuple(sorted((view for view in self._views(key) if isinstance(view, ChildView)), key=lambda view: (view.attempt, view.name)))

    def clusters(self, key: Key) -> tuple[ClusterView, ...]:
        """RayClusters that carry the job's label, by name."""
        return tuple(sorted((view for view in self._views(key) if isinstance(view, ClusterView)), key=lambda view: view.name))

    def pods(self, key: Key) -> tuple[PodView, ...]:
        """Pods that carry the job's label, by name."""
        return tuple(sorted((view for view in self._views(key) if isinstance(view, PodView)), key=lambda view: view.name))

    def uid(self, kind: Kind, key: Key, name: str) -> str | None:
        """UID of an object of the job."""
        entry = self._entries.get(key)
        child = None if entry is None else entry.children.get((kind, name))
        return None if child is None else child.uid

    def is_new(self, key: Key) -> bool:
        """Whether the RLJob is known and nobody has written its status: nothing of it is older, but for what a dead operator left."""
        entry = self._entries.get(key)
        return entry is not None and entry.job is not None and entry.job.is_new

    def keys(self) -> list[Key]:
        """All RLJobs."""
        return [key for key, entry in self._entries.items() if entry.job is not None]

    def num_jobs_by_reason(self) -> Mapping[str, int]:
        """Number of RLJobs by the reason of condition Succeeded; safe to call from another thread."""
        return {reason: count for reason, count in dict(self._reasons).items() if count}

    def watch_ages_s(self) -> Mapping[str, float]:
        """Age in seconds of the oldest change that a watch has not delivered yet, by kind; safe to call from another thread."""
        now = self._clock_s()
        return {
            str(kind): max((now - since for _, since in dict(pending).values()), default=0.0) for kind, pending in self._undelivered.items()
        }

    # --- updates --------------------------------------------------------------------------------------------------------------------

    def put(self, kind: Kind, obj: Manifest, source: Source) -> Key | None:
        """Store an object. Returns the job to reconcile, or None if nothing relevant changed."""
        metadata = obj["metadata"]
        where = (kind, sys.intern(metadata["namespace"]), metadata["name"])
        version = int(metadata["resourceVersion"])
        key = self._key(kind, metadata)
        if key is None:
            # The label was removed: a watch that selects by it reports a deletion and nothing later; a list does not contain the object.
            self._undelivered[kind].pop(where, None)
            return self._drop(where)
        self._track_delivery(where, version, source)
        if version <= self._tombstones.get(where, -1):
            return None
        self._tombstones.pop(where, None)
        if kind is Kind.RLJOB:
            return key if self._put_job(key, version, obj) else None
        return key if self._put_child(where, key, version, obj) else None

    def remove(self, kind: Kind, obj: Manifest) -> Key | None:
        """Handle a deletion seen by a watch. Returns the job to reconcile, or None if nothing relevant changed."""
        metadata = obj["metadata"]
        where = (kind, metadata["namespace"], metadata["name"])
        version = int(metadata["resourceVersion"])
        self._track_delivery(where, version, Source.WATCH)
        current = self._version(where)
        if current is not None and current > version:
            return None  # deleted and created again; the new object is known already
        self._add_tombstone(where, version)
        return self._drop(where)

    def forget(self, kind: Kind, namespace: str, name: str) -> Key | None:
        """Drop an object that the API server does not have. Returns the job to reconcile, or None if the object was unknown."""
        where = (kind, namespace, name)
        current = self._version(where)
        if current is None:
            return None
        self._add_tombstone(where, current)
        self._undelivered[kind].pop(where, None)
        return self._drop(where)

    def versions(self, kind: Kind, namespaces: tuple[str, ...] = ()) -> dict[ObjectKey, int]:
        """The resourceVersion of every known object of a kind."""
        if kind is Kind.RLJOB:
            found: dict[ObjectKey, int] = {
                (kind, key.namespace, key.name): entry.job.version for key, entry in self._entries.items() if entry.job is not None
            }
        else:
            found = {where: self._entries[key].children[kind, where[2]].version for where, key in self._owners.items() if where[0] is kind}
        return {where: version for where, version in found.items() if not namespaces or where[1] in namespaces}

    def sweep(self, kind: Kind, present: set[ObjectKey], version: int, namespaces: tuple[str, ...] = ()) -> list[Key]:
        """After a full list as of ``version``, drop objects that are neither in it nor newer. Returns the jobs to reconcile."""
        keys = []
        for where, known in self.versions(kind, namespaces).items():
            if where not in present and known <= version:
                self._add_tombstone(where, version)
                self._undelivered[kind].pop(where, None)
                key = self._drop(where)
                keys += [] if key is None else [key]
        return keys

    # --- internal -------------------------------------------------------------------------------------------------------------------

    def _views(self, key: Key) -> list[View]:
        entry = self._entries.get(key)
        return [] if entry is None else [child.view for child in entry.children.values()]

    def _key(self, kind: Kind, metadata: Mapping[str, Any]) -> Key | None:
        if kind is Kind.RLJOB:
            return Key(namespace=sys.intern(metadata["namespace"]), name=metadata["name"])
        job = (metadata.get("labels") or {}).get(JOB_LABEL)
        if job is None:
            return None
        # A RayJob's owner is not editable by mistake as its label is; pods and RayClusters have KubeRay's objects as owners.
        owners = [o["name"] for o in metadata.get("ownerReferences") or () if o.get("controller") and o.get("kind") == Kind.RLJOB]
        if kind is Kind.RAYJOB and owners:
            job = owners[0]
        return Key(namespace=sys.intern(metadata["namespace"]), name=sys.intern(job))

    def _version(self, where: ObjectKey) -> int | None:
        kind, namespace, name = where
        if kind is Kind.RLJOB:
            entry = self._entries.get(Key(namespace=namespace, name=name))
            return None if entry is None or entry.job is None else entry.job.version
        key = self._owners.get(where)
        return None if key is None else self._entries[key].children[kind, name].version

    def _put_job(self, key: Key, version: int, obj: Manifest) -> bool:
        entry = self._entries.setdefault(key, _JobEntry())
        if entry.job is not None and entry.job.version >= version:
            return False
        if entry.job is not None:
            self._reasons[entry.job.reason] -= 1
        reason = _succeeded_reason(obj)
        entry.job = _Job(version=version, packed=_pack(obj), reason=reason, is_new=not obj.get("status"))
        self._reasons[reason] += 1
        return True

    def _put_child(self, where: ObjectKey, key: Key, version: int, obj: Manifest) -> bool:
        kind, _, name = where
        current = self._version(where)
        if current is not None and current >= version:
            return False
        view = _view(kind, obj)
        former = self._owners.get(where)
        if former is not None and former != key:
            self._drop(where)
        children = self._entries.setdefault(key, _JobEntry()).children
        known = children.get((kind, name))
        children[kind, name] = _Child(version=version, uid=obj["metadata"]["uid"], view=view)
        self._owners[where] = key
        return known is None or known.view != view or known.uid != obj["metadata"]["uid"]

    def _drop(self, where: ObjectKey) -> Key | None:
        kind, namespace, name = where
        if kind is Kind.RLJOB:
            key = Key(namespace=namespace, name=name)
            entry = self._entries.get(key)
            if entry is None or entry.job is None:
                return None
            self._reasons[entry.job.reason] -= 1
            entry.job = None
        else:
            owner = self._owners.pop(where, None)
            if owner is None:
                return None
            key = owner
            entry = self._entries[key]
            del entry.children[kind, name]
        if entry.is_empty:
            del self._entries[key]
        return key

    def _add_tombstone(self, where: ObjectKey, version: int) -> None:
        self._tombstones[where] = max(version, self._tombstones.get(where, 0))
        self._tombstones.move_to_end(where)
        if len(self._tombstones) > NUM_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _track_delivery(self, where: ObjectKey, version: int, source: Source) -> None:
        """Keep track of versions that the watch has not delivered yet."""
        pending = self._undelivered[where[0]]
        if source is not Source.OTHER:
            if where in pending and pending[where][0] <= version:
                del pending[where]
            return
        current = self._version(where)
        if (current is None or current < version) and self._tombstones.get(where, -1) < version:
            pending[where] = (version, pending[where][1] if where in pending else self._clock_s())


def _view(kind: Kind, obj: Manifest) -> View:
    if kind is Kind.RAYJOB:
        return views.child_view(obj)
    return views.cluster_view(obj) if kind is Kind.RAYCLUSTER else views.pod_view(obj)


def _pack(obj: Manifest) -> bytes:
    """The object without the parts that no decision needs."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in ("managedFields", "annotations")}
    return zlib.compress(to_json({**obj, "metadata": metadata}), 1)


def _unpack(packed: bytes) -> Manifest:
    obj: Manifest = from_json(zlib.decompress(packed))
    return obj


def _succeeded_reason(obj: Manifest) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((str(entry["reason"]) for entry in conditions if entry["type"] == ConditionType.SUCCEEDED), str(Reason.PENDING))
