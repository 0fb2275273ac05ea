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
_TEMPLATE = re.compile(r"(^|[:-]\s)\s*\{[{%].*[%}]\}")
"""Jinja's and Go's (Helm's) templates, outside quotes."""


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
    lines, found, context = _LINE_END.split(text), str(error.problem), str(error.context or "")
    line = lines[at.line] if at.line < len(lines) else ""
    if _TEMPLATE.search(line):
        return _template(at.line)
    if (common := _one_character(at, line, found, context)) is not None:
        return common
    if "mapping values are not allowed" in found:
        return _surplus_colon(at, lines)
    if "':'" in found and begun is not None and "simple key" in context:
        return _without_colon(begun.line, lines)
    if "flow node" in context:
        return _place(at, "a value is expected here, inside [ ] or { }", "add the value, or the closing ] or }")
    if begun is not None and "flow" in context:
        opening, closing = ("{", "}") if "mapping" in context else ("[", "]")
        problem = f"neither a comma nor {closing} follows in the {opening} of line {begun.line + 1}, column {begun.column + 1}"
        return _place(at, problem, f"add a comma, {closing}, or a missing quote before this place")
    if begun is not None and "unexpected end of stream" in found and "quoted" in context:
        return _place(begun, "the quote that begins here does not end", "add the closing quote")
    if "duplicate anchor" in context:
        return _place(at, "an anchor of this name is defined before", "give it another name")
    if begun is not None and "block" in context and "node" not in context:
        return _ended_block(at, begun, lines, is_list="collection" in context)
    if "document start" in found:
        return _place(at, "something follows the end of the document", "remove what follows, or write a line with --- before it")
    return _place(at, f"{found} {context}".rstrip(), "check indentation, colons and quotes there")


def _one_character(at: yaml.Mark, line: str, found: str, context: str) -> Unreadable | None:
    """Mistakes that the character at the mark explains."""
    if "\t" in (line[at.column : at.column + 1] or line[:1]) and ("tab" in found or "cannot start any token" in found):
        return _place(at, "there is a tab where only spaces can be", "write spaces instead")
    if "cannot start any token" in found and line.startswith("```"):
        return Unreadable(line=at.line + 1, column=None, problem="a line of three backquotes is Markdown", remedy="remove it")
    if "cannot start any token" in found:
        return _place(at, f"no value can begin with {show(line[at.column : at.column + 1])}", "write the value in quotes")
    if "undefined alias" in found:
        return _place(at, "an alias names an anchor that is not defined before it", "write a value that begins with * in quotes")
    if "scanning an alias" in context or "scanning an anchor" in context:
        return _place(at, "a value that begins with * or & is an alias or an anchor, and no name follows", "write the value in quotes")
    if "sequence entries are not allowed" in found:
        return _place(
            at, "a list cannot begin in the line of its key", "begin each entry with a dash in a line of its own, or write [a, b]"
        )
    if "escape character" in found:
        return _place(at, "a backslash in double quotes begins an escape that YAML does not have", "use single quotes, or write \\\\")
    return None


def _place(at: yaml.Mark, problem: str, remedy: str) -> Unreadable:
    return Unreadable(line=at.line + 1, column=at.column + 1, problem=problem, remedy=remedy)


def _template(number: int) -> Unreadable:
    return Unreadable(line=number + 1, column=None, problem="this line is part of a template", remedy="render the template first")


def _surplus_colon(at: yaml.Mark, lines: Sequence[str]) -> Unreadable:
    """A key stands where the value of the line before goes on: that line has no colon, or this one is indented too far."""
    line, before = lines[at.line], _line_before(at.line, lines)
    if line.startswith("--- "):
        return _place(at, "a key follows in the line of ---", "begin the document in the next line")
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
    if _TEMPLATE.search(text):
        return _template(number)
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
        return _after_value(at, lines)
    start = f"begins in line {begun.line + 1}, column {begun.column + 1}"
    if is_list:
        problem, remedy = "is no entry of the list that", "begin entries with a dash in the same column, and their keys below the first one"
    elif line.lstrip().startswith("- "):
        problem, remedy = "is no key of the section that", "begin all dashes of a list in the same column"
    else:
        problem, remedy = "is no key of the section that", "begin keys in the same column"
    return _place(at, f"this line {problem} {start}", remedy)


def _after_value(at: yaml.Mark, lines: Sequence[str]) -> Unreadable:
    """Something follows a value that has ended: a quote where none was meant to end, or that was meant to end in an earlier line."""
    problem, before = "something follows a value that has ended", lines[at.line][: at.column].rstrip()
    quote = before[-1:]
    if quote not in ("'", '"'):
        return _place(at, problem, "put the whole value in quotes, or remove what follows")
    if before.count(quote) % 2:
        above = next((number for number in range(at.line - 1, -1, -1) if lines[number].count(quote) % 2), None)
        if above is not None:
            return Unreadable(
                line=above + 1, column=None, problem="a quote that begins here ends in a later line", remedy="add the closing quote"
            )
    inner = "''" if quote == "'" else '\\"'
    return _place(at, problem, f"remove what follows, or write {inner} for a quote inside the value")


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
