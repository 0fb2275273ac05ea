"""What a YAML parser could not read, in words that say what to change.

libyaml and PyYAML's own parser name the token that they did not expect, often a line after the mistake. The mistakes below are
recognized by the text around the parser's marks; of others the parser's words are passed on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from rljob_api.errors import show

_COLON = re.compile(r":(\s|$)")
"""What makes the text before it a key."""
_DASHES = re.compile(r"(-\s+)*")
_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""As YAML 1.1 counts lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why a text is not YAML."""

    line: int
    """Line of the mistake, counted from 1."""
    column: int | None
    """Column, counted from 1; None where the mistake is the line's, not that of a character."""
    problem: str
    remedy: str


def explain(error: yaml.MarkedYAMLError, text: str) -> Unreadable | None:
    """The mistake behind an error of the parser; None of an error without a place."""
    at, begun = error.problem_mark or error.context_mark, error.context_mark
    if at is None:
        return None
    lines, found = _LINE_END.split(text), str(error.problem)
    line = lines[at.line] if at.line < len(lines) else ""
    if "\t" in (line[at.column : at.column + 1] or line[:1]) and ("tab" in found or "cannot start any token" in found):
        return _place(at, "there is a tab where only spaces can be", "indent with spaces")
    if "cannot start any token" in found:
        return _place(at, f"no value can begin with {show(line[at.column : at.column + 1])}", "write the value in quotes")
    if "undefined alias" in found:
        return _place(at, "an alias names an anchor that is not defined before it", "write a value that begins with * in quotes")
    if "mapping values are not allowed" in found:
        return _surplus_colon(at, lines)
    if "':'" in found and begun is not None and "simple key" in str(error.context):
        return _without_colon(begun.line, lines)
    if begun is not None and "flow" in str(error.context):
        opening, closing = ("{", "}") if "mapping" in str(error.context) else ("[", "]")
        problem = f"neither a comma nor {closing} follows in the {opening} of line {begun.line + 1}, column {begun.column + 1}"
        return _place(at, problem, f"add a comma, {closing}, or a missing quote before this place")
    if begun is not None and "unexpected end of stream" in found and "quoted" in str(error.context):
        return _place(begun, "the quote that begins here does not end", "add the closing quote")
    if "escape character" in found:
        return _place(at, "a backslash in double quotes begins an escape that YAML does not have", "use single quotes, or write \\\\")
    if begun is not None and "block" in str(error.context) and "node" not in str(error.context):
        return _ended_block(at, begun, lines, is_list="collection" in str(error.context))
    context = f" {error.context}" if error.context else ""
    return _place(at, f"{found}{context}", "check indentation, colons and quotes there")


def _place(at: yaml.Mark, problem: str, remedy: str) -> Unreadable:
    return Unreadable(line=at.line + 1, column=at.column + 1, problem=problem, remedy=remedy)


def _surplus_colon(at: yaml.Mark, lines: Sequence[str]) -> Unreadable:
    """A key stands where the value of the line before goes on: that line has no colon, or this one is indented too far."""
    line, before = lines[at.line], _line_before(at.line, lines)
    if ": " in line[_start(line) : at.column]:
        return _place(at, "there is a second colon in one line", "write a value that contains a colon and a space in quotes")
    if before is None:
        return _place(at, "no key can be here", "check indentation, colons and quotes there")
    if _COLON.search(lines[before], _start(lines[before])) is None or _lacks_space(lines[before].strip()):
        return _without_colon(before, lines)
    problem = f"the key here is indented further than that of line {before + 1}, which has a value already"
    return Unreadable(line=at.line + 1, column=None, problem=problem, remedy="begin both keys in the same column")


def _without_colon(number: int, lines: Sequence[str]) -> Unreadable:
    text = lines[number].strip()
    if _lacks_space(text):
        return Unreadable(line=number + 1, column=None, problem=f"{show(text)} has no space after its dash", remedy=f"write - {text[1:]}")
    if ":" in text:
        return Unreadable(line=number + 1, column=None, problem=f"{show(text)} has no space after its colon", remedy="write KEY: VALUE")
    return Unreadable(line=number + 1, column=None, problem=f"{show(text)} has no colon", remedy="write KEY: VALUE")


def _lacks_space(text: str) -> bool:
    """Whether a line begins with a dash that makes no entry of a list."""
    return re.match(r"-[^-\s]", text) is not None


def _ended_block(at: yaml.Mark, begun: yaml.Mark, lines: Sequence[str], *, is_list: bool) -> Unreadable:
    """A block of keys or entries ended where something else than its next key or entry follows."""
    line, before = lines[at.line] if at.line < len(lines) else "", _line_before(at.line, lines)
    if before is not None and _indent(lines[before]) == at.column and lines[before].strip().replace(" ", "").isalnum():
        return _without_colon(before, lines)
    if at.column > _indent(line):
        return _place(at, "something follows a value that has ended", "put the whole value in quotes, or remove what follows")
    start = f"begins in line {begun.line + 1}, column {begun.column + 1}"
    if is_list:
        problem, remedy = "is no entry of the list that", "begin entries with a dash in the same column, and their keys below the first one"
    else:
        problem, remedy = "is no key of the section that", "begin keys in the same column"
    return _place(at, f"this line {problem} {start}", remedy)


def _line_before(number: int, lines: Sequence[str]) -> int | None:
    """Index of the nearest line above that is neither empty nor a comment."""
    above = range(number - 1, -1, -1)
    return next((index for index in above if lines[index].strip() and not lines[index].lstrip().startswith("#")), None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _start(line: str) -> int:
    """Index of the first character after indentation and dashes."""
    indent = _indent(line)
    dashes = _DASHES.match(line, indent)
    return dashes.end() if dashes is not None else indent
