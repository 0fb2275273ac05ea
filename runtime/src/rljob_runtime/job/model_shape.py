"""How large a job's model is: from its config.json where that is at hand, else from the spec."""

from __future__ import annotations

import json
from pathlib import Path

from rljob_api.errors import ModelShapeError
from rljob_api.memory import ModelShape, shape_from_config, shape_of
from rljob_api.v1alpha1.rljob import RLJobSpec

MAX_CONFIG_BYTES = 1 << 20


def read_shape(spec: RLJobSpec) -> ModelShape | None:
    """The model's shape; None where neither a readable config.json of a known architecture nor spec.model.parameterCount is there.

    Nothing is downloaded, and nothing is refused: whether the model is usable is found out when a run begins.
    """
    config = _config(Path(spec.model.path))
    if config is not None:
        try:
            return shape_from_config(config)
        except ModelShapeError:
            return shape_of(spec)  # another architecture: the spec is all there is
    return shape_of(spec)


def _config(folder: Path) -> dict[str, object] | None:
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
