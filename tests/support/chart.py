"""The chart's files, read without helm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.layout.tree import ROOT

CHART = ROOT / "helm" / "rljob"
TEMPLATES = sorted(path for path in (CHART / "templates").rglob("*") if path.is_file())


def values() -> dict[str, Any]:
    return yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)


def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def options(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaves; an object whose content is free ({} or a Kubernetes object) is a leaf."""
    free = {"resources", "podSecurityContext", "securityContext", "test.resources", "dashboards.labels"}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and path not in free:
            yield from options(value, f"{path}.")
        else:
            yield path


def rules() -> list[dict[str, list[str]]]:
    """The operator's RBAC rules, which are plain YAML inside a named template."""
    text = (CHART / "templates" / "_helpers.tpl").read_text()
    found = re.search(r'define "rljob.rules" -\}\}\n(.*?)\{\{- end \}\}', text, re.DOTALL)
    assert found, "the named template rljob.rules is gone"
    return yaml.load(found.group(1), yaml.CSafeLoader)
