"""The one switch for golden files."""

from pathlib import Path

from tests.support.golden import Golden


def test_a_difference_is_shown_and_only_the_switch_rewrites_the_file(tmp_path: Path):
    compared, rewritten = Golden(updating=False).differences, Golden(updating=True).differences
    path = tmp_path / "new" / "case.txt"
    assert compared(path, "new\n") == f"{path} is missing: run this test with --update-goldens and review the file"
    assert rewritten(path, "old\n") == ""
    assert compared(path, "old\n") == ""
    shown = compared(path, "new\n")
    assert shown.startswith(f"{path} holds another text; --update-goldens rewrites it\n")
    assert shown.endswith("-old\n+new\n")
    assert path.read_text() == "old\n"
