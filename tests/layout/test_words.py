"""Words that are not used here, and what is written instead; see docs/glossary.md."""

import re
from collections.abc import Iterator

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
    r"\bdrawn (?:tokens?|responses?|samples?|from)\b": "sampled, generated",
    "misspelt": "misspelled",
    "learnt": "learned",
    "honour": "honor",
    "centred": "centered",
    r"labelled(?!by)": "labeled",
}
EVERYWHERE = re.compile("|".join(WORDS), re.IGNORECASE)
NEEDED = {max(re.split(r"\\b|[a-z]\?|\(.*", word), key=len) for word in WORDS}
"""Plain text without which none of them is there: few files contain any, and looking for these costs a tenth of the search for words."""
NAME = re.compile(r"\bdef \w+")
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


def words_in(text: str) -> list[re.Match[str]]:
    small = text.lower()
    return list(EVERYWHERE.finditer(text)) if any(needed in small for needed in NEEDED) else []


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Line and sentence for each word; the words of a function's name are looked at as well."""
    places = {match.start(): match[0] for match in words_in(text)}
    names = list(NAME.finditer(text))
    if words_in("\n".join(name[0].replace("_", " ") for name in names)):
        for name in names:
            places |= {name.start() + match.start(): match[0] for match in words_in(name[0].replace("_", " "))}
    for begin, word in sorted(places.items()):
        if not VALUE_OF_THE_API.fullmatch(word):
            instead = next(good for bad, good in WORDS.items() if re.fullmatch(bad, word, re.IGNORECASE))
            yield text.count("\n", 0, begin) + 1, f"{word!r}; write {instead!r}"


def test_words_that_are_not_used() -> None:
    found = []
    for file in repository_files():
        path = str(file.relative_to(ROOT))
        text = "" if is_excepted(path) else text_of(file) or ""
        found += [f"{path}:{line}: {problem}" for line, problem in problems(text)]
    assert found == []


def test_the_gate_reads_names() -> None:
    text = "# colored\ndef test_a_lock_made_anew(told: int) -> None:\n    honored_for_good_reason = told\n"
    assert [(line, problem.partition(";")[0]) for line, problem in problems(text)] == [(2, "'anew'"), (2, "'told'"), (3, "'told'")]


def test_every_word_is_found() -> None:
    assert len(NEEDED) == len(WORDS)
    examples = "behaviour colour neighbour hopeless valuing anew strays for_good step_aside last_word shall told drawn_token misspelt"
    for word in [*examples.split(), "is_told", "learnt", "honour", "centred", "labelled", "drawn_from", "steps_aside"]:
        assert list(problems(f"def test_{word.upper()}(): ...")), word
