"""What the converter tests share: the configurations under tests/data/convert, and the nothing-lost rules."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from rljob_api import paths, planner, validation
from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJob
from rljob_convert import conversion
from rljob_convert.keys import is_accounted
from rljob_convert.notes import Note, is_secret
from rljob_convert.rlinf import manifest as rlinf
from rljob_convert.roll import manifest as roll
from rljob_convert.source import Source, leaves, read

FOLDER = Path(__file__).parents[2] / "data" / "convert"
ENVIRONMENT = {"CORPUS_MODELS": "models"}
"""What ``${oc.env:..}`` of the configurations finds."""
GOLDEN = Path(__file__).parents[2] / "golden" / "convert"


def configurations(framework: str) -> list[Path]:
    return sorted(FOLDER.glob(f"{framework}-*.yaml"))


def converted(path: Path, **options: Any) -> conversion.Converted:
    options = {"folder": path.parent, "environment": ENVIRONMENT, **options}
    return conversion.convert(path.stem.split("-")[0], path.read_text(encoding="utf-8"), **options)


def spec_of(framework: str, text: str, **options: Any) -> dict[str, Any]:
    spec: dict[str, Any] = conversion.convert(framework, text, **options).manifest["spec"]
    return spec


def component(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in spec["components"] if item["name"] == name)


def notes(framework: str, text: str, path: str) -> list[Note]:
    """Those about one key."""
    return [note for note in conversion.convert(framework, text).notes if note.path == path]


def rendered(path: Path) -> str:
    """The manifest with its report as a comment."""
    return conversion.render(converted(path))


def plan(result: conversion.Converted) -> Any:
    return planner.plan(RLJob.model_validate_json(json_of(result)).spec)


def offload_problems(result: conversion.Converted) -> list[str]:
    """What validation says against the offload fields of a converted job; nothing about the rest, which may lack what files do not say."""
    try:
        validation.check(json_of(result), runnable=False)
    except SpecInvalidError as error:
        return [str(problem) for problem in error.errors if "offload" in problem.path]
    return []


def json_of(result: conversion.Converted) -> str:
    return json.dumps(result.manifest)


def source_of(framework: str, text: str) -> Source:
    source = read(text, framework, folder=FOLDER, environment=ENVIRONMENT)
    if framework == "roll":
        roll.convert(source, None)
    else:
        rlinf.convert(source, None, None)
    return source


def lost(framework: str, text: str) -> list[paths.Parts]:
    """Leaves that are neither used nor in a note."""
    return is_accounted(source_of(framework, text))


WITHOUT_MEANING = {("actor_infer", "model_args", "disable_gradient_checkpointing"), ("algorithm", "calculate_entropy")}
"""Switches whose values come to the same here."""


def silent_leaves(framework: str, text: str) -> list[paths.Parts]:
    """Leaves whose value shows nowhere: none of several other values changes the manifest or a note.

    Leaves of a section that one note is about, and secrets, are left out: the note says that the values are not shown.
    """
    data = yaml.load(text, yaml.CSafeLoader)
    source = source_of(framework, text)
    hidden = source.noted - {parts for parts, _ in leaves(data)}
    before = _rendered(framework, data)
    return [
        parts
        for parts, value in list(leaves(data))
        if not any(parts[:length] in hidden for length in range(1, len(parts)))
        and parts not in WITHOUT_MEANING
        and parts[0] != "defaults"  # Hydra's own, or a file whose values are leaves themselves
        and not is_secret(parts, value)
        and all(_rendered(framework, _with(data, parts, other)) == before for other in _others(value))
    ]


def _rendered(framework: str, data: dict[str, Any]) -> str:
    """What :func:`conversion.render` shows, the manifest as JSON: Python's YAML emitter would be most of the cost."""
    try:
        converted = conversion.convert(framework, text_of(data), folder=FOLDER, environment=ENVIRONMENT)
    except SpecInvalidError as error:
        return str(error)
    return conversion.report(converted) + json_of(converted)


def text_of(data: object) -> str:
    """YAML by libyaml's emitter, four times faster than Python's."""
    return str(yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True))


def _with(data: dict[str, Any], parts: paths.Parts, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    node: Any = changed
    for part in parts[:-1]:
        node = node[part]
    node[parts[-1]] = value
    return changed


def _others(value: object) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, (int, float)):
        return value + 1, value / 16, value * 64
    return (f"{value}x",) if isinstance(value, str) else ("x",)
