"""The rules of structural schemas that a schema must keep, and the API server's defaulting, as small walkers.

Source: Kubernetes documentation, "Extend the Kubernetes API with CustomResourceDefinitions", structural schemas and defaulting.
"""

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema

FORBIDDEN = {
    "$ref",
    "$defs",
    "definitions",
    "const",
    "oneOf",
    "anyOf",
    "allOf",
    "not",
    "title",
    "prefixItems",
    "patternProperties",
    "propertyNames",
}
TYPES = {"object", "array", "string", "integer", "number", "boolean"}


def violations(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every rule a schema node breaks, with its path."""
    yield from (f"{path}: {word}" for word in FORBIDDEN & set(schema))
    untyped = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string")
    if schema.get("type") not in TYPES and not any(schema.get(word) is True for word in untyped):
        yield f"{path}: type {schema.get('type')!r}"
    if "properties" in schema and "additionalProperties" in schema:
        yield f"{path}: properties beside additionalProperties"
    yield from unbounded(schema, path)
    if schema.get("x-kubernetes-list-type") == "map":
        keys = schema["x-kubernetes-list-map-keys"]
        yield from (f"{path}: key {key} is not required" for key in keys if key not in schema["items"].get("required", ()))
    yield from (f"{path}: {word} is not a flag" for word in ("exclusiveMinimum", "exclusiveMaximum") if schema.get(word, True) is not True)
    if "default" in schema:
        yield from default_violations(schema, path)
    if not schema.get("description") and path not in ("", ".metadata") and not path.endswith(("[]", ".*")):
        yield f"{path}: no description"
    for where, child in children(schema, path):
        yield from violations(child, where)


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Nodes directly below a node, with their paths."""
    yield from ((f"{path}.{key}", child) for key, child in schema.get("properties", {}).items())
    if "items" in schema:
        yield f"{path}[]", schema["items"]
    if isinstance(schema.get("additionalProperties"), dict):
        yield f"{path}.*", schema["additionalProperties"]


def unbounded(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Texts, lists and maps without a limit; CEL costs are estimated from it."""
    kind = schema.get("type")
    if kind == "string" and "enum" not in schema and "maxLength" not in schema and path not in (".apiVersion", ".kind"):
        yield f"{path}: unbounded text"
    if kind == "array" and "maxItems" not in schema:
        yield f"{path}: unbounded list"
    if kind == "object" and "properties" not in schema and path != ".metadata" and "maxProperties" not in schema:
        yield f"{path}: unbounded map"


def default_violations(schema: dict[str, Any], path: str) -> Iterator[str]:
    """A default must be valid once the defaults below it are filled in."""
    plain = copy.deepcopy(schema)
    for word, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if plain.pop(word, False):
            plain[word] = plain.pop(bound)
    value = with_defaults(schema, schema["default"])
    try:
        typed = {"type": plain["type"]} if "type" in plain else {}
        jsonschema.Draft202012Validator({**typed, **{k: v for k, v in plain.items() if k in SCALAR_WORDS}}).validate(value)
    except jsonschema.ValidationError as error:
        yield f"{path}: default {value!r}: {error.message}"


SCALAR_WORDS = {
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "enum",
    "maxLength",
    "pattern",
    "maxItems",
    "minItems",
    "required",
}


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What the API server stores: missing properties that have a default get it, then the same below."""
    if isinstance(value, dict) and "properties" in schema:
        filled = dict(value)
        for key, child in schema["properties"].items():
            if key not in filled and "default" in child:
                filled[key] = copy.deepcopy(child["default"])
            if key in filled:
                filled[key] = with_defaults(child, filled[key])
        return filled
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


RESOLVED = {
    "spec.algorithm.policyLoss": {"clipLow", "clipHigh", "dualClip", "maskClipped", "positiveWeight", "negativeWeight", "tau"},
    "spec.algorithm.advantage": {"whiten"},
    "spec.overlap": {"updateMode"},
    "spec.rollout": {"topK"},
}
"""Fields by section whose default depends on other fields: the models fill them in, the API server does not."""


def beyond(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Keys that one document has beyond the other, by section; all that both have is equal."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        assert left == right, path
        return
    assert set(right) <= set(left), path
    if more := set(left) - set(right):
        yield path, more
    for key in right:
        yield from beyond(left[key], right[key], f"{path}.{key}".lstrip("."))
