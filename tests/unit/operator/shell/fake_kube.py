"""An in-memory API server, strict where the operator relies on the real one.

resourceVersions, AlreadyExists, uid preconditions, generation, status as a resource of its own, server-side apply with ownership of fields,
finalizers, garbage collection by owner references, pages, watches by label.

Faults: lose an event, omit an object from a list, reject a request, die after a write.
"""

import copy
import itertools
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from rljob_api.crd.schema import job_schema
from rljob_api.naming import JOB_LABEL
from rljob_operator.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError, RejectedError
from rljob_operator.model import Manifest
from rljob_operator.protocol import FIELD_MANAGER, WATCHED, Kind

Where = tuple[Kind, str, str]
WITH_STATUS = (Kind.RLJOB, Kind.RAYJOB, Kind.RAYCLUSTER, Kind.POD)
LIST_KEYS = {"conditions": "type", "nodeGroups": "name"}


class Died(BaseException):
    """Raised when the operator process dies."""


class FakeKube:
    """Implements KubeClient; tests act as other clients through the methods without ``async``."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self.objects: dict[Where, Manifest] = {}
        self.events: list[tuple[str, Kind, Manifest]] = []
        """What the watches have yet to deliver."""
        self.writes: list[str] = []
        self.reads: list[str] = []
        self.fault: Callable[[str, Kind, str], KubeError | None] = lambda verb, kind, name: None
        self.lose: Callable[[str, Kind, Manifest], bool] = lambda type_, kind, obj: False
        self.is_listed: Callable[[Kind, str], bool] = lambda kind, name: True
        self.spec_schema: Manifest = job_schema()["properties"]["spec"]
        self.status_schema: Manifest = job_schema()["properties"]["status"]
        self.schema_number = 1
        self.die_after_write: int | None = None
        self.page_size = 2
        self._clock = clock
        self._versions = itertools.count(100)
        self._uids = itertools.count(1)
        self._owned: dict[Where, dict[str, set[tuple[Any, ...]]]] = {}

    # --- KubeClient ----------------------------------------------------------------------------------------------------------------

    async def create(self, manifest: Manifest) -> Manifest:
        kind, metadata = Kind(manifest["kind"]), manifest["metadata"]
        self._before("create", kind, metadata["name"])
        stored = self.add(manifest)
        self._after_write(f"create {kind} {metadata['name']}")
        return stored

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        self._before("get", kind, name)
        self.reads.append(f"get {kind} {name}")
        return copy.deepcopy(self._find(kind, namespace, name))

    async def pages(
        self, kind: Kind, namespace: str | None, label_selector: str = "", *, field_selector: str = ""
    ) -> AsyncIterator[Manifest]:
        self._before("list", kind, "")
        found = [
            obj
            for (k, ns, name), obj in sorted(self.objects.items())
            if k is kind
            and namespace in (None, ns)
            and self.is_listed(kind, name)
            and (not label_selector or _has_label(obj, label_selector))
            and (not field_selector or _has_fields(obj, field_selector))
        ]
        metadata = {"resourceVersion": str(next(self._versions))}
        found = copy.deepcopy(found)  # one snapshot for all pages
        for start in range(0, max(1, len(found)), self.page_size):
            yield {"metadata": metadata, "items": found[start : start + self.page_size]}

    async def patch_merge(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        self._before("patch", kind, name)
        obj = self._find(kind, namespace, name)
        self._precondition(obj, patch.get("metadata", {}))
        body = {key: value for key, value in patch.items() if not (key == "status" and kind in WITH_STATUS)}
        stored = self._store(kind, _merge(obj, body))
        self._after_write(f"patch {kind} {name}")
        return stored

    async def apply_status(self, manifest: Manifest) -> Manifest:
        kind, metadata = Kind(manifest["kind"]), manifest["metadata"]
        self._before("apply_status", kind, metadata["name"])
        assert kind is Kind.RLJOB
        stored = self.apply_status_as(FIELD_MANAGER, manifest)
        self._after_write(f"apply_status {kind} {metadata['name']}")
        return stored

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        self._before("delete", kind, name)
        self._precondition(self._find(kind, namespace, name), {"uid": uid})
        held = self.remove(kind, namespace, name)
        self._after_write(f"delete {kind} {name}")
        return held

    async def schema_version(self) -> str:
        self._before("schema_version", Kind.RLJOB, "")
        return str(self.schema_number)

    async def schema(self, version: str) -> Manifest:
        self._before("schema", Kind.RLJOB, version)
        assert version == str(self.schema_number)
        return copy.deepcopy({"spec": self.spec_schema, "status": self.status_schema})

    async def close(self) -> None:
        pass

    # --- everybody else ------------------------------------------------------------------------------------------------------------

    def add(self, manifest: Manifest) -> Manifest:
        """Create an object."""
        obj = json.loads(json.dumps(manifest))  # plain JSON or an error
        kind, metadata = Kind(obj["kind"]), obj["metadata"]
        where = (kind, metadata["namespace"], metadata["name"])
        assert obj["apiVersion"] == kind.api_version
        if where in self.objects:
            raise AlreadyExistsError(f"create {kind} {metadata['name']}", 409, f'{kind.plural} "{metadata["name"]}" already exists')
        metadata |= {"uid": f"uid-{next(self._uids)}", "generation": 1, "creationTimestamp": _text(self._clock())}
        if kind in (Kind.RLJOB, Kind.RAYJOB):
            obj.pop("status", None)
        self._owned[where] = {}
        return self._store(kind, obj, event="ADDED")

    def set_status(self, kind: Kind, namespace: str, name: str, **fields: Any) -> Manifest:
        """Merge fields into the status, as KubeRay or the kubelet does."""
        return self._store(kind, _merge(self._find(kind, namespace, name), {"status": fields}))

    def edit(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        """Merge a patch as a user does."""
        return self._store(kind, _merge(self._find(kind, namespace, name), patch))

    def remove(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """Delete; None when it is gone, else what a finalizer holds."""
        obj = copy.deepcopy(self._find(kind, namespace, name))
        if obj["metadata"].get("finalizers"):
            obj["metadata"].setdefault("deletionTimestamp", _text(self._clock()))
            return self._store(kind, obj)
        self._vanish((kind, namespace, name))
        return None

    def finish_deletions(self) -> None:
        """Take away all finalizers of what is being deleted."""
        for where, obj in list(self.objects.items()):
            if obj["metadata"].get("deletionTimestamp") and where in self.objects:
                self._vanish(where)

    def apply_status_as(self, manager: str, manifest: Manifest) -> Manifest:
        """Server-side apply of a status, with force."""
        kind, metadata = Kind(manifest["kind"]), manifest["metadata"]
        obj = self._find(kind, metadata["namespace"], metadata["name"])
        self._precondition(obj, metadata)
        if extra := set(manifest) - {"apiVersion", "kind", "metadata", "status"}:
            raise RejectedError("apply_status", 422, f"status alone can be written here, not {extra}")
        owned = self._owned[kind, metadata["namespace"], metadata["name"]]
        flat, wanted = dict(_flatten(obj.get("status", {}))), dict(_flatten(json.loads(json.dumps(manifest["status"]))))
        others = set().union(*(paths for name, paths in owned.items() if name != manager))
        for path in owned.get(manager, set()) - set(wanted) - others:
            flat.pop(path, None)
        for paths in owned.values():
            paths -= {path for path in wanted if flat.get(path) != wanted[path]}
        owned[manager] = set(wanted)
        return self._store(kind, {**obj, "status": _unflatten({**flat, **wanted})})

    def names(self, kind: Kind) -> list[str]:
        """Names of all objects of a kind."""
        return sorted(name for k, _, name in self.objects if k is kind)

    def one(self, kind: Kind, name: str, namespace: str = "team") -> Manifest:
        """An object as it is stored."""
        return copy.deepcopy(self._find(kind, namespace, name))

    # --- inside --------------------------------------------------------------------------------------------------------------------

    def _before(self, verb: str, kind: Kind, name: str) -> None:
        if self.die_after_write is not None and len(self.writes) >= self.die_after_write:
            raise Died
        error = self.fault(verb, kind, name)
        if error is not None:
            raise error

    def _after_write(self, what: str) -> None:
        self.writes.append(what)
        if self.die_after_write is not None and len(self.writes) >= self.die_after_write:
            raise Died

    def _find(self, kind: Kind, namespace: str, name: str) -> Manifest:
        try:
            return self.objects[kind, namespace, name]
        except KeyError:
            raise NotFoundError(f"{kind} {name}", 404, f'{kind.plural} "{name}" not found') from None

    def _precondition(self, obj: Manifest, wanted: Manifest) -> None:
        for field in ("uid", "resourceVersion"):
            if wanted.get(field) not in (None, obj["metadata"][field]):
                text = f"the {field} in the precondition ({wanted[field]}) is not {obj['metadata'][field]}"
                raise ConflictError(obj["metadata"]["name"], 409, text)

    def _store(self, kind: Kind, obj: Manifest, event: str = "MODIFIED") -> Manifest:
        where = (kind, obj["metadata"]["namespace"], obj["metadata"]["name"])
        former = self.objects.get(where)
        obj = copy.deepcopy(obj)
        if former is not None and obj == former:
            return copy.deepcopy(former)  # a write that changes nothing makes no new version
        if former is not None and obj.get("spec") != former.get("spec"):
            obj["metadata"]["generation"] += 1
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[where] = obj
        if former is not None and _is_selected(kind, former) != _is_selected(kind, obj):
            self._reselect(kind, former, obj)
        else:
            self._notify(event, kind, obj)
        return copy.deepcopy(obj)

    def _reselect(self, kind: Kind, former: Manifest, obj: Manifest) -> None:
        """A watch by label reports an object whose label goes as deleted, as it was before, and one whose label comes as added."""
        if _is_selected(kind, obj):
            self._notify("ADDED", kind, obj)
            return
        last = copy.deepcopy(former)
        last["metadata"]["resourceVersion"] = obj["metadata"]["resourceVersion"]
        self._notify("DELETED", kind, last)

    def _vanish(self, where: Where) -> None:
        obj = self.objects.pop(where)
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self._notify("DELETED", where[0], obj)
        uid = obj["metadata"]["uid"]
        for other, dependent in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in dependent["metadata"].get("ownerReferences", ())) and other in self.objects:
                self._vanish(other)

    def _notify(self, type_: str, kind: Kind, obj: Manifest) -> None:
        if kind in WATCHED and _is_selected(kind, obj) and not self.lose(type_, kind, obj):
            self.events.append((type_, kind, copy.deepcopy(obj)))


def _is_selected(kind: Kind, obj: Manifest) -> bool:
    return kind is Kind.RLJOB or JOB_LABEL in (obj["metadata"].get("labels") or {})


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _merge(obj: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(obj) if isinstance(obj, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result


def _flatten(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Leaves by path; members of keyed lists are named by their key."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, (*path, key))
    elif isinstance(value, list) and value and path and path[-1] in LIST_KEYS:
        for item in value:
            yield from _flatten(item, (*path, ("item", item[LIST_KEYS[path[-1]]])))
    else:
        yield path, value


def _unflatten(flat: dict[tuple[Any, ...], Any]) -> Any:
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        if not path:
            continue
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value

    def build(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node and all(isinstance(key, tuple) for key in node):
            return [build(item) for item in node.values()]
        return {key: build(item) for key, item in node.items()}

    return build(root)


def _has_label(obj: Manifest, selector: str) -> bool:
    """Of a selector of one label, with or without its value."""
    name, _, value = selector.partition("=")
    labels = obj["metadata"].get("labels", {})
    return name in labels and value in ("", labels[name])


def _has_fields(obj: Manifest, selector: str) -> bool:
    """Whether fields have the values of a selector like ``involvedObject.name=a,type=Warning``."""
    flat = {".".join(map(str, path)): value for path, value in _flatten(obj)}
    return all(flat.get(name) == value for name, _, value in (term.partition("=") for term in selector.split(",")))
