"""Fields of the schema that have no effect yet, and what they wait for.

The API is written for the whole product; a run refuses what it would otherwise ignore. When a capability arrives, its
rows are deleted here and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api import paths
from rljob_api.errors import FieldError, show
from rljob_api.v1alpha1.rljob import RLJobSpec

Condition = Callable[[Any], bool]
"""Whether a JSON value asks for something that is not there yet."""


def above(limit: float) -> Condition:
    """Numbers above a limit."""
    return lambda value: value is not None and value > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A field, when it asks for too much, and what to do instead."""

    path: str
    """Below spec; ``[]`` stands for every entry of a list."""
    when: Condition
    waits_for: str
    """The capability that will give it an effect."""
    remedy: str = "remove it"


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        path="components[].engine.pipelineParallelSize",
        when=above(1),
        waits_for="pipeline parallel engines",
        remedy="use tensorParallelSize",
    ),
)
"""Every field without effect. Order does not matter: problems are sorted by their place in the manifest."""


def unsupported(spec: RLJobSpec) -> list[FieldError]:
    """Problems of all fields of ``spec`` that would have no effect."""
    document = spec.model_dump(mode="json", by_alias=True)
    return [
        _error(path, value, row.waits_for, row.remedy)
        for row in UNSUPPORTED
        for path, value in _matches(document, row.path.split("."), ("spec",))
        if row.when(value)
    ]


def _error(path: str, value: object, waits_for: str, remedy: str) -> FieldError:
    return FieldError(path=path, value=show(value), problem=f"is not supported yet, it waits for {waits_for}", remedy=remedy)


def _matches(value: object, keys: list[str], parts: paths.Parts) -> Iterator[tuple[str, object]]:
    """Concrete paths and values of a pattern; sections that are not set match nothing."""
    if not keys:
        yield paths.join(parts), value
        return
    key, is_list = keys[0].removesuffix("[]"), keys[0].endswith("[]")
    if not isinstance(value, Mapping):
        return
    child = value[key]
    if not is_list:
        yield from _matches(child, keys[1:], (*parts, key))
        return
    for index, entry in enumerate(child):
        yield from _matches(entry, keys[1:], (*parts, key, index))
