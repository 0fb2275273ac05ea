"""Shell commands on the pages: those in blocks of commands, with what they read from a here-document, and those between backticks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.layout.tree import ROOT
from tests.support.snippets import PAGES, Snippet, snippets

_HERE = re.compile(r"<<'?(\w+)'?")
_ENDS = frozenset({"&&", "||", "|", ";", "&"})
_REDIRECTIONS = frozenset({">", ">>", "<", "<<", "<<<", "2>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellLine:
    """One command."""

    where: str
    words: tuple[str, ...]
    stdin: str = ""
    """Its here-document."""

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def shell_lines(program: str) -> list[ShellLine]:
    """Commands of a program on all pages, without changelog entries, which may be about what no longer exists."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = [line for page in pages for snippet in snippets(page) if snippet.language in ("", "bash") for line in of_block(snippet)]
    for page in pages:
        text = re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for match in re.finditer(rf"`({program} [^`]+)`", text):
            where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            found += [ShellLine(where=where, words=words) for words in commands(match[1])]
    return [line for line in found if line.words[0] == program and len(line.words) > 1]


def of_block(snippet: Snippet) -> Iterator[ShellLine]:
    """Commands of a block; the bodies of its here-documents are no commands."""
    lines = iter(snippet.text.replace("\\\n", " ").splitlines())
    for line in lines:
        here = _HERE.search(line)
        body: list[str] = []
        if here:
            for text in lines:
                if text == here[1]:
                    break
                body.append(text)
        # What a page shows of a command's output need not be words of a shell.
        if re.match(r"(\$ )?(for .* do )?(helm|kubectl) ", line):
            for words in commands(line.removeprefix("$ ")):
                yield ShellLine(where=str(snippet), words=words, stdin="".join(f"{text}\n" for text in body))


def commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line, without redirections.

    Raises:
        ValueError: a quotation has no end.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for word in [*lexer, ";"]:
        if word in _ENDS:
            if words:
                yield tuple(words)
            words = []
        elif is_target or word in _REDIRECTIONS:
            is_target = not is_target
        elif word != "do":
            words.append(word)
