"""Blocks of code of the pages, and jobs that a fragment of a manifest is part of."""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rljob_api.v1alpha1 import RLJobSpec
from tests.layout.tree import ROOT
from tests.unit.api.manifests import manifest

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""What users read; the files of bench/results are written by programs."""

_BLOCK = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.DOTALL | re.MULTILINE)
_DEVICES = 64
"""Devices of a job that a fragment without node groups becomes part of: more than any fragment names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One block of code."""

    page: Path
    line: int
    language: str
    """Empty: commands and what they print."""
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(page: Path) -> Iterator[Snippet]:
    """The blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        yield Snippet(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=language,
            title=title[1] if title else "",
            text=textwrap.dedent(match["body"]),
        )


def all_snippets(*languages: str) -> list[Snippet]:
    """Of these languages, of all pages."""
    return [snippet for page in PAGES for snippet in snippets(page) if snippet.language in languages]


def models(kind: Any) -> Iterator[type[BaseModel]]:
    """Models that an annotation names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in typing.get_args(kind):
        yield from models(argument)


def job_of(fragment: str) -> dict[str, Any]:
    """A valid job with a fragment's settings: of the spec, or of one of its sections, whichever has such fields.

    Raises:
        AssertionError: no section has all of these fields.
    """
    settings = yaml.safe_load(fragment.replace("[...]", "[]"))
    settings = at_its_place(settings.get("spec", settings))
    document = manifest()
    spec = document["spec"]
    if settings.get("pipeline") == "Agentic" or "environments" in settings:
        settings = {"pipeline": "Agentic", "environments": [{"name": "lake", "type": "FrozenLake"}], **settings}
        spec["components"][2] = {"name": "games", "role": "Environment", "placement": {"workers": 1}}
        del spec["data"], spec["rewards"]
    elif "data" in settings and "rewards" not in settings:
        settings["rewards"] = [{"name": "answer", "type": "ExactMatch"}]  # for sources of any type
    groups = settings.pop("nodeGroups", [])
    components = settings.pop("components", [])
    if settings.get("data", {}).get("train") == []:
        del settings["data"]["train"]
    spec = merged(spec, settings)
    spec["nodeGroups"] = placed_groups(groups, spec["nodeGroups"], has_components=bool(components))
    roles = {component["role"] for component in components}
    spec["components"] = [*components, *(own for own in spec["components"] if own["role"] not in roles)]
    for judge in missing_judges(spec):
        spec["components"].append({"name": judge, "role": "Judge", "placement": {"ranks": "2"}, "model": {"path": "models/judge"}})
        spec["nodeGroups"][0]["devicesPerNode"] = _DEVICES
    if any("sources" in reward for reward in spec.get("rewards", [])):
        spec = with_sources(spec)
    return document | {"spec": spec}


def at_its_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings below spec: as they are, or below the one section that has all of these fields."""
    if set(settings) <= fields(RLJobSpec):
        return deepcopy(dict(settings))
    homes = [
        str(info.alias or name)
        for name, info in RLJobSpec.model_fields.items()
        for model in models(info.annotation)
        if set(settings) <= fields(model)
    ]
    assert len(homes) == 1, f"{sorted(settings)} are fields of neither the spec nor of exactly one section, but of {homes}"
    return {homes[0]: deepcopy(dict(settings))}


def fields(model: type[BaseModel]) -> set[str]:
    return {str(info.alias or name) for name, info in model.model_fields.items()}


def placed_groups(groups: list[dict[str, Any]], base: list[dict[str, Any]], *, has_components: bool) -> list[dict[str, Any]]:
    """The fragment's groups; before them one with devices where they have none."""
    if groups and any("devicesPerNode" in group for group in groups):
        return groups
    return [base[0] | {"devicesPerNode": _DEVICES if has_components else base[0]["devicesPerNode"]}, *groups]


def missing_judges(spec: Mapping[str, Any]) -> list[str]:
    """Judge components that rewards name and the spec lacks."""
    named = [
        reward[key]["component"]
        for reward in spec.get("rewards", [])
        for key in ("judge", "rewardModel")
        if "component" in reward.get(key, {})
    ]
    return [name for name in named if name not in {component["name"] for component in spec["components"]}]


def with_sources(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with a source for every tag that rewards name, as far as no file has tags of its own."""
    train = spec["data"]["train"]
    if any("tagField" in source.get("jsonl", {}) for source in train):
        return spec
    wanted = {tag for reward in spec["rewards"] for tag in reward.get("sources", [])} - {source["name"] for source in train}
    more = [{"name": tag, "type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}} for tag in sorted(wanted)]
    kept = [source for source in train if not wanted or any(source["name"] in reward.get("sources", []) for reward in spec["rewards"])]
    return spec | {"data": spec["data"] | {"train": [*kept, *more]}}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Maps into each other; anything else in place of what was there."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result
