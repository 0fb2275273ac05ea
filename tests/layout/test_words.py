"""Words that are not used here, and what is written instead; see docs/glossary.md."""

import re

from tests.layout.tree import ROOT, repository_files, text_of

WORDS = {
    "behaviour": "behavior",
    "colour": "color",
    "neighbour": "neighbor",
    r"\bhopeless\b": "too stale",
    r"\bvaluing\b": "computing values",
    r"\banew\b": "again",
    r"\bstrays\b": "orphans",
    r"\bfor good\b": "permanently",
    r"\bsteps? aside\b": "pause",
    r"\blast word\b": "decision",
    r"\bshall\b": "must",
    r"\btold\b": "called, reported",
    "is_told": "is_reported",
    "misspelt": "misspelled",
    "learnt": "learned",
    "honour": "honor",
    "centred": "centered",
    r"labelled(?!by)": "labeled",
}
VALUE_OF_THE_API = re.compile(r"\bBehaviour\b")
"""A value of the released enum ``ProximalPolicy``."""


def is_excepted(path: str) -> bool:
    """Licenses, recorded results, and this list."""
    name = path.rpartition("/")[2]
    return (
        name.startswith(("LICENSE", "NOTICE"))
        or path == "tests/layout/test_words.py"
        or re.match(r"bench/results/.*\.json$", path) is not None
    )


def test_words_that_are_not_used() -> None:
    everywhere = re.compile("|".join(WORDS), re.IGNORECASE)
    found = []
    for file in repository_files():
        path = str(file.relative_to(ROOT))
        text = "" if is_excepted(path) else text_of(file) or ""
        for match in everywhere.finditer(text):
            if not VALUE_OF_THE_API.fullmatch(match[0]):
                instead = next(good for bad, good in WORDS.items() if re.fullmatch(bad, match[0], re.IGNORECASE))
                found.append(f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; write {instead!r}")
    assert found == []
