"""Tables of a framework's keys, and the account of everything that a conversion did not read.

A pattern is a path with dots; ``*`` stands for any one part. Rules apply to everything below their path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rljob_api import paths
from rljob_api.errors import did_you_mean
from rljob_convert.notes import NoteKind
from rljob_convert.source import Source, leaves

WHOLE_EXPERTS = "an expert is on one process as a whole, or sharded by FSDP2"
"""Why tensor parallelism within experts has none."""
_EXPLAINED = re.compile(r": |; |, (?=which |of |where )")
"""Where a row of a table goes on from the field to what becomes of a key there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Why a known key has no field, and what to do."""

    why: str
    remedy: str = ""
    same: tuple[object, ...] = ()
    """Values that say what RLJob does anyway: nothing is lost with them. Null never says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """All keys of a framework that a conversion knows."""

    framework: str
    mapped: Mapping[str, str]
    """Pattern -> our field, or what becomes of it."""
    dropped: Mapping[str, Drop]
    dead: Mapping[str, str]
    """Keys that the framework itself ignores -> why, in words."""
    _tree: dict[str, object] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Arrange the patterns by part."""
        for pattern in (*self.mapped, *self.dropped, *self.dead):
            node: dict[str, object] = self._tree
            for part in pattern.split("."):
                child = node.setdefault(part, {})
                assert isinstance(child, dict)
                node = child
            node[""] = pattern

    def pattern(self, parts: paths.Parts) -> str | None:
        """The pattern of exactly this path."""
        node = self._node(parts)
        found = None if node is None else node.get("")
        return found if isinstance(found, str) else None

    def inside(self, parts: paths.Parts) -> list[str]:
        """Known keys below a path."""
        node = self._node(parts)
        return [] if node is None else [key for key in node if key not in ("", "*")]

    def has_inside(self, parts: paths.Parts, key: str) -> bool:
        """Whether a key is a known one directly below a path."""
        node = self._node(parts)
        return node is not None and key not in ("", "*") and key in node

    def knows_below(self, parts: paths.Parts) -> bool:
        """Whether any pattern goes deeper than this path."""
        node = self._node(parts)
        return node is not None and any(key != "" for key in node)

    def drops_whole(self, parts: paths.Parts) -> bool:
        """Whether a section that nothing read is one note: it has no field, nor has anything below it."""
        exact, node = self.pattern(parts), self._node(parts)
        if exact not in self.dropped or node is None:
            return False
        below = [child for key, child in node.items() if key != ""]
        while below:
            child = below.pop()
            if isinstance(child, dict):
                if child.get("") in self.mapped or child.get("") in self.dead:
                    return False
                below += [deeper for key, deeper in child.items() if key != ""]
        return True

    def _node(self, parts: paths.Parts) -> dict[str, object] | None:
        node: object = self._tree
        for part in parts:
            if not isinstance(node, dict):
                return None
            node = node.get(str(part)) or node.get("*")
        return node if isinstance(node, dict) else None


def note_leftovers(source: Source, table: KeyTable) -> None:
    """Write a note about everything that is neither used nor noted yet: by the table, or as unknown."""
    touched = {parts[:length] for parts in (source.used | source.noted) for length in range(len(parts) + 1)}
    _visit(source, table, (), source.data, touched)


def is_accounted(source: Source) -> list[paths.Parts]:
    """Leaves that are neither used nor covered by a note: always none after :func:`note_leftovers`."""
    return [parts for parts, _ in leaves(source.data) if not source.is_touched(parts)]


def _visit(source: Source, table: KeyTable, parts: paths.Parts, node: object, touched: set[paths.Parts]) -> None:
    if parts in source.used or parts in source.noted:
        return
    is_section = isinstance(node, (dict, list)) and bool(node)
    is_split = is_section and table.knows_below(parts) and not _is_one_note(source, table, parts, node)
    if parts and parts not in touched and not is_split:
        _account(source, table, parts, node)
    elif isinstance(node, dict):
        for key, value in node.items():
            _visit(source, table, (*parts, key), value, touched)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _visit(source, table, (*parts, index), value, touched)


def _is_one_note(source: Source, table: KeyTable, parts: paths.Parts, node: object) -> bool:
    """Whether a section is one note: something of it is lost, all of it for the same reason, and none of it is a misspelled key."""
    if not table.drops_whole(parts):
        return False
    inside = list(leaves(node, parts))
    if all(value is None or _is_same(source, table, place) for place, value in inside):
        return False
    keys = {place[:length]: None for place, _ in inside for length in range(len(parts) + 1, len(place) + 1)}
    return not any(table.pattern(key) is None and key not in source.serving and _near_miss(source, table, key) for key in keys)


def _is_same(source: Source, table: KeyTable, parts: paths.Parts) -> bool:
    """Whether a leaf says what RLJob does anyway."""
    value, exact = source.glance(*parts), table.pattern(parts)
    same = table.dropped[exact].same if exact is not None and exact in table.dropped else ()
    return any(value == one and type(value) is type(one) for one in same)


def _account(source: Source, table: KeyTable, parts: paths.Parts, node: object) -> None:
    """Say what becomes of a leaf or a section that nothing has read."""
    exact = table.pattern(parts)
    dead = next((table.dead[p] for p in _ancestors(table, parts) if p in table.dead), None)
    if dead is not None:
        source.drop(parts, f"{table.framework} itself ignores it: {dead}", "remove it")
        return
    if exact is not None and exact in table.mapped and exact not in table.dropped:
        if node is None:
            source.used.add(parts)
        else:
            source.drop(parts, _without_use(table.mapped[exact]), "check the converted fields")
        return
    rule = next((table.dropped[p] for p in _ancestors(table, parts) if p in table.dropped), None)
    if rule is None or (exact is None and _near_miss(source, table, parts) and parts not in source.serving):
        _unknown(source, table, parts)
        return
    if node is None or _is_same(source, table, parts):
        source.used.add(parts)
    else:
        source.drop(parts, rule.why, rule.remedy)


def _without_use(target: str) -> str:
    """Why a key that may become a field does not become one here."""
    name = _EXPLAINED.split(target, maxsplit=1)[0]
    field = "" if target.startswith(("nothing", "which of")) else f", which have no use for {name}"
    return f"has no effect with the other settings of this file{field}"


def _ancestors(table: KeyTable, parts: paths.Parts) -> Iterator[str]:
    """Patterns of a path and of what is around it, nearest first."""
    for length in range(len(parts), 0, -1):
        pattern = table.pattern(parts[:length])
        if pattern is not None:
            yield pattern


def _near_miss(source: Source, table: KeyTable, parts: paths.Parts) -> bool:
    """Whether a key is a misspelled known one rather than one of the many without a row."""
    known = table.inside(parts[:-1])
    if not isinstance(parts[-1], str) or not known or not source.may_suggest():
        return False
    return bool(difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.9))


def _unknown(source: Source, table: KeyTable, parts: paths.Parts) -> None:
    if parts in source.serving:
        source.drop(parts, "only serves references from other keys, which were filled in where they are used")
        return
    last = next((index for index in range(len(parts) - 1, -1, -1) if isinstance(parts[index], str)), 0)
    if table.has_inside(parts[:last], str(parts[last])):
        what = "is empty, and a section of keys is expected" if source.glance(*parts) is None else "is no section of keys"
        source.note(NoteKind.UNKNOWN, parts, what, "write its keys below it, or remove it")
        return
    near = did_you_mean(str(parts[last]), table.inside(parts[:last])) if source.may_suggest() else None
    source.note(NoteKind.UNKNOWN, parts, f"is not a key that {table.framework} or this converter knows", near or "remove it")
