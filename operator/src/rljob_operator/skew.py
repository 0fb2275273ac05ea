"""The fields of the CRD that the API server serves, compared with those of this operator. Pure.

A CRD is not part of an upgrade or a rollback by helm, so that it can be older or newer than the operator:

- *missing* fields, of an older CRD, vanish from what users apply: the API server drops them. It refuses a status that has one, so that the
  operator leaves them out of its own.
- *unknown* fields, of a newer CRD, are in every RLJob with the defaults that the API server fills in. An operator that took them for
  mistakes would refuse every job. Such a default is left out; a value that somebody chose stays, and is refused as an unknown key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Schema = Mapping[str, Any]
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How the served CRD differs from the operator's own."""

    missing: tuple[str, ...] = ()
    """Paths of fields that the operator knows and the CRD lacks, such as ``spec.nodeGroups[].labels``."""
    unknown: tuple[str, ...] = ()
    """Paths of fields below ``spec`` that the CRD has and the operator does not know."""
    served: Schema | None = None
    """Schema of ``spec`` that unknown fields are looked up in; None where there are none."""
    own: Schema | None = None
    status: Schema | None = None
    """Schema of ``status`` that is served; None where it has all fields of the operator's."""

    def storable(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """A status without fields that the CRD lacks."""
        if self.status is None:
            return status
        storable: Mapping[str, Any] = _storable(status, self.status)
        return storable

    def known(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """A spec without unknown fields that have their defaults."""
        if self.served is None or self.own is None:
            return spec
        known: Mapping[str, Any] = _known(spec, self.served, self.own)
        return known


def compare(served: Mapping[str, Schema], own: Mapping[str, Schema]) -> Skew:
    """Compare two pairs of structural schemas, of ``spec`` and ``status``."""
    missing, unknown = tuple(_absent(own["spec"], served["spec"], "spec")), tuple(_absent(served["spec"], own["spec"], "spec"))
    of_status = tuple(_absent(own["status"], served["status"], "status"))
    return Skew(
        missing=(*missing, *of_status),
        unknown=unknown,
        served=served["spec"] if unknown else None,
        own=own["spec"] if unknown else None,
        status=served["status"] if of_status else None,
    )


def describe(skew: Skew) -> list[str]:
    """What to tell whoever runs the operator; empty where the two agree."""
    found = []
    if skew.missing:
        found.append(
            f"the CRD rljobs.rljob.dev is older than this operator: RLJobs are stored without {', '.join(skew.missing)}. "
            "Apply the CRD of this version: kubectl apply --server-side --force-conflicts -f helm/rljob/crds/"
        )
    if skew.unknown:
        found.append(
            f"the CRD rljobs.rljob.dev is newer than this operator, which does not know {', '.join(skew.unknown)}: "
            "RLJobs that set them to other values than their defaults are refused. Upgrade the operator, or apply the CRD of its version"
        )
    return found


def _absent(of: Schema, other: Schema, path: str) -> Iterator[str]:
    """Paths of fields that ``of`` has and ``other`` lacks; what is below such a field is not listed."""
    theirs = other.get("properties", {})
    for name, schema in of.get("properties", {}).items():
        if name in theirs:
            yield from _absent(schema, theirs[name], f"{path}.{name}")
        elif not other.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name}"
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(of.get(key), Mapping) and isinstance(other.get(key), Mapping):
            yield from _absent(of[key], other[key], path + mark)


def _known(value: Any, served: Schema, own: Schema) -> Any:
    if isinstance(value, list) and "items" in served and "items" in own:
        return [_known(item, served["items"], own["items"]) for item in value]
    if not isinstance(value, Mapping):
        return value
    ours, theirs = own.get("properties", {}), served.get("properties", {})
    if not ours or not theirs:
        return value
    found = {}
    for name, item in value.items():
        if name in ours:
            found[name] = _known(item, theirs.get(name, {}), ours[name])
        elif name not in theirs or item != _default(theirs[name]):
            found[name] = item
    return found


def _storable(value: Any, served: Schema) -> Any:
    if isinstance(value, list | tuple) and "items" in served:
        return [_storable(item, served["items"]) for item in value]
    fields = served.get("properties")
    if not isinstance(value, Mapping) or not fields or served.get("x-kubernetes-preserve-unknown-fields"):
        return value
    return {name: _storable(item, fields[name]) for name, item in value.items() if name in fields}


def _default(schema: Schema) -> Any:
    """What the API server fills in for an absent field: its default, with the defaults of what is below."""
    value = schema.get("default", _ABSENT)
    if not isinstance(value, Mapping):
        return value
    below = {name: _default(child) for name, child in schema.get("properties", {}).items() if name not in value}
    return {**value, **{name: item for name, item in below.items() if item is not _ABSENT}}
