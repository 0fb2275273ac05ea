"""The license is the repository's, and every distribution carries it: a wheel can only hold files of its own folder."""

import tomllib

import pytest

from tests.layout.tree import MEMBERS, ROOT


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "Copyright The RLJob authors" in text


@pytest.mark.parametrize("folder", MEMBERS)
def test_every_distribution_carries_it(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
