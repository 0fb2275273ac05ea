"""What the watches, the lists and the operator's own writes told, by job. No I/O.

::

    watch event, page of a list, answer to an own write --put--> newer resourceVersion wins --> views by job --> observe()

An RLJob is kept as compressed JSON and decoded when it is looked at (a quickstart costs less than 2 kB so); of its children only
what decisions need. Every operation costs the same however many jobs there are, a sweep after a full list aside.

Read-your-writes: the answer to every own write is put in at once, and an older event that arrives later changes nothing. An object that
is gone stays remembered by its version for a while, so that the late answer to an own write cannot bring it back.
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
"""Deleted objects that are remembered by their version."""

View = ChildView | ClusterView | PodView
ObjectKey = tuple[Kind, str, str]
"""Kind, namespace, name."""


class Source(Enum):
    """Who tells."""

    WATCH = auto()
    """A watch."""
    OTHER = auto()
    """A list, a read, or the answer to an own write: the watch still owes it."""


@dataclass(slots=True)
class _Job:
    version: int
    packed: bytes
    reason: str


@dataclass(slots=True)
class _Child:
    version: int
    uid: str
    view: View


@dataclass(slots=True)
class _Family:
    """One RLJob and what carries its label."""

    job: _Job | None = None
    members: dict[tuple[Kind, str], _Child] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.job is None and not self.members


class Cache:
    """Views of the watched kinds."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Empty; ``clock_s`` measures how long a watch owes something."""
        self._clock_s = clock_s
        self._families: dict[Key, _Family] = {}
        self._owners: dict[ObjectKey, Key] = {}
        self._gone: OrderedDict[ObjectKey, int] = OrderedDict()
        self._owed: dict[Kind, dict[ObjectKey, tuple[int, float]]] = {kind: {} for kind in WATCHED}
        self._reasons: Counter[str] = Counter()

    # --- what is known -------------------------------------------------------------------------------------------------------------

    def job(self, key: Key) -> JobView | None:
        """The RLJob, or None."""
        family = self._families.get(key)
        return None if family is None or family.job is None else views.job_view(_unpack(family.job.packed))

    def children(self, key: Key) -> tuple[ChildView, ...]:
        """RayJobs that carry the job's label, whoever owns them, by attempt."""
        return tuple(sorted((view for view in self._views(key) if isinstance(view, ChildView)), key=lambda view: (view.attempt, view.name)))

    def clusters(self, key: Key) -> tuple[ClusterView, ...]:
        """RayClusters that carry the job's label, by name."""
        return tuple(sorted((view for view in self._views(key) if isinstance(view, ClusterView)), key=lambda view: view.name))

    def pods(self, key: Key) -> tuple[PodView, ...]:
        """Pods that carry the job's label, by name."""
        return tuple(sorted((view for view in self._views(key) if isinstance(view, PodView)), key=lambda view: view.name))

    def uid(self, kind: Kind, key: Key, name: str) -> str | None:
        """UID of an object of a job, other than the RLJob itself."""
        family = self._families.get(key)
        child = None if family is None else family.members.get((kind, name))
        return None if child is None else child.uid

    def keys(self) -> list[Key]:
        """All RLJobs."""
        return [key for key, family in self._families.items() if family.job is not None]

    def num_jobs_by_reason(self) -> Mapping[str, int]:
        """RLJobs by the reason of their condition Succeeded; may be called from another thread."""
        return {reason: count for reason, count in dict(self._reasons).items() if count}

    def watch_ages_s(self) -> Mapping[str, float]:
        """For how many seconds each watch has owed something that is known otherwise; may be called from another thread."""
        now = self._clock_s()
        return {str(kind): max((now - since for _, since in dict(owed).values()), default=0.0) for kind, owed in self._owed.items()}

    # --- what is told --------------------------------------------------------------------------------------------------------------

    def put(self, kind: Kind, obj: Manifest, source: Source) -> Key | None:
        """Take in an object. The job to look at because of it, or None when that told nothing new."""
        metadata = obj["metadata"]
        where = (kind, sys.intern(metadata["namespace"]), metadata["name"])
        version = int(metadata["resourceVersion"])
        self._note_owed(where, version, source)
        key = self._key(kind, metadata)
        if key is None:
            # The label was taken away, which a watch that selects by it tells as a deletion; a list does not name it at all.
            return self._drop(where)
        if version <= self._gone.get(where, -1):
            return None
        self._gone.pop(where, None)
        if kind is Kind.RLJOB:
            return key if self._put_job(key, version, obj) else None
        return key if self._put_child(where, key, version, obj) else None

    def remove(self, kind: Kind, obj: Manifest) -> Key | None:
        """A watch says that an object is deleted. The job to look at, or None when that told nothing new."""
        metadata = obj["metadata"]
        where = (kind, metadata["namespace"], metadata["name"])
        version = int(metadata["resourceVersion"])
        self._note_owed(where, version, Source.WATCH)
        current = self._version(where)
        if current is not None and current > version:
            return None  # deleted and made anew; the new one is known already
        self._bury(where, version)
        return self._drop(where)

    def forget(self, kind: Kind, namespace: str, name: str) -> Key | None:
        """The API server says that an object that is known here is not there. The job to look at, or None."""
        where = (kind, namespace, name)
        current = self._version(where)
        if current is None:
            return None
        self._bury(where, current)
        self._owed[kind].pop(where, None)
        return self._drop(where)

    def versions(self, kind: Kind, namespaces: tuple[str, ...] = ()) -> dict[ObjectKey, int]:
        """resourceVersion of every known object of a kind."""
        if kind is Kind.RLJOB:
            found: dict[ObjectKey, int] = {
                (kind, key.namespace, key.name): family.job.version for key, family in self._families.items() if family.job is not None
            }
        else:
            found = {where: self._families[key].members[kind, where[2]].version for where, key in self._owners.items() if where[0] is kind}
        return {where: version for where, version in found.items() if not namespaces or where[1] in namespaces}

    def sweep(self, kind: Kind, present: set[ObjectKey], version: int, namespaces: tuple[str, ...] = ()) -> list[Key]:
        """After a full list as of ``version``: forget what is not in it and not newer. The jobs to look at."""
        keys = []
        for where, known in self.versions(kind, namespaces).items():
            if where not in present and known <= version:
                self._bury(where, version)
                self._owed[kind].pop(where, None)
                key = self._drop(where)
                keys += [] if key is None else [key]
        return keys

    # --- inside --------------------------------------------------------------------------------------------------------------------

    def _views(self, key: Key) -> list[View]:
        family = self._families.get(key)
        return [] if family is None else [child.view for child in family.members.values()]

    def _key(self, kind: Kind, metadata: Mapping[str, Any]) -> Key | None:
        if kind is Kind.RLJOB:
            return Key(namespace=sys.intern(metadata["namespace"]), name=metadata["name"])
        job = (metadata.get("labels") or {}).get(JOB_LABEL)
        if job is None:
            return None
        return Key(namespace=sys.intern(metadata["namespace"]), name=sys.intern(job))

    def _version(self, where: ObjectKey) -> int | None:
        kind, namespace, name = where
        if kind is Kind.RLJOB:
            family = self._families.get(Key(namespace=namespace, name=name))
            return None if family is None or family.job is None else family.job.version
        key = self._owners.get(where)
        return None if key is None else self._families[key].members[kind, name].version

    def _put_job(self, key: Key, version: int, obj: Manifest) -> bool:
        family = self._families.setdefault(key, _Family())
        if family.job is not None and family.job.version >= version:
            return False
        if family.job is not None:
            self._reasons[family.job.reason] -= 1
        reason = _succeeded_reason(obj)
        family.job = _Job(version=version, packed=_pack(obj), reason=reason)
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
        members = self._families.setdefault(key, _Family()).members
        known = members.get((kind, name))
        members[kind, name] = _Child(version=version, uid=obj["metadata"]["uid"], view=view)
        self._owners[where] = key
        return known is None or known.view != view or known.uid != obj["metadata"]["uid"]

    def _drop(self, where: ObjectKey) -> Key | None:
        kind, namespace, name = where
        if kind is Kind.RLJOB:
            key = Key(namespace=namespace, name=name)
            family = self._families.get(key)
            if family is None or family.job is None:
                return None
            self._reasons[family.job.reason] -= 1
            family.job = None
        else:
            owner = self._owners.pop(where, None)
            if owner is None:
                return None
            key = owner
            family = self._families[key]
            del family.members[kind, name]
        if family.is_empty:
            del self._families[key]
        return key

    def _bury(self, where: ObjectKey, version: int) -> None:
        self._gone[where] = max(version, self._gone.get(where, 0))
        self._gone.move_to_end(where)
        if len(self._gone) > NUM_TOMBSTONES:
            self._gone.popitem(last=False)

    def _note_owed(self, where: ObjectKey, version: int, source: Source) -> None:
        """Keep account of what the watch has still to tell."""
        owed = self._owed[where[0]]
        if source is Source.WATCH:
            if where in owed and owed[where][0] <= version:
                del owed[where]
            return
        current = self._version(where)
        if (current is None or current < version) and self._gone.get(where, -1) < version:
            owed[where] = (version, owed[where][1] if where in owed else self._clock_s())


def _view(kind: Kind, obj: Manifest) -> View:
    if kind is Kind.RAYJOB:
        return views.child_view(obj)
    return views.cluster_view(obj) if kind is Kind.RAYCLUSTER else views.pod_view(obj)


def _pack(obj: Manifest) -> bytes:
    """The object without what no decision needs."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in ("managedFields", "annotations")}
    return zlib.compress(to_json({**obj, "metadata": metadata}), 1)


def _unpack(packed: bytes) -> Manifest:
    obj: Manifest = from_json(zlib.decompress(packed))
    return obj


def _succeeded_reason(obj: Manifest) -> str:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((str(entry["reason"]) for entry in conditions if entry["type"] == ConditionType.SUCCEEDED), str(Reason.PENDING))
