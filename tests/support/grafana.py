"""A dashboard compared with Grafana's own schema, as the models of grafana-foundation-sdk that are generated from it describe it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models.dashboard import Dashboard

plugins.register_default_plugins()

_UNIONS = (typing.Union, types.UnionType)


def schema_problems(board: dict[str, Any]) -> list[str]:
    """Unknown keys, missing required ones, values outside an enumeration or of another type, panel types without a model.

    The models read more leniently than the schema: they ignore keys that they do not know and keep any value.
    """
    return list(_compared(board, Dashboard.from_json(board), Dashboard, ""))


def _compared(raw: Any, read: Any, hint: Any, path: str) -> Iterator[str]:
    """What is wrong with a value, which a model has read as ``read`` for a field of type ``hint``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(read, UnknownDataquery):
        yield f"{path}: no model of a query to {raw.get('datasource')}"
    elif hasattr(read, "to_json"):
        yield from _fields(raw, read, path)
    elif origin in _UNIONS:
        found = [list(_compared(raw, read, kind, path)) for kind in arguments if kind is not types.NoneType]
        if all(found):
            yield from found[0]
    elif isinstance(raw, list):
        for index, (item, model) in enumerate(zip(raw, read, strict=True)):
            yield from _compared(item, model, arguments[0] if arguments else Any, f"{path}[{index}]")
    elif hint is object and isinstance(raw, dict):
        yield f"{path}: no model: the type of this panel is unknown"
    elif isinstance(hint, type) and issubclass(hint, Enum):
        if raw not in (allowed := [member.value for member in hint]):
            yield f"{path}: {raw!r} is none of {allowed}"
    elif isinstance(hint, type) and hint not in (object, Any) and not _is_a(raw, hint):
        yield f"{path}: {raw!r} is no {hint.__name__}"


def _fields(raw: dict[str, Any], read: Any, path: str) -> Iterator[str]:
    typed = typing.get_type_hints(type(read))
    hints = {_plain(name): hint for name, hint in typed.items()}
    values = {_plain(name): value for name, value in vars(read).items()}
    for key, value in raw.items():
        if _plain(key) not in hints:
            yield f"{path}.{key}: {type(read).__name__} has no such key"
        else:
            yield from _compared(value, values[_plain(key)], hints[_plain(key)], f"{path}.{key}")
    given = {_plain(key) for key in raw}
    required = [name for name, hint in typed.items() if types.NoneType not in typing.get_args(hint)]
    yield from (f"{path}: {type(read).__name__} needs {name}" for name in required if _plain(name) not in given)


def _is_a(raw: Any, hint: type) -> bool:
    if hint is float:
        return isinstance(raw, int | float) and not isinstance(raw, bool)
    return isinstance(raw, hint) and (hint is bool or not isinstance(raw, bool))


def _plain(name: str) -> str:
    """Attributes have the names of keys in snake case; ``id`` and ``type`` are ``id_val`` and ``type_val``."""
    return name.removesuffix("_val").replace("_", "").lower()
