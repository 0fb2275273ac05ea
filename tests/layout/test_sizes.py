"""Ceilings of files: 500 lines soft, 800 hard; those of functions are in test_code_rules.py."""

from tests.layout.tree import ROOT, python_files, too_long

FILE_SOFT, FILE_HARD = 500, 800


def test_files_stay_small() -> None:
    sizes = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in python_files()}
    assert too_long(sizes, FILE_SOFT, FILE_HARD) == {}
