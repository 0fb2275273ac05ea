"""Mistakes in YAML are explained alike whichever parser PyYAML was built with; all words are in tests/golden/invalid/syntax.yaml."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_api.reading import yaml_words
from rljob_api.reading.yaml_words import Unreadable

CASES = {
    "tab": ("a:\n\t- b\n", 2, "tab"),
    "tab after a value": ("a:\n  b: 1\n\tc: 2\n", 3, "tab"),
    "character": ("a: `b\n", 1, 'begin with "`"'),
    "alias": ("a: *b\n", 1, "alias"),
    "second colon": ("a: b: c\n", 1, "second colon"),
    "no colon": ("a: 1\nb\nc: 2\n", 2, '"b" has no colon'),
    "no colon above": ("a:\n  b\n  # a comment\n\n  c: 1\n", 2, '"b" has no colon'),
    "no space after a dash": ("l:\n-a: 1\n b: 2\n", 2, "space after its dash"),
    "indented too far": ("l:\n- a: 1\n    b: 2\n", 3, "further than that of line 2"),
    "key beside a list": ("a:\n  - b\n  c: 1\n", 3, "list that begins in line 2"),
    "keys of other columns": ("- a: 1\n  b: 2\n c: 3\n", 3, "no entry"),
    "brace": ("a: {b: 1\nc: 2\n", 2, "{ of line 1, column 4"),
    "bracket": ("a: [1, 2\nc: 2\n", 2, "[ of line 1, column 4"),
    "comma of JSON": ('{"a": 1,\n "b": ["x",\n "y" "z"]\n}\n', 3, "[ of line 2, column 7"),
    "quote": ('a: "b\nc: d\n', 1, "quote"),
    "text after a quote": ('a: "b" c\n', 1, "follows a value"),
    "escape": ('a: "C:\\data"\n', 1, "backslash"),
    "quote inside a quote": ("a: 'it's'\n", 1, "follows a value"),
    "quote that ends at the next one": ('a: "b\nc: "d"\n', 1, "a quote that begins here"),
    "bracket without a value": ("a: [\n---\nb: 1\n", 2, "a value is expected"),
    "template block": ("{% if x %}\na: 1\n{% endif %}\n", 1, "template"),
    "template value": ("a: {{ b }}/c\n", 1, "template"),
    "template line": ("a: 1\n{{- if .Values.b }}\nc: 2\n", 2, "template"),
    "no template": ('a: "{{ b }}" c\n', 1, "follows a value"),
    "Markdown": ("```yaml\na: 1\n```\n", 1, "Markdown"),
    "wildcard": ("a: *.jsonl\n", 1, "alias"),
    "anchor given twice": ("a: &x 1\nb: &x 2\n", 2, "defined before"),
    "dash after a key": ("a: - b\n", 1, "line of its key"),
    "dashes of other columns": ("a:\n  - b\n - c\n", 3, "section that begins in line 1"),
    "second document": ('{"a": 1}\n{"b": 2}\n', 2, "end of the document"),
    "key beside document start": ("a: 1\n--- b: 2\n", 2, "line of ---"),
    "byte order mark": ("\ufeffa: b: c\n", 1, "second colon"),
    "line of 5,000 characters": (f"a: 1\n{'b' * 5000}\nc: 2\n", 2, "has no colon"),
    "other line ends": ("a: 1\r\n\u2028b: 2\rc\x85d: 3\n", 4, '"c" has no colon'),
}


def explained(text: str, loader: type) -> Unreadable | None:
    """None of a text that is YAML."""
    try:
        list(yaml.compose_all(text, Loader=loader))
    except yaml.MarkedYAMLError as error:
        return yaml_words.explain(error, text)
    return None


@pytest.mark.parametrize("loader", [yaml.SafeLoader, pytest.param(getattr(yaml, "CSafeLoader", None), id="CSafeLoader")])
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_line(name: str, loader: type) -> None:
    text, line, words = CASES[name]
    found = explained(text, loader)
    assert found is not None
    assert found.line == line
    assert words in found.problem


@given(st.lists(st.sampled_from([*":-{}[]'\"\t\n\r #*&!|>@,ab\\\x85", "\n  ", "a: ", "- "]), max_size=24).map("".join))
@example("a: [\n")
def test_every_error_has_an_explanation(text: str) -> None:
    try:
        list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.reader.ReaderError:
        pass
    except yaml.MarkedYAMLError as error:
        found = yaml_words.explain(error, text)
        assert found is not None
        assert found.problem
        assert found.remedy
        assert 1 <= found.line <= text.count("\n") + text.count("\r") + text.count("\x85") + 1
