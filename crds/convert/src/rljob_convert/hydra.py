"""Hydra's defaults lists: one configuration out of several files, with the file and the line of every value.

Follows https://hydra.cc/docs/1.3/advanced/defaults_list/: files are merged in the order of the list, the file itself where ``_self_``
stands, else last; an entry ``group/file@package`` lies in ``group/file.yaml`` beside the file that names it (or on ``hydra.searchpath``)
and is merged at ``package``, without one at the place that its group names. Entries about ``hydra/..`` configure Hydra itself and are
skipped.

Own code, not hydra-core: that composes without lines, so no note could say where a value is written, imports every installed plugin, reads
packages of Python's path, and keeps global state. ``python -m bench.upstream`` compares both on every upstream example.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rljob_api import paths
from rljob_api.errors import FieldError, SpecInvalidError, show
from rljob_api.reading import yaml_text

MAX_FILES = 64
"""Files of one configuration."""
MAX_DEPTH = 8
"""Files that name each other."""
MAX_VALUES = 200_000
"""Values of all files together, each counted as often as it is merged."""
_HEADER = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_ENTRY = re.compile(r"(?P<optional>optional\s+)?(?P<path>/?[\w.\-/]+)(@(?P<package>[\w.\-]+))?")
Fill = Callable[[str], str]
"""Fills the references of a search path."""


@dataclass(slots=True, kw_only=True)
class Composed:
    """One configuration."""

    data: dict[str, object] = field(default_factory=dict)
    lines: dict[paths.Parts, int] = field(default_factory=dict)
    files: dict[paths.Parts, str] = field(default_factory=dict)
    """The file of what is not written in the first one, as the defaults list names it."""
    errors: list[FieldError] = field(default_factory=list)
    """What YAML reads otherwise than it seems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One line of a defaults list."""

    where: paths.Parts
    path: str
    package: str | None
    is_optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file that is being merged."""

    name: str
    """From the first file's folder; empty of the first file."""
    group: str
    """Its folder, seen from the first file's."""
    package: paths.Parts
    """Where it is merged."""


def compose(document: yaml_text.YamlDocument, folder: Path | None, fill: Fill) -> Composed:
    """Follow the defaults list of a document.

    Args:
        document: the first file, a map.
        folder: where it lies; None when only its text is there, and then nothing beside it can be read.
        fill: gives a search path with its references filled in.

    Raises:
        SpecInvalidError: a file that is named is not there, or cannot be read; a form of entry that is not followed.
    """
    composer = _Composer(folder, fill)
    composer.merge(document, _File(name="", group="", package=()), 0)
    return composer.result


