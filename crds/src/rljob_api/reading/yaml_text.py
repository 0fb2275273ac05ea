"""YAML text to plain data, without YAML 1.1's surprises. All problems at once, with lines.

PyYAML's parser gives the tree; this module gives it meaning, because PyYAML would read ``ranks: 1:0`` as 60, ``010`` as 8,
``no`` as false and ``1e-3`` as text. JSON is YAML and reads the same.

Bounds: :data:`MAX_BYTES` of text, :data:`MAX_DEPTH` levels, :data:`MAX_VALUES` values after aliases are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from rljob_api import paths
from rljob_api.errors import FieldError, SpecInvalidError, show
from rljob_api.reading import yaml_words

MAX_BYTES = 1_048_576
MAX_VALUES = 50_000
MAX_DEPTH = 64

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML was built with it: ten times faster, same trees."""
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?)")
_OCTAL = re.compile(r"[-+]?0o[0-7]+")
"""Text in YAML 1.1, a number in YAML 1.2."""
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")
_BOOL = {"true": True, "false": False}
_QUOTE = "write it in quotes if it is text"


@dataclass(slots=True)
class YamlDocument:
    """One document of the text."""

    data: object
    lines: dict[paths.Parts, int]
    """Line of every value (of its key, inside a map), counted from 1."""
    errors: list[FieldError] = field(default_factory=list)
    """What was read but means something else than it seems to; ``data`` holds the text there."""


def load(text: str) -> list[YamlDocument]:
    """All documents of a text that are not empty.

    Raises:
        SpecInvalidError: the text is not YAML, or larger than the bounds.
    """
    size = len(text.encode("utf-8", errors="replace"))
    if size > MAX_BYTES:
        raise _fatal(None, f"has {size} bytes, more than {MAX_BYTES}", "a manifest is far smaller; is this the right file?")
    try:
        _check_depth(text)
        nodes = [node for node in yaml.compose_all(text, Loader=_Loader) if node is not None]
    except yaml.MarkedYAMLError as error:
        raise _unreadable(error, text) from None
    except yaml.reader.ReaderError as error:
        raise _not_text(error, text) from None
    documents = [_Builder().build(node) for node in nodes]
    return [document for document in documents if document.data is not None or document.errors]


def _unreadable(error: yaml.MarkedYAMLError, text: str) -> SpecInvalidError:
    found = yaml_words.explain(error, text)
    if found is None:
        return _fatal(None, f"is not YAML: {error.problem}", "check indentation, colons and quotes")
    column = f", column {found.column}" if found.column is not None else ""
    return _fatal(found.line, f"line {found.line}{column}: is not YAML: {found.problem}", found.remedy)


def _not_text(error: yaml.reader.ReaderError, text: str) -> SpecInvalidError:
    """A character that YAML does not allow, such as a control character; ``error.character`` is its code point."""
    line = text[: max(text.find(chr(error.character)), 0)].count("\n") + 1
    problem = f"line {line}: is not YAML: character U+{error.character:04X} is not allowed"
    return _fatal(line, problem, "remove it, and save the file as UTF-8 text")


def _fatal(line: int | None, problem: str, remedy: str) -> SpecInvalidError:
    return SpecInvalidError([FieldError(path="", problem=f"the manifest {problem}" if line is None else problem, remedy=remedy, line=line)])


