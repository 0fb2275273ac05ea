"""The file to convert: typed access to its values, OmegaConf references, and an account of what was used.

Nothing of a file may get lost: every read marks the leaf it came from, notes mark what they are about, and
:func:`rljob_convert.keys.note_leftovers` writes a note about everything that remains.

References: ``${a.b}``, ``${.b}`` and the calls of :mod:`rljob_convert.resolvers`. They are followed when a value is read, at most
:data:`MAX_REFERENCES` times in all and :data:`MAX_DEPTH` deep; a cycle is a note, not an error. An environment variable that is not set and
has no default is an error where its value is read: guessing it would change the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rljob_api import paths
from rljob_api.errors import FieldError, SpecInvalidError, show
from rljob_api.reading import yaml_text
from rljob_convert import hydra
from rljob_convert.notes import Note, NoteKind, is_secret, is_secret_key, shown_value
from rljob_convert.resolvers import CALL, UnresolvedError, UnsetError, called

MAX_DEPTH = 16
"""References that follow each other."""
MAX_REFERENCES = 10_000
MAX_TEXT = 65_536
"""Characters of a text after its references are filled in."""
MAX_PLAIN_VALUES = 2000
"""Values of a section that is copied as it is."""
MAX_SUGGESTIONS = 200
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_ONLY_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_PATH = re.compile(r"\.*[\w-]+(\.[\w-]+|\[[0-9]{1,6}\])*")
_SELECT = re.compile(r"oc\.select:([^,]*)(,(.*))?", re.DOTALL)
_MISSING = object()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Found:
    """A node and the way to it."""

    node: object
    parts: paths.Parts
    """Where it really is, after references."""


class Source:
    """One file; collects notes."""

    def __init__(self, composed: hydra.Composed, environment: Mapping[str, str]) -> None:
        """Read from a configuration; ``environment`` is what ``${oc.env:..}`` asks."""
        data = self.data = composed.data
        self.notes: list[Note] = []
        self.used: set[paths.Parts] = set()
        """Leaves, lists and maps whose value is in the manifest."""
        self.noted: set[paths.Parts] = set()
        """What a note is about, with everything below."""
        self.serving: set[paths.Parts] = set()
        """What some ``${..}`` of the file names, used or not."""
        self._lines = composed.lines
        self._files = composed.files
        self._environment = environment
        self._num_references = 0
        self._num_suggestions = 0
        for _, value in leaves(data):
            if isinstance(value, str) and "${" in value:
                self.serving.update(tuple(match.split(".")) for match in re.findall(r"\$\{([\w.-]+)\}", value))
                self.serving.update(tuple(match.split(".")) for match in re.findall(r"[:,]\s*\$\{([\w.-]+)\}", value))

    # -- notes

    def note(self, kind: NoteKind, parts: paths.Parts, why: str, remedy: str = "", *, value: object = _MISSING) -> None:
        """Say something about a place of the file.

        What is unknown or dropped counts as accounted for, with everything below it; of what is converted differently only a single
        value does, and an assumption accounts for nothing.

        Args:
            kind: what became of it.
            parts: the place.
            why: what became of it, in words.
            remedy: what to do.
            value: shown instead of what is written there.
        """
        written = self._raw(parts)
        is_section = isinstance(written, (dict, list)) and bool(written)
        if written is not _MISSING and (kind in (NoteKind.UNKNOWN, NoteKind.DROPPED) or (kind is NoteKind.DIFFERENT and not is_section)):
            self.noted.add(parts)
        shown = written if value is _MISSING else value
        text = None if shown is _MISSING else shown_value(parts, shown)
        at, file = self._lines.get(parts), self._files.get(parts)
        self.notes.append(Note(path=paths.join(parts), value=text, kind=kind, why=why, remedy=remedy, line=at, file=file))

    def drop(self, parts: paths.Parts, why: str, remedy: str = "") -> None:
        """Note something without an equivalent."""
        self.note(NoteKind.DROPPED, parts, why, remedy)

    def differs(self, parts: paths.Parts, why: str, remedy: str = "") -> None:
        """Note something whose meaning changed."""
        self.note(NoteKind.DIFFERENT, parts, why, remedy)

    def assume(self, parts: paths.Parts, value: _T, why: str, remedy: str = "") -> _T:
        """Note a value that the file does not give, and return it."""
        self.note(NoteKind.ASSUMED, parts, why, remedy, value=value)
        return value

    def text_problem(self, error: FieldError) -> None:
        """Note what YAML makes of a text; the value itself is still accounted for elsewhere."""
        note = Note(path=error.path, value=error.value, kind=NoteKind.DIFFERENT, why=error.problem, remedy=error.remedy, line=error.line)
        if any(isinstance(part, str) and is_secret_key(part) for part in paths.split(error.path)):
            note = replace(note, value=None)
        self.notes.append(note)

    def may_suggest(self) -> bool:
        """Whether a misspelled key is compared with all known ones: only the first :data:`MAX_SUGGESTIONS`, since that takes a while."""
        self._num_suggestions += 1
        return self._num_suggestions <= MAX_SUGGESTIONS

    def is_touched(self, parts: paths.Parts) -> bool:
        """Whether a place, or one above it, is used or noted."""
        ways = [parts[:length] for length in range(len(parts) + 1)]
        return any(way in self.noted or way in self.used for way in ways)

    def rename(self, old: str, new: str) -> None:
        """Read a section at the top under another name; notes call it so, too."""
        self.data[new] = self.data.pop(old)
        for known in (self._lines, self._files):
            for parts in [parts for parts in known if parts[:1] == (old,)]:
                known[(new, *parts[1:])] = known.pop(parts)  # type: ignore[assignment]
        self.serving = {(new, *parts[1:]) if parts[:1] == (old,) else parts for parts in self.serving}

    # -- reading

    def has(self, *parts: str | int) -> bool:
        """Whether there is a value other than null. Marks nothing."""
        return self.peek(*parts) is not None

    def peek(self, *parts: str | int) -> object:
        """The value with references filled in, or None. Marks nothing and notes nothing.

        Raises:
            SpecInvalidError: it needs an environment variable that is not set.
        """
        try:
            return self._resolved(parts, used=None)
        except UnsetError as error:
            raise self._unset(parts, error) from error
        except UnresolvedError:
            return None

    def glance(self, *parts: str | int) -> object:
        """The same for a value that the manifest does not get: an environment variable that is not set is no matter then."""
        try:
            return self._resolved(parts, used=None)
        except UnresolvedError:
            return None

    def _unset(self, parts: paths.Parts, error: UnsetError) -> SpecInvalidError:
        value = shown_value(parts, self._raw(parts)) if self._raw(parts) is not _MISSING else None
        remedy = "set it where rljob convert runs, or write the value itself"
        line = self._lines.get(parts)
        return SpecInvalidError([FieldError(path=paths.join(parts), value=value, problem=f"{error}", remedy=remedy, line=line)])

    def keys(self, *parts: str | int) -> list[str]:
        """Keys of a section; empty when there is none."""
        try:
            found = self._find(tuple(parts), 0, None)
        except UnresolvedError:
            return []
        return [str(key) for key in found.node] if isinstance(found.node, dict) else []

    def length(self, *parts: str | int) -> int:
        """Entries of a list; 0 when there is none."""
        try:
            found = self._find(tuple(parts), 0, None)
        except UnresolvedError:
            return 0
        return len(found.node) if isinstance(found.node, list) else 0

    def take(self, *parts: str | int) -> object:
        """The value of a leaf, or None when there is none; marks it as used, with every leaf a reference led through."""
        used: set[paths.Parts] = set()
        try:
            value = self._resolved(parts, used)
        except UnsetError as error:
            raise self._unset(parts, error) from error
        except UnresolvedError as error:
            if self._raw(tuple(parts)) is not _MISSING and tuple(parts) not in self.noted:
                self.note(NoteKind.UNKNOWN, tuple(parts), f"cannot be resolved: {error}", "write the value itself")
            return None
        self.used |= used
        return value

    def text(self, *parts: str | int, limit: int = 1024) -> str | None:
        """A text of 1 to ``limit`` characters; numbers are taken as they are written."""
        value = self.take(*parts)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not 0 < len(value) <= limit:
            self.reject(parts, value, f"a text of 1 to {limit} characters is expected")
            return None
        return value

    def integer(self, *parts: str | int, low: int = 0, high: int = 1_000_000) -> int | None:
        """A whole number in ``low .. high``."""
        value = self.take(*parts)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.reject(parts, value, f"a whole number from {low} to {high} is expected")
            return None
        return value

    def number(self, *parts: str | int, low: float = 0.0, high: float = 1e9, above: float | None = None) -> float | None:
        """A number in ``low .. high``, and above ``above``."""
        value = self.take(*parts)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above is not None and value <= above):  # type: ignore[operator]
            bounds = f"above {above} and at most {high}" if above is not None else f"from {low} to {high}"
            self.reject(parts, value, f"a number {bounds} is expected")
            return None
        return float(value)  # type: ignore[arg-type]

    def flag(self, *parts: str | int) -> bool | None:
        """True or false."""
        value = self.take(*parts)
        if value is None or isinstance(value, bool):
            return value
        self.reject(parts, value, "true or false is expected")
        return None

    def texts(self, *parts: str | int, most: int = 64) -> list[str]:
        """A list of texts, or one text; empty when there is none."""
        if not self.length(*parts):
            if isinstance(self.peek(*parts), list):
                self.take(*parts)
                return []
            one = self.text(*parts)
            return [] if one is None else [one]
        items = [self.text(*parts, index) for index in range(min(self.length(*parts), most))]
        return [item for item in items if item is not None]

    def choice(self, table: Mapping[str, str], *parts: str | int) -> str | None:
        """A word of ``table``, as its value there."""
        word = self.text(*parts)
        if word is None:
            return None
        if word.lower() not in table:
            self.reject(parts, word, f"is none of {', '.join(table)}")
            return None
        return table[word.lower()]

    def plain(self, *parts: str | int) -> dict[str, object]:
        """A section as plain data, to be passed on untouched; entries that look like secrets are left out with a note."""
        budget = [MAX_PLAIN_VALUES]
        result = self._plain(tuple(parts), budget, 0)
        return result if isinstance(result, dict) else {}

    def copy(self, parts: paths.Parts) -> object:
        """Any value as plain data, to be passed on untouched, under the same rules as :meth:`plain`."""
        return self._plain(parts, [MAX_PLAIN_VALUES], 0) if self._keep(parts) else None

    def reject(self, parts: paths.Parts, value: object, why: str) -> None:
        """Note that a value cannot be used."""
        self.note(NoteKind.UNKNOWN, tuple(parts), f"{why}, so it has no effect here", "correct it", value=value)

    def _plain(self, parts: paths.Parts, budget: list[int], depth: int) -> object:
        budget[0] -= 1
        if budget[0] < 0 or depth > MAX_DEPTH:
            if not self.is_touched(parts):
                self.drop(
                    parts, f"the section has more than {MAX_PLAIN_VALUES} values or is too deep", "write it into the manifest by hand"
                )
            return None
        try:
            found = self._find(parts, 0, None)
        except UnresolvedError:
            self.take(*parts)
            return None
        if found.node and isinstance(found.node, (dict, list)):
            self.used.update(way for way in self._way(parts) if isinstance(self._raw(way), str))
            if isinstance(found.node, dict):
                return {str(key): self._plain((*parts, key), budget, depth + 1) for key in found.node if self._keep((*parts, key))}
            return [self._plain((*parts, index), budget, depth + 1) for index in range(len(found.node))]
        return self.take(*parts)

    def _keep(self, parts: paths.Parts) -> bool:
        if is_secret(parts[-1:], self.peek(*parts)):
            self.drop(parts, "looks like a secret, and everyone who may read a job reads its manifest", "put it into a Secret")
            return False
        return True

    def _way(self, parts: paths.Parts) -> Iterator[paths.Parts]:
        return (parts[:length] for length in range(1, len(parts) + 1))

    # -- references

    def filled_search_path(self, text: str) -> str:
        """A path of ``hydra.searchpath`` with its references filled in.

        Raises:
            SpecInvalidError: one of them has no value.
        """
        try:
            return str(self._filled(text, ("hydra", "searchpath"), 0, None))
        except UnresolvedError as error:
            problem = FieldError(path="hydra.searchpath", value=show(text), problem=str(error), remedy="set it, or bring the files here")
            raise SpecInvalidError([problem]) from error

    def _raw(self, parts: paths.Parts) -> object:
        node: object = self.data
        for part in parts:
            node = _child(node, part)
        return node

    def _resolved(self, parts: tuple[str | int, ...], used: set[paths.Parts] | None) -> object:
        found = self._find(tuple(parts), 0, used)
        if found.node is _MISSING:
            return None
        value = found.node
        if isinstance(value, str) and "${" in value:
            if used is not None:
                used.add(found.parts)
            return self._filled(value, found.parts, 0, used)
        if used is not None and (not isinstance(value, (dict, list)) or not value):
            used.add(found.parts)
        return value

    def _find(self, parts: paths.Parts, depth: int, used: set[paths.Parts] | None) -> _Found:
        """Walk down, through references to sections on the way and at the end."""
        node: object = self.data
        here: paths.Parts = ()
        for part in parts:
            node, here = self._followed(node, here, depth, used)
            node, here = _child(node, part), (*here, part)
            if node is _MISSING:
                return _Found(_MISSING, here)
        node, here = self._followed(node, here, depth, used)
        return _Found(node, here)

    def _followed(self, node: object, here: paths.Parts, depth: int, used: set[paths.Parts] | None) -> tuple[object, paths.Parts]:
        """The target of a text that is nothing but ``${path}``."""
        if not isinstance(node, str):
            return node, here
        match = _ONLY_REFERENCE.fullmatch(node.strip())
        if match is None or not _PATH.fullmatch(match[1].strip()):
            return node, here
        if used is not None:
            used.add(here)
        found = self._target(match[1].strip(), here, depth, used)
        return found.node, found.parts

    def _target(self, reference: str, here: paths.Parts, depth: int, used: set[paths.Parts] | None) -> _Found:
        self._num_references += 1
        if depth >= MAX_DEPTH or self._num_references > MAX_REFERENCES:
            raise UnresolvedError(f"${{{reference}}} leads through more than {MAX_DEPTH} references, perhaps in a circle")
        levels = len(reference) - len(reference.lstrip("."))
        base = here[: max(0, len(here) - levels)] if levels else ()
        found = self._find((*base, *paths.split(reference.lstrip("."))), depth + 1, used)
        if found.node is _MISSING:
            raise UnresolvedError(f"${{{reference}}} names nothing in this file")
        return found

    def _filled(self, text: str, here: paths.Parts, depth: int, used: set[paths.Parts] | None) -> object:
        """A text with its references filled in, innermost first; a text that is one reference takes its value and type."""
        for _ in range(MAX_DEPTH):
            match = _REFERENCE.search(text)
            if match is None:
                break
            value = self._evaluated(match[1].strip(), here, depth, used)
            if match[0] == text.strip():
                return value
            if isinstance(value, (dict, list)):
                raise UnresolvedError(f"{match[0]} is a section inside a text")
            text = f"{text[: match.start()]}{'' if value is None else value}{text[match.end() :]}"
            if len(text) > MAX_TEXT:
                raise UnresolvedError(f"its references make it longer than {MAX_TEXT} characters")
        if "${" in text:
            raise UnresolvedError(f"has more than {MAX_DEPTH} references or one that does not end")
        return text

    def _evaluated(self, expression: str, here: paths.Parts, depth: int, used: set[paths.Parts] | None) -> object:
        call = CALL.fullmatch(expression)
        if call is not None:
            return called(call[1], call[2], self._environment)
        select = _SELECT.fullmatch(expression)
        if select is not None:
            return self._selected(select[1].strip(), select[3], here, depth, used)
        if not _PATH.fullmatch(expression):
            raise UnresolvedError(f"${{{expression}}} is computed by Hydra when it starts, which is not asked here")
        return self._followed_value(expression, here, depth, used)

    def _selected(self, path: str, default: str | None, here: paths.Parts, depth: int, used: set[paths.Parts] | None) -> object:
        """OmegaConf's ``oc.select``: what is there, else the default."""
        try:
            value = self._followed_value(path, here, depth, used) if _PATH.fullmatch(path) else None
        except UnsetError:
            raise
        except UnresolvedError:
            value = None
        return value if value is not None or default is None else called("oc.decode", default, self._environment)

    def _followed_value(self, expression: str, here: paths.Parts, depth: int, used: set[paths.Parts] | None) -> object:
        found = self._target(expression, here, depth, used)
        if used is not None and not isinstance(found.node, (dict, list)):
            used.add(found.parts)
        if isinstance(found.node, str) and "${" in found.node:
            if depth + 1 >= MAX_DEPTH:
                raise UnresolvedError(f"${{{expression}}} leads through more than {MAX_DEPTH} references, perhaps in a circle")
            return self._filled(found.node, found.parts, depth + 1, used)
        return found.node


