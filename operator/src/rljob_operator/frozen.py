"""Hashes of what cannot be changed of a spec.

The API server compares most fields itself (``self == oldSelf``), but its ``==`` on objects of unknown fields, such as podTemplate, misses a
key that takes the place of another one. Defaults are left out, so that a field that a later version adds changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from rljob_api.crd.schema import MUTABLE_BELOW, MUTABLE_SPEC_FIELDS
from rljob_api.v1alpha1.rljob import RLJobSpec

HASH_CHARACTERS = 12


def hashes(spec: RLJobSpec) -> dict[str, str]:
    """Hash of each field that differs from its default, without what may change, by name."""
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for section, mutable in MUTABLE_BELOW.items():
        if section in fields:
            fields[section] = {key: value for key, value in fields[section].items() if key not in mutable}
    return {key: _hash(value) for key, value in sorted(fields.items()) if key not in MUTABLE_SPEC_FIELDS and value not in ({}, [])}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the fields that differ, sorted."""
    return tuple(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:HASH_CHARACTERS]