def _check_depth(text: str) -> None:
    """Refuse deep nesting from the flat event stream: building the tree would recurse."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 0
            raise _fatal(line, f"line {line}: is nested more than {MAX_DEPTH} levels deep", "a manifest is far flatter; check the brackets")


class _Builder:
    """Turns one node tree into data."""

    def __init__(self) -> None:
        self._lines: dict[paths.Parts, int] = {}
        self._errors: list[FieldError] = []
        self._num_values = 0
        self._open: set[int] = set()
        """Collections being built; meeting one again means that an alias contains itself."""

    def build(self, node: yaml.Node) -> YamlDocument:
        data = self._value(node, (), node)
        return YamlDocument(data=data, lines=self._lines, errors=self._errors)

    def _problem(self, parts: paths.Parts, node: yaml.Node, value: object, problem: str, remedy: str) -> None:
        line = node.start_mark.line + 1
        shown = None if value is None else str(value)
        self._errors.append(FieldError(path=paths.join(parts), value=shown, problem=problem, remedy=remedy, line=line))

    def _value(self, node: yaml.Node, parts: paths.Parts, at: yaml.Node) -> object:
        """The data of a node; ``at`` is where it is written (its key, inside a map)."""
        line = at.start_mark.line + 1
        self._lines[parts] = line
        self._num_values += 1
        if self._num_values > MAX_VALUES or len(parts) > MAX_DEPTH:
            raise _fatal(line, f"line {line}: aliases or lists expand to more than {MAX_VALUES} values", "a manifest is far smaller")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, parts)
        if id(node) in self._open:
            raise _fatal(line, f"line {line}: an alias contains itself", "write the value out")
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._problem(parts, node, node.tag, "is a tag that manifests do not use", "remove the tag")
        self._open.add(id(node))
        data: object
        if isinstance(node, yaml.SequenceNode):
            data = [self._value(item, (*parts, index), item) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            data = self._mapping(node, parts)
        else:
            raise TypeError(f"unknown YAML node {node!r}")
        self._open.discard(id(node))
        return data

    def _mapping(self, node: yaml.MappingNode, parts: paths.Parts) -> dict[str, object]:
        data: dict[str, object] = {}
        merged: dict[str, object] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                for source in self._merge_sources(value_node, parts):
                    for key, value in self._mapping(source, parts).items():
                        merged.setdefault(key, value)
                continue
            key = self._key(key_node, parts)
            here = (*parts, key)
            if key in data:
                problem = f"is given twice, first in line {self._lines[here]}"
                self._problem(here, key_node, None, problem, "keep one of them")
                continue
            data[key] = self._value(value_node, here, key_node)
        return {**merged, **data}

    def _merge_sources(self, node: yaml.Node, parts: paths.Parts) -> Iterator[yaml.MappingNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            self._num_values += 1
            if isinstance(source, yaml.MappingNode) and id(source) not in self._open and self._num_values <= MAX_VALUES:
                yield source
            else:
                self._problem((*parts, "<<"), node, None, "merges something that is not a map", "write the keys out")

    def _key(self, node: yaml.Node, parts: paths.Parts) -> str:
        if not isinstance(node, yaml.ScalarNode):
            is_template = isinstance(node, yaml.MappingNode) and node.flow_style
            remedy = "render the template first, or write {{ }} in quotes" if is_template else "keys are text"
            self._problem(parts, node, None, "has a list or map as a key", remedy)
            return show(str(node.tag))
        if node.tag != f"{_TAG}str":
            problem = f"is read as {_kind(node.tag)}, but keys are text"
            self._problem((*parts, node.value), node, None, problem, "write it in quotes")
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode, parts: paths.Parts) -> object:
        text: str = node.value
        if any("\ud800" <= char <= "\udfff" for char in text):
            self._problem(parts, node, None, "contains half of a surrogate pair", "write the character itself")
            return ""
        if node.style in _QUOTED_STYLES or node.tag not in _PLAIN_TAGS:
            if node.tag not in (f"{_TAG}str", *_PLAIN_TAGS):
                self._problem(parts, node, node.tag, "is a tag that manifests do not use", "remove the tag")
            return text
        if node.tag == f"{_TAG}null":
            return None
        if text.lower() in _BOOL and node.tag == f"{_TAG}bool":
            return _BOOL[text.lower()]
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text) and not _LEADING_ZERO.match(text):
            return self._float(node, parts)
        if node.tag in _TEXT_TAGS and not _OCTAL.fullmatch(text):
            return text
        self._problem(parts, node, text, f"YAML reads this as {_surprise(node)}", _remedy(node))
        return text

    def _float(self, node: yaml.ScalarNode, parts: paths.Parts) -> float | str:
        number = float(node.value)
        if abs(number) == float("inf"):
            self._problem(parts, node, node.value, "is too large for a number", "use a smaller number")
            return str(node.value)
        return number


_QUOTED_STYLES = ("'", '"', "|", ">")
_TEXT_TAGS = (f"{_TAG}str", f"{_TAG}merge", f"{_TAG}value")
"""The last two are << and =, special as keys only."""
_PLAIN_TAGS = tuple(f"{_TAG}{name}" for name in ("str", "null", "bool", "int", "float", "timestamp", "merge", "value"))


def _kind(tag: str) -> str:
    kinds = {"int": "a number", "float": "a number", "bool": "true or false", "null": "null", "timestamp": "a date"}
    return kinds.get(tag.removeprefix(_TAG), tag)


def _surprise(node: yaml.ScalarNode) -> str:
    """What a plain scalar means in YAML 1.1 although it does not look like it."""
    text = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind == "bool":
        return "true" if text.lower() in ("yes", "on") else "false"
    if kind == "timestamp":
        return "a date"
    if kind == "int":
        value = yaml.constructor.SafeConstructor().construct_yaml_int(node)
        return f"the number {value}" + (", in base 60" if ":" in text else "")
    is_finite = "inf" not in text.lower() and "nan" not in text.lower()
    return "a number in a form that other tools read differently" if is_finite else "a number that is not finite"


def _remedy(node: yaml.ScalarNode) -> str:
    if node.tag == f"{_TAG}bool":
        return f"write {'true' if node.value.lower() in ('yes', 'on') else 'false'}, or {_QUOTE}"
    return f"{_QUOTE}, else as a plain decimal number"
