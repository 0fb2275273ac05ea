"""What Hydra itself composes of RLinf's examples, to compare the converter's own composition with; only where hydra-core is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bench.upstream.corpus import Example
from rljob_api.errors import SpecInvalidError
from rljob_convert.source import read


def compare(examples: Sequence[Example], environment: Mapping[str, str]) -> dict[str, int] | None:
    """How many of the examples that Hydra composes come out the same here; None without Hydra."""
    try:
        hydra, core = importlib.import_module("hydra"), importlib.import_module("hydra.core.global_hydra")
        omegaconf = importlib.import_module("omegaconf").OmegaConf
    except ImportError:
        return None
    before = dict(os.environ)
    os.environ.update(environment)
    files = equal = 0
    try:
        for example in examples:
            theirs = _composed(hydra, core, omegaconf, example)
            if theirs is not None:
                files += 1
                equal += theirs == _ours(example, environment)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {"files": files, "equal": equal}


def _composed(hydra: Any, core: Any, omegaconf: Any, example: Example) -> object:
    core.GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(example.path.parent.resolve()), version_base="1.1"):
            data: dict[str, object] = omegaconf.to_container(hydra.compose(config_name=example.path.stem), resolve=False)
    except Exception:  # noqa: BLE001 files that Hydra itself refuses say nothing about ours
        return None
    return _plain(data)


def _ours(example: Example, environment: Mapping[str, str]) -> object:
    try:
        source = read(example.path.read_text(encoding="utf-8"), "RLinf", folder=example.path.parent, environment=environment)
    except SpecInvalidError:
        return None
    return _plain({key: value for key, value in source.data.items() if key != "hydra"})


def _plain(value: object) -> object:
    """Texts alone: both read YAML's numbers by rules of their own, which other tests compare."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) or value is None else _number(str(value))


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
