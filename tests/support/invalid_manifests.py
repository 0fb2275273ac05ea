"""The manifests under tests/golden/invalid: each a change of the smallest valid job, with the messages a user reads.

A case has a name, what it changes, and `messages`, one line a problem: the line of the manifest, the path, what is wrong and the remedy.
Paths are written as in messages. The changes are made in this order:

    set:      values by path; a list grows by the index after its last
    remove:   paths
    text:     instead of the base manifest: this text, in which the line {base} stands for it
    replace:  texts that occur once, and what replaces them

`pytest --update-goldens` writes the messages and leaves everything else as it stands.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.unit.api.manifests import manifest

FOLDER = Path(__file__).parents[1] / "golden" / "invalid"
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidManifest:
    """One row of a table."""

    name: str
    messages: str
    set: Mapping[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    text: str = "{base}\n"
    replace: Mapping[str, str] = field(default_factory=dict)

    def manifest(self) -> str:
        """The manifest as a user would write it."""
        document = manifest()
        for path, value in self.set.items():
            _assign(document, path, value)
        for path in self.remove:
            parent, last = _parent(document, path)
            del parent[last]
        text = self.text.replace("{base}\n", as_text(document))
        for old, new in self.replace.items():
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: replace: {old!r} occurs {text.count(old)} times in the manifest, not once")
            text = text.replace(old, new)
        return text


def as_text(document: Any) -> str:
    """YAML in the order given, one line a scalar, so that line numbers are those a reader would count."""
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=float("inf"))


def tables() -> list[Path]:
    """The files of cases, by topic."""
    return sorted(FOLDER.glob("*.yaml"))


def read(table: Path) -> list[InvalidManifest]:
    """The cases of one file."""
    rows = yaml.load(table.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)  # as safe_load does, ten times as fast
    return [InvalidManifest(**row | {"remove": tuple(row.get("remove", ()))}) for row in rows]


def named(name: str) -> InvalidManifest:
    """One case."""
    return next(case for table in tables() for case in read(table) if case.name == name)


def write_messages(table: Path, messages_of: Callable[[InvalidManifest], str]) -> None:
    """Put the messages of every case of one file in place of those that stand there."""
    new = {case.name: messages_of(case) for case in read(table)}
    case_text = re.compile(r"^(- name: (\S+).*\n(?: .*\n|\n)*?  messages: \|\n)(?:    .*\n)*", re.MULTILINE)
    text = table.read_text(encoding="utf-8")
    text = case_text.sub(lambda found: found[1] + "".join(f"    {line}\n" for line in new[found[2]].split("\n")[:-1]), text)
    table.write_text(text, encoding="utf-8")


def _parent(document: Any, path: str) -> tuple[Any, str | int]:
    parts = [name or int(index) for name, index in _PART.findall(path)]
    for part in parts[:-1]:
        document = document[part] if isinstance(part, int) else document.setdefault(part, {})
    return document, parts[-1]


def _assign(document: Any, path: str, value: Any) -> None:
    parent, last = _parent(document, path)
    if isinstance(parent, list) and last == len(parent):
        parent.append(value)
    else:
        parent[last] = value
