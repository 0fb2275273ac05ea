"""A job however it is given: as a path, a manifest, or an object of the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.reading import manifest
from rljob_api.v1alpha1 import RLJob
from rljob_runtime.errors import SetupError

Spec = str | Path | Mapping[str, Any] | RLJob
"""The path of a manifest, the manifest itself as a mapping, or an ``RLJob``. YAML text is given as ``yaml.safe_load(text)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A manifest and where it came from."""

    data: dict[str, Any]
    folder: Path
    """Searched first for the modules that it names."""
    text: str | None = None
    """Of the file it was read from, so that problems have lines."""


def read(spec: Spec) -> Given:
    """The manifest; a mapping without ``kind`` becomes one of this API, and one without a name is called ``job``.

    Raises:
        SetupError: the file cannot be read.
        SpecInvalidError: the file holds no manifest.
    """
    if isinstance(spec, RLJob):
        return Given(data=spec.model_dump(mode="json", by_alias=True, exclude_none=True), folder=Path.cwd())
    if isinstance(spec, Mapping):
        defaults = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}}
        return Given(data=dict(spec) if "kind" in spec else defaults | dict(spec), folder=Path.cwd())
    path = Path(spec)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise SetupError(f"{path}: cannot be read ({why}); give the path of a job file, a manifest as a dict, or an RLJob") from error
    return Given(data=dict(manifest.read(text).data), folder=path.resolve().parent, text=text)
