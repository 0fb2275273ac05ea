"""What a job's model is: from its config.json where that is at hand, in its folder or in the Hub's cache, else from the spec."""

from __future__ import annotations

import json
from pathlib import Path

from rljob_api.errors import ModelShapeError
from rljob_api.memory import ModelShape, declared, shape_from_config
from rljob_api.v1alpha1.components import ServedModel
from rljob_api.v1alpha1.data import Model
from rljob_runtime.hub.source import is_hub_id

MAX_CONFIG_BYTES = 1 << 20


def read_shape(model: Model | ServedModel) -> ModelShape | None:
    """A model's shape; None where neither a readable config.json of a known architecture nor its parameterCount is there.

    Nothing is downloaded, and nothing is refused: whether the model is usable is found out when a run begins.
    """
    config = read_config(model)
    if config is not None:
        try:
            return shape_from_config(config)
        except ModelShapeError:
            return declared(model)  # another architecture: the manifest is all there is
    return declared(model)


def read_config(model: Model | ServedModel) -> dict[str, object] | None:
    """A model's config.json; None where it is neither in its folder nor in the Hub's cache of this machine, or is not readable.

    Nothing is downloaded, and nothing is refused.
    """
    path = Path(model.path) / "config.json"
    if is_hub_id(model.path):
        cached = _cached(model.path, model.revision)
        if cached is None:
            return None
        path = cached
    return _read(path)


def config_of_folder(folder: str) -> dict[str, object] | None:
    """The config.json of a folder on this machine; None where it is not there or not readable."""
    return _read(Path(folder) / "config.json")


def _read(path: Path) -> dict[str, object] | None:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _cached(repo: str, revision: str | None) -> Path | None:
    """The file in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except HFValidationError:  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None