class _Composer:
    """Merges files into one configuration."""

    def __init__(self, folder: Path | None, fill: Fill) -> None:
        self.result = Composed()
        self._roots = [] if folder is None else [folder]
        self._has_folder = folder is not None
        self._fill = fill
        self._num_files = 0
        self._num_values = 0

    def merge(self, document: yaml_text.YamlDocument, file: _File, depth: int) -> None:
        data = document.data
        assert isinstance(data, dict)
        self.result.errors += document.errors
        if not depth:
            self._search_paths(data)
        entries = list(_entries(document, file))
        is_merged = False
        for entry in entries:
            if entry.path == "_self_":
                self._own(document, file)
                is_merged = True
            else:
                self._named(entry, file, document, depth)
        if not is_merged:
            self._own(document, file)

    def _search_paths(self, data: dict[str, object]) -> None:
        section = data.get("hydra")
        listed = section.get("searchpath") if isinstance(section, dict) else None
        if not self._has_folder or not isinstance(listed, list):
            return
        for item in listed:
            if isinstance(item, str) and item.startswith("file://"):
                self._roots.append(Path(self._fill(item).removeprefix("file://")))

    def _named(self, entry: _Entry, file: _File, document: yaml_text.YamlDocument, depth: int) -> None:
        path = PurePosixPath(entry.path.removeprefix("/") if entry.path.startswith("/") else f"{file.group}/{entry.path}".lstrip("/"))
        name = f"{path}.yaml" if path.suffix not in (".yaml", ".yml") else str(path)
        self._num_files += 1
        if depth >= MAX_DEPTH or self._num_files > MAX_FILES:
            problem = f"leads through more than {MAX_DEPTH} files in a row or {MAX_FILES} in all, perhaps in a circle"
            raise _refused(document, file, entry, problem, "write the composed configuration into one file")
        found = next((root / name for root in self._roots if (root / name).is_file()), None)
        if found is None:
            if entry.is_optional and self._has_folder:
                return
            raise self._missing(name, entry, file, document)
        text = _read(found, name)
        inner = _document(text, name)
        if inner is None:
            return
        package = _package(entry, file, str(path.parent) if str(path.parent) != "." else "", text)
        self.merge(inner, _File(name=name, group=str(path.parent) if str(path.parent) != "." else "", package=package), depth + 1)

    def _missing(self, name: str, entry: _Entry, file: _File, document: yaml_text.YamlDocument) -> SpecInvalidError:
        if not self._has_folder:
            problem = f"takes {name} into this configuration, and only its text was given"
            return _refused(document, file, entry, problem, "give the path of the file, so that those beside it are found")
        others = "" if len(self._roots) == 1 else f" nor on hydra.searchpath ({', '.join(str(root) for root in self._roots[1:])})"
        problem = f"takes {name} into this configuration, which is not beside the first file{others}"
        return _refused(document, file, entry, problem, f"bring {name} there, or write the composed configuration into one file")

    def _own(self, document: yaml_text.YamlDocument, file: _File) -> None:
        assert isinstance(document.data, dict)
        target: dict[str, object] = self.result.data
        for length, part in enumerate(file.package):
            inner = target.get(str(part))
            if not isinstance(inner, dict):
                inner = target[str(part)] = {}
            self._locate(document, file, (), file.package[: length + 1])
            target = inner
        for key, value in document.data.items():
            if key != "defaults":
                self._put(target, key, value, document, file, (key,))

    def _put(
        self,
        target: dict[str, object],
        key: str,
        value: object,
        document: yaml_text.YamlDocument,
        file: _File,
        parts: paths.Parts,
    ) -> None:
        """Set one key, maps key by key; whatever else was there goes."""
        before = target.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            for inner, item in value.items():
                self._put(before, inner, item, document, file, (*parts, inner))
            return
        target[key] = self._copied(value, document, file, parts)

    def _copied(self, value: object, document: yaml_text.YamlDocument, file: _File, parts: paths.Parts) -> object:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            problem = f"the files of this configuration have more than {MAX_VALUES} values"
            raise SpecInvalidError([FieldError(path="defaults", problem=problem, remedy="is this the right file?")])
        self._locate(document, file, parts, (*file.package, *parts))
        if isinstance(value, dict):
            return {key: self._copied(item, document, file, (*parts, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._copied(item, document, file, (*parts, index)) for index, item in enumerate(value)]
        return value

    def _locate(self, document: yaml_text.YamlDocument, file: _File, parts: paths.Parts, at: paths.Parts) -> None:
        if parts in document.lines:
            self.result.lines[at] = document.lines[parts]
        if file.name:
            self.result.files[at] = file.name
        else:
            self.result.files.pop(at, None)


def _entries(document: yaml_text.YamlDocument, file: _File) -> Iterator[_Entry]:
    """Lines of the defaults list that name files, and ``_self_``."""
    assert isinstance(document.data, dict)
    listed = document.data.get("defaults", [])
    if not isinstance(listed, list):
        entry = _Entry(where=("defaults",), path="", package=None, is_optional=False)
        raise _refused(document, file, entry, "is not a list", "write a list of files, or remove it")
    for index, item in enumerate(listed):
        where: paths.Parts = ("defaults", index)
        texts = [item]
        if isinstance(item, dict) and len(item) == 1:
            ((key, option),) = item.items()
            if key.startswith(("override hydra/", "hydra/", "optional hydra/")):
                continue
            options = option if isinstance(option, list) else [option]
            texts = [_of_group(key, name) for name in options if name is not None]
        for text in texts:
            if isinstance(text, str) and text.startswith("override hydra/"):
                continue
            match = _ENTRY.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                entry = _Entry(where=where, path="", package=None, is_optional=False)
                raise _refused(document, file, entry, "is an entry of a form that is not followed here", "write out what it takes in")
            yield _Entry(where=where, path=match["path"], package=match["package"], is_optional=bool(match["optional"]))


def _of_group(key: str, option: object) -> str:
    """``group@package: file`` as ``group/file@package``."""
    group, at, package = key.partition("@")
    return f"{group}/{option}{at}{package}"


def _package(entry: _Entry, file: _File, group: str, text: str) -> paths.Parts:
    """Where a named file is merged: as the entry says, else as the file's own header says, else where its group is."""
    own_group = tuple(part for part in entry.path.removeprefix("/").split("/")[:-1] if part not in ("..", "."))
    default = (*(() if entry.path.startswith("/") else file.package), *own_group)
    header = _HEADER.search(text) if entry.package is None else None
    written = entry.package or (header[1] if header else None)
    if written is None or written == "_group_":
        return default if written is None else tuple(part for part in group.split("/") if part)
    head, _, rest = written.partition(".")
    if head == "_global_":
        return tuple(rest.split(".")) if rest else ()
    if head == "_here_":
        return (*file.package, *(rest.split(".") if rest else ()))
    return (*(file.package if entry.package is not None else ()), *written.split("."))


def _read(found: Path, name: str) -> str:
    try:
        return found.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
        raise SpecInvalidError([FieldError(path=name, problem=problem, remedy="save it as UTF-8")]) from error
    except OSError as error:
        problem, remedy = f"cannot be read: {error.strerror}", "make it a readable text file"
        raise SpecInvalidError([FieldError(path=name, problem=problem, remedy=remedy)]) from error


def _document(text: str, name: str) -> yaml_text.YamlDocument | None:
    """The one map of a file; None of a file without content."""
    documents = yaml_text.load(text)
    if not documents:
        return None
    if len(documents) > 1 or not isinstance(documents[0].data, dict):
        raise SpecInvalidError([FieldError(path=name, problem="is not one map with keys", remedy="give one configuration in YAML")])
    return documents[0]


def _refused(document: yaml_text.YamlDocument, file: _File, entry: _Entry, problem: str, remedy: str) -> SpecInvalidError:
    value: object = document.data
    for part in entry.where:
        value = value[part]  # type: ignore[index]
    path = f"{file.name}: {paths.join(entry.where)}" if file.name else paths.join(entry.where)
    line = document.lines.get(entry.where)
    return SpecInvalidError([FieldError(path=path, value=show(value), problem=problem, remedy=remedy, line=line)])
