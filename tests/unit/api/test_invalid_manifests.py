"""One failing manifest per rule, with the exact text a user reads: the tables under tests/golden/invalid."""

import functools
import pickle
from pathlib import Path

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from tests.support import invalid_manifests
from tests.support.golden import Golden
from tests.support.invalid_manifests import InvalidManifest

CASES = {case.name: (table, case) for table in invalid_manifests.tables() for case in invalid_manifests.read(table)}


def problems(case: InvalidManifest) -> SpecInvalidError:
    with pytest.raises(SpecInvalidError) as caught:
        check(case.manifest())
    return caught.value


def messages(error: SpecInvalidError) -> str:
    return "".join(f"{problem.line or '-'}: {problem}\n" for problem in error.errors)


@functools.cache
def update(table: Path) -> dict[str, InvalidManifest]:
    """The cases after all messages of the file were written."""
    invalid_manifests.write_messages(table, lambda case: messages(problems(case)))
    return {case.name: case for case in invalid_manifests.read(table)}


@pytest.mark.parametrize("name", CASES)
def test_the_messages_are_the_golden_ones(name: str, golden: Golden) -> None:
    table, case = CASES[name]
    if golden.updating:
        case = update(table)[name]
    error = problems(case)
    assert messages(error) == case.messages
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # it crosses processes


def test_no_name_is_given_twice() -> None:
    names = [case.name for table in invalid_manifests.tables() for case in invalid_manifests.read(table)]
    assert sorted(names) == sorted(CASES)


def test_writing_messages_leaves_the_rest_of_the_file_as_it_stands(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    before = """# Two cases.

- name: one # a comment
  text: |
    {base}

    more
  messages: |
    old
    old, too

- name: two
  set: {spec.image: x}
  messages: |
"""
    table.write_text(before)
    invalid_manifests.write_messages(table, lambda case: f"1: {case.name}\n")
    assert table.read_text() == before.replace("    old\n    old, too\n", "    1: one\n") + "    1: two\n"