def _child(node: object, part: str | int) -> object:
    if isinstance(node, dict):
        return node.get(part, _MISSING)
    if isinstance(node, list) and isinstance(part, int) and part < len(node):
        return node[part]
    return _MISSING


def leaves(data: object, parts: paths.Parts = ()) -> Iterator[tuple[paths.Parts, object]]:
    """Every scalar, empty list and empty map with its path, in file order."""
    stack: list[tuple[paths.Parts, object]] = [(parts, data)]
    while stack:
        here, node = stack.pop()
        if isinstance(node, dict) and node:
            stack.extend((((*here, key), value) for key, value in reversed(list(node.items()))))
        elif isinstance(node, list) and node:
            stack.extend(((*here, index), item) for index, item in reversed(list(enumerate(node))))
        else:
            yield here, node


def read(text: str, framework: str, *, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Source:
    """The one document of a text, with the files that its defaults list names.

    Args:
        text: the configuration.
        framework: its name, for messages.
        folder: where the file lies; None where only its text is there.
        environment: what ``${oc.env:..}`` asks; empty when None.

    Raises:
        SpecInvalidError: not YAML, empty, several documents, not a map, already an RLJob, or a file that it names is not there.
    """
    documents = yaml_text.load(text)
    if len(documents) != 1 or not isinstance(documents[0].data, dict) or not documents[0].data:
        found = f"holds {len(documents)} documents" if len(documents) != 1 else "is not a map with keys"
        raise SpecInvalidError([FieldError(path="", problem=f"the file {found}", remedy=f"give one {framework} configuration in YAML")])
    document = documents[0]
    assert isinstance(document.data, dict)
    if document.data.get("kind") == "RLJob":
        raise SpecInvalidError([FieldError(path="kind", value=show("RLJob"), problem="is a manifest already", remedy="use it as it is")])
    variables = environment or {}
    own = Source(hydra.Composed(data=document.data, lines=document.lines), variables)
    composed = hydra.compose(document, folder, own.filled_search_path)
    source = Source(composed, variables)
    for error in composed.errors:
        source.text_problem(error)
    return source
