"""Every field of the API by its path, and the reference pages written from that.

Paths are patterns: ``spec.nodeGroups[].labels``; ``[]`` stands for any entry of a list.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rljob_api import paths
from rljob_api.crd import docstrings, schema
from rljob_api.naming import MAX_JOB_NAME
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDoc:
    """What there is to know about one field."""

    path: str
    type: str
    """For example ``integer``, ``list of sections``."""
    is_required: bool
    default: str | None
    """As JSON; None when there is none."""
    bounds: str
    """For example ``1 to 64``; empty when there are none worth showing."""
    choices: tuple[str, ...]
    description: str

    @property
    def is_section(self) -> bool:
        """Whether fields lie below it."""
        return "section" in self.type


@functools.cache
def index() -> dict[str, FieldDoc]:
    """All fields of spec and status by pattern, in the order of the models; metadata.name first."""
    name = FieldDoc(
        path="metadata.name",
        type="text",
        is_required=True,
        default=None,
        bounds=f"at most {MAX_JOB_NAME} characters",
        choices=(),
        description="Name of the job, lower case.",
    )
    return {name.path: name, **{doc.path: doc for doc in _walk(schema.job_schema(), "")}}


def pattern(parts: paths.Parts) -> str:
    """The pattern of a concrete path: list indexes become ``[]``."""
    text = ""
    for part in parts:
        text += "[]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def children(section: str) -> list[str]:
    """Names of the fields directly inside a section (a list's pattern may end in ``[]`` or not)."""
    prefix = f"{section.removesuffix('[]')}"
    found = dict.fromkeys(
        path.removeprefix(start).split(".")[0].removesuffix("[]")
        for path in index()
        for start in (f"{prefix}.", f"{prefix}[].")
        if prefix and path.startswith(start)
    )
    return list(found) if prefix else ["apiVersion", "kind", "metadata", "spec", "status"]


def _walk(node: schema.Schema, path: str) -> Iterator[FieldDoc]:
    required = node.get("required", ())
    for key, child in node.get("properties", {}).items():
        here = f"{path}.{key}".lstrip(".")
        if here == "metadata":
            continue
        yield _field(child, here, is_required=key in required)
        yield from _walk(child.get("items", child), f"{here}[]" if "items" in child else here)


def _field(node: schema.Schema, path: str, *, is_required: bool) -> FieldDoc:
    default = node.get("default")
    return FieldDoc(
        path=path,
        type=_type(node),
        is_required=is_required,
        default=None if default is None else json.dumps(default),
        bounds=_bounds(node),
        choices=tuple(node.get("enum", node.get("items", {}).get("enum", ()))),
        description=node.get("description", ""),
    )


def _type(node: schema.Schema) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "type" not in node:
        return "score or Drop"  # the one union, which a structural schema leaves open
    kind = node["type"]
    if kind == "array":
        return f"list of {_type(node['items'])}s".replace("texts", "text")
    if kind == "object" and "properties" not in node:
        return "free-form map" if "x-kubernetes-preserve-unknown-fields" in node else f"map of {_type(node['additionalProperties'])}"
    words = {"object": "section", "string": "choice" if "enum" in node else "text", "boolean": "true or false"}
    return words.get(kind, str(kind))


def _bounds(node: schema.Schema) -> str:
    def number(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    parts: list[str] = []
    if "minimum" in node:
        parts.append(("above " if node.get("exclusiveMinimum") else "at least ") + number(node["minimum"]))
    if "maximum" in node:
        parts.append(("below " if node.get("exclusiveMaximum") else "at most ") + number(node["maximum"]))
    if "maxLength" in node:
        parts.append(f"at most {node['maxLength']} characters")
    if "maxItems" in node:
        parts.append(f"{node['minItems']} to {node['maxItems']} entries" if node.get("minItems") else f"at most {node['maxItems']} entries")
    if "maxProperties" in node:
        parts.append(f"at most {node['maxProperties']} keys")
    return ", ".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells may hold several lines."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), '<br>') for cell in cells)} |"

    return "\n".join([line(header), line(["---"] * len(header)), *(line(row) for row in rows)]) + "\n"


def fields_page() -> str:
    """``docs/reference/rljob.md``: one table per section."""
    sections: dict[str, list[FieldDoc]] = {}
    for doc in index().values():
        sections.setdefault(doc.path.rpartition(".")[0], []).append(doc)
    lines = [
        _GENERATED,
        "# RLJob fields",
        "",
        "`rljob.dev/v1alpha1`, kind `RLJob`, short name `rlj`. In a terminal: `rljob explain spec.rollout`.",
        "`[]` stands for any entry of a list. Fields that wait for a later capability are refused with a message, never ignored.",
        "",
    ]
    for section, docs in sections.items():
        about = index().get(section.removesuffix("[]"))
        lines += [f"## {section or 'RLJob'}", ""]
        if about is not None:
            lines += [about.description.replace("\n", " "), ""]
        lines.append(table(("Field", "Type", "Default", "Bounds", "Meaning"), (_row(doc) for doc in docs)))
    return "\n".join(lines)


def _row(doc: FieldDoc) -> tuple[str, ...]:
    default = "required" if doc.is_required else ("" if doc.default is None or doc.is_section else f"`{doc.default}`")
    bounds = ", ".join(f"`{choice}`" for choice in doc.choices) or doc.bounds
    return f"`{doc.path.rpartition('.')[2]}`", doc.type, default, bounds, doc.description


def conditions_page() -> str:
    """``docs/reference/conditions.md``: condition types and reasons."""
    return "\n".join(
        [
            _GENERATED,
            "# Conditions",
            "",
            "Every type is always present. `Succeeded` is the summary: `kubectl get rlj` shows its reason.",
            "",
            "## Types",
            "",
            _members(ConditionType),
            "## Reasons",
            "",
            _members(Reason),
        ]
    )


def _members(enum: type[StrEnum]) -> str:
    docs = docstrings.attribute_docs(enum)
    return table(("Name", "Meaning"), ((f"`{member.value}`", docs[member.name]) for member in enum))


_GENERATED = "<!-- Generated by `python -m rljob_api generate`; do not edit. -->\n"
