"""Merges a partial pod template over a generated one.

Maps merge key by key, and null removes a key. Lists of named entries (:data:`rljob_api.rules.pod_template.LIST_KEYS`) merge entry by entry:
existing entries keep their position, new ones are appended. Tolerations are appended. Probes with a handler
of their own and all other lists are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rljob_api.rules.pod_template import LIST_KEYS

APPENDED = frozenset({"tolerations"})
PROBES = frozenset({"livenessProbe", "readinessProbe", "startupProbe"})
HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
"""What a probe asks. It has one: a probe that names it replaces another as a whole, numbers alone are merged into it."""
REPLACED_ENTRIES = frozenset({"env", "volumes", "volumeMounts"})
"""Lists whose entries are replaced as a whole: merging a volume or variable of one kind into one of another kind yields neither."""


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``overlay`` over ``base``; neither is modified, and the result shares nothing with them."""
    result: dict[str, Any] = copy.deepcopy(dict(base))
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _value(key, result.get(key), value)
    return result


def _value(key: str, below: Any, above: Any) -> Any:
    if isinstance(above, Mapping):
        is_other_probe = key in PROBES and not HANDLERS.isdisjoint(above)
        return merge(below if isinstance(below, Mapping) and not is_other_probe else {}, above)
    if isinstance(above, list) and key in APPENDED:
        here = below if isinstance(below, list) else []
        return [*here, *(copy.deepcopy(item) for item in above if item not in here)]
    if isinstance(above, list) and key in LIST_KEYS:
        return _entries(key, below if isinstance(below, list) else [], above)
    return copy.deepcopy(above)


def _entries(field: str, below: list[Any], above: list[Any]) -> list[Any]:
    """Merge entries by key, in order of first appearance."""
    key = LIST_KEYS[field]
    entries: dict[Any, dict[str, Any]] = {item[key]: item for item in below}
    for item in above:
        start = {} if field in REPLACED_ENTRIES else entries.get(item[key], {})
        entries[item[key]] = merge(start, item)
    return list(entries.values())
