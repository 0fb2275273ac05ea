"""The one switch for golden files."""

from pathlib import Path

import pytest

from tests.support.golden import Golden


def test_a_difference_fails_and_only_the_switch_rewrites_the_file(tmp_path: Path):
    compare, rewrite = Golden(updating=False), Golden(updating=True)
    path = tmp_path / "new" / "case.txt"
    with pytest.raises(pytest.fail.Exception, match=r"case.txt is missing: run this test with --update-goldens"):
        compare(path, "new\n")
    rewrite(path, "old\n")
    compare(path, "old\n")
    with pytest.raises(AssertionError, match=r"case.txt holds another text; --update-goldens rewrites it"):
        compare(path, "new\n")
    assert path.read_text() == "old\n"
