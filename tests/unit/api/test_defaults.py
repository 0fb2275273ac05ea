"""Defaults of the schema, which never change within an API version.

The API server stores them in every RLJob. To an operator with another default such a field looks chosen by the user: it would refuse the
job as changed, and pass a value that somebody wrote to older images as none. A field may be added with its default; a better default is a
new field, or another API version (Kubernetes, "API changes").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rljob_api.crd.schema import job_schema

GOLDEN = Path(__file__).parents[2] / "golden" / "defaults.json"


def defaults(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    if "default" in schema:
        yield path, schema["default"]
    for name, below in schema.get("properties", {}).items():
        yield from defaults(below, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(key), Mapping):
            yield from defaults(schema[key], path + mark)


def test_defaults_stay_as_they_are(pytestconfig: pytest.Config) -> None:
    found = dict(defaults(job_schema()["properties"]["spec"], "spec"))
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    assert {path: found.get(path) for path, value in known.items() if found.get(path, value) != value} == {}
    if pytestconfig.getoption("--update-goldens"):
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        known = found
    assert found.keys() == known.keys(), "run with --update-goldens"
