"""Distributions, chart, images and the tags that pages and examples name have one version."""

import re
import tomllib

import yaml

from tests.layout.tree import MEMBERS, ROOT, repository_files, text_of

VERSION = tomllib.loads((ROOT / "crds" / "pyproject.toml").read_text())["project"]["version"]
TAG = re.compile(r"/rljob-(?:operator|runtime(?:-sglang)?):(\d[\w.]*)")


def test_every_distribution_has_it() -> None:
    versions = {folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["version"] for folder in MEMBERS}
    assert versions == dict.fromkeys(MEMBERS, VERSION)


def test_the_chart_and_the_labels_of_the_images_have_it() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "rljob" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    labels = re.findall(r"^ARG VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(labels) >= 2
    assert set(labels) == {VERSION}


def test_pages_and_examples_name_images_of_it() -> None:
    texts = [text_of(path) or "" for path in repository_files() if path.relative_to(ROOT).parts[0] in {"docs", "examples", "README.md"}]
    named = [tag for text in texts for tag in TAG.findall(text)]
    assert len(named) > 5
    assert set(named) == {VERSION}
