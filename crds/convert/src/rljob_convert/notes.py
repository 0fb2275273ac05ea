"""What a conversion says about the parts of a file that did not simply become a field."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rljob_api import paths
from rljob_api.errors import show
from rljob_api.rules.secret_names import looks_secret

HIDDEN = "(hidden, its name promises a secret)"
MAX_SHOWN_KEYS = 8
MIN_SHARED = 3
"""Keys of a section with the same fate that share a note."""
MAX_LINE = 120
"""Characters of a line of values."""


class NoteKind(StrEnum):
    """What became of a part of the file. In the order of a report."""

    UNKNOWN = "Unknown"
    """Not a key of the source framework, or a value that cannot be used: it has no effect."""
    DROPPED = "Dropped"
    """Understood, but the manifest has no place for it."""
    DIFFERENT = "Converted differently"
    """In the manifest, but not with the same meaning."""
    ASSUMED = "Assumed"
    """Not in the file; the manifest needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One remark about the source file."""

    path: str
    """Place in the source; of an assumption, where the value would be."""
    value: str | None
    """The value there as short JSON, of a section its keys; the assumed one of an assumption; None when there is none to show."""
    kind: NoteKind
    why: str
    """What became of it and for which reason."""
    remedy: str
    """What to do."""
    line: int | None = None
    """Line in the source, counted from 1; None when it is not written there."""
    file: str | None = None
    """The file, when it is not the first one but one that Hydra takes into the configuration."""

    def __str__(self) -> str:
        """``line 3: path = value: why; remedy`` without the parts that are absent; a second file's name comes before the line."""
        line = f"{self.file + ' ' if self.file else ''}line {self.line}: " if self.line else ""
        shown = "" if self.value is None else f" = {self.value}"
        return f"{line}{self.path}{shown}: {self.why}{f'; {self.remedy}' if self.remedy else ''}"


def lines(notes: Sequence[Note]) -> list[str]:
    """Notes for people, a line each; keys of one section that have the same fate share a note, with their values in lines of their own."""
    counts = Counter(map(_fate, notes))
    groups: dict[object, list[Note]] = {}
    for index, note in enumerate(notes):
        fate = _fate(note)
        groups.setdefault(index if fate is None or counts[fate] < MIN_SHARED else fate, []).append(note)
    return [line for group in groups.values() for line in (_shared(group) if len(group) >= MIN_SHARED else map(str, group))]


def _fate(note: Note) -> tuple[str | None, ...] | None:
    """What a note has in common with those that it may share a line with; None for one that has a line of its own."""
    section = note.path.rpartition(".")[0]
    shares = note.kind is NoteKind.DROPPED and section and '"' not in note.path and note.value is not None
    return (note.file, section, note.why, note.remedy) if shares else None


def _shared(group: Sequence[Note]) -> list[str]:
    """One note about several keys of a section."""
    first, section = group[0], group[0].path.rpartition(".")[0]
    written = [note.line for note in group if note.line]
    place = f"{first.file + ' ' if first.file else ''}lines {min(written)} to {max(written)}: " if written else ""
    head = f"{place}{len(group)} keys of {section}: {first.why}{f'; {first.remedy}' if first.remedy else ''}"
    values = ", ".join(f"{note.path.rpartition('.')[2]} = {note.value}" for note in group)
    wrapped = textwrap.wrap(values, MAX_LINE, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    return [head, *(f"  {line}" for line in wrapped)]


def shown_value(parts: paths.Parts, value: object) -> str:
    """A value for a report: short, sections as their keys, and nothing that looks like a secret."""
    if is_secret(parts, value):
        return HIDDEN
    if isinstance(value, dict):
        keys = [str(key) for key in value]
        return "{" + ", ".join(keys[:MAX_SHOWN_KEYS]) + (", .." if len(keys) > MAX_SHOWN_KEYS else "") + "}"
    if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(item, (dict, list)) for item in value):
        return f"[{len(value)} {'entry' if len(value) == 1 else 'entries'}]"
    return show(value)


def is_secret(parts: paths.Parts, value: object) -> bool:
    """Whether a value may be a secret: some key on the way promises one, and it is no switch such as ``add_token_level_kl: true``."""
    return not isinstance(value, (bool, int, float)) and any(isinstance(part, str) and is_secret_key(part) for part in parts)


def is_secret_key(key: str) -> bool:
    """Whether a key such as ``api_key`` or ``IFLOW_apiKey`` promises a secret."""
    return looks_secret(key.replace("-", "_"))
