"""From the pydantic models to the CustomResourceDefinition: structural schema, CEL rules, printer columns.

The API server accepts less than JSON schema (no references, no null types, bounds everywhere, because CEL costs are
estimated from them); what cannot be said raises :class:`~rljob_api.errors.SchemaError` here, with the path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, get_args

from pydantic import BaseModel

from rljob_api.crd.docstrings import attribute_docs
from rljob_api.errors import SchemaError
from rljob_api.naming import MAX_JOB_NAME, RESERVED_GROUP_NAMES
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.rljob import KIND, RLJob, RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus

GROUP = "rljob.dev"
VERSION = "v1alpha1"
Schema = dict[str, Any]

MUTABLE_SPEC_FIELDS = frozenset(
    {
        "suspend",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "failurePolicy",
        "startupDeadlineSeconds",
        "schedulingDeadlineSeconds",
    }
)
"""What may change after the job was made, with effect at once."""

MUTABLE_BELOW = {"training": frozenset({"steps"}), "checkpoint": frozenset({"everySteps", "keep", "asynchronous", "journal"})}
"""Fields of sections that may change too, with effect for the next attempt: the driver of one that runs has read its spec."""

LIST_MAP_KEYS = {
    "spec.head.env": "name",
    "spec.imagePullSecrets": "name",
    "spec.nodeGroups": "name",
    "spec.nodeGroups[].env": "name",
    "spec.components": "name",
    "spec.components[].env": "name",
    "spec.rewards": "name",
    "spec.environments": "name",
    "spec.data.train": "name",
    "spec.data.validation": "name",
    "spec.report.trackers": "type",
    "status.conditions": "type",
    "status.nodeGroups": "name",
}
"""Lists whose entries the server identifies, merges and keeps unique by a key."""

_ONE_VALUE = (("has(self.value) != has(self.valueFrom)", "give exactly one of value and valueFrom"),)
_ONE_PLACEMENT = (
    "[has(self.ranks), has(self.deviceMapping), has(self.workers)].filter(given, given).size() == (self.mode == 'Auto' ? 0 : 1)"
)
_ROLES_WITH_SIZES = [role.value for role, traits in TRAITS.items() if traits.takes_parallel_sizes]
CEL_RULES: dict[str, tuple[tuple[str, str], ...]] = {
    "": ((f"self.metadata.name.size() <= {MAX_JOB_NAME}", f"metadata.name must have at most {MAX_JOB_NAME} characters"),),
    "spec.head.env[]": _ONE_VALUE,
    "spec.nodeGroups[].env[]": _ONE_VALUE,
    "spec.components[].env[]": _ONE_VALUE,
    "spec.nodeGroups[]": (
        ("self.deviceResource != 'cpu' || self.deviceType != 'CUDA'", "deviceType CUDA contradicts deviceResource cpu"),
        (
            f"!(self.name in [{', '.join(repr(name) for name in RESERVED_GROUP_NAMES)}])",
            f"{', '.join(RESERVED_GROUP_NAMES)} are names of the system",
        ),
    ),
    "spec.components": (("self.exists(c, c.role == 'Rollout')", "a component must have role Rollout"),),
    "spec.components[]": (
        ("!has(self.engine) || self.role in ['Rollout', 'Judge']", "only a Rollout or Judge has an engine"),
        *(
            (f"!has(self.{size}) || self.role in {_ROLES_WITH_SIZES}", f"only a Reference, Critic or Teacher has {size} of its own")
            for size in ("tensorParallelSize", "contextParallelSize", "expertParallelSize")
        ),
        ("!has(self.teaches) || self.role == 'Teacher'", "only a Teacher has teaches"),
        ("has(self.model) == (self.role in ['Teacher', 'Judge'])", "give model exactly when role is Teacher or Judge"),
    ),
    "spec.components[].placement": (
        (_ONE_PLACEMENT, "give exactly one of ranks, deviceMapping and workers, or mode: Auto alone"),
        ("!has(self.devicesPerWorker) || has(self.deviceMapping)", "devicesPerWorker needs deviceMapping"),
    ),
    **{
        f"spec.data.{field}[]": (
            ("has(self.reasoningGym) == (self.type == 'ReasoningGym')", "give reasoningGym exactly when type is ReasoningGym"),
            ("has(self.jsonl) == (self.type == 'JSONL')", "give jsonl exactly when type is JSONL"),
            ("has(self.parquet) == (self.type == 'Parquet')", "give parquet exactly when type is Parquet"),
        )
        for field in ("train", "validation")
    },
    "spec.rewards[]": (
        ("has(self.function) == (self.type == 'Function')", "give function exactly when type is Function"),
        ("has(self.judge) == (self.type == 'LLMJudge')", "give judge exactly when type is LLMJudge"),
        ("has(self.rewardModel) == (self.type == 'RewardModel')", "give rewardModel exactly when type is RewardModel"),
    ),
    **{
        f"spec.rewards[].{asked}": (("has(self.endpoint) != has(self.component)", "give exactly one of endpoint and component"),)
        for asked in ("judge", "rewardModel")
    },
    "spec.rewards[].judge.parser": (
        (
            "[has(self.pattern), has(self.field), has(self.function)].filter(given, given).size() == 1",
            "give exactly one of pattern, field and function",
        ),
    ),
    "spec": (
        ("self.rollout.promptsPerStep % self.training.miniBatches == 0", "training.miniBatches must divide rollout.promptsPerStep"),
        ("self.training.warmupSteps <= self.training.steps", "training.warmupSteps must not exceed training.steps"),
        (
            "self.training.steps == 0 || self.components.exists_one(c, c.role == 'Trainer')",
            "exactly one component must have role Trainer, unless training.steps is 0",
        ),
        (
            "self.training.steps > 0 || self.components.all(c, c.role in ['Rollout', 'Reward', 'Environment', 'Judge'])",
            "components must have role Rollout, Reward, Environment or Judge where training.steps is 0",
        ),
        (
            "self.pipeline == 'Agentic' || (self.training.steps == 0) == (size(self.data.train) == 0)",
            "give data.train, or training.steps: 0 and data.validation alone, or environments of an agentic job",
        ),
        ("(self.pipeline == 'Agentic') == (size(self.environments) > 0)", "give environments exactly when pipeline is Agentic"),
    ),
}
"""Rules the API server checks itself, by path: expression and message.

Not inside a section that has a default: the server tries rules on the literal ``{}``, before the defaults below it exist.
"""

PRINTER_COLUMNS = (
    ("Status", "string", '.status.conditions[?(@.type=="Succeeded")].reason', "Reason of the Succeeded condition"),
    ("Step", "integer", ".status.progress.step", "Training steps that are done"),
    ("Reward", "string", ".status.progress.reward", "Mean reward of the last step"),
    ("Attempt", "integer", ".status.attempt", "Number of the current attempt"),
    ("Nodes", "string", ".status.nodes", "Ready and desired nodes"),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was made"),
)
"""Columns of ``kubectl get rlj``: name, type, JSON path, description."""


def crd() -> Schema:
    """The CustomResourceDefinition, ready to be written as YAML.

    Raises:
        SchemaError: a model uses what a structural schema cannot say, or leaves something unbounded.
    """
    columns = [{"name": n, "type": t, "jsonPath": path, "description": text} for n, t, path, text in PRINTER_COLUMNS]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": job_schema()},
    }
    names = {"kind": KIND, "listKind": f"{KIND}List", "plural": "rljobs", "singular": "rljob", "shortNames": ["rlj"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"rljobs.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


@functools.cache
def job_schema() -> Schema:
    """The structural schema of an RLJob. Shared: callers must not change it.

    Raises:
        SchemaError: see :func:`crd`.
    """
    spec = structural(RLJobSpec, "spec")
    _add_immutability(spec)
    root: Schema = {
        "type": "object",
        "description": (RLJob.__doc__ or "").strip(),
        "required": ["metadata", "spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Always rljob.dev/v1alpha1."},
            "kind": {"type": "string", "description": "Always RLJob."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural(RLJobStatus, "status"),
        },
    }
    _add_rules(root, "")
    return root


def json_schema() -> Schema:
    """The same as a JSON schema for editors: unknown keys are errors there."""
    schema: Schema = _closed(job_schema())
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["apiVersion"]["const"] = f"{GROUP}/{VERSION}"
    schema["properties"]["kind"]["const"] = KIND
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return schema


def _closed(schema: Any) -> Any:
    """A copy without Kubernetes extensions, objects closed to unknown keys."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _closed(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        copy["type"] = ["integer", "string"]
    if copy.get("exclusiveMinimum") is True:
        copy["exclusiveMinimum"] = copy.pop("minimum")
    if copy.get("exclusiveMaximum") is True:
        copy["exclusiveMaximum"] = copy.pop("maximum")
    if copy.get("type") == "object" and isinstance(copy.get("properties"), dict):
        copy["additionalProperties"] = False
    return copy


def _add_rules(schema: Schema, path: str) -> None:
    """Attach :data:`CEL_RULES` and list types below ``path``."""
    if path in CEL_RULES:
        added = [{"rule": rule, "message": message} for rule, message in CEL_RULES[path]]
        schema["x-kubernetes-validations"] = [*schema.get("x-kubernetes-validations", []), *added]
    for key, child in schema.get("properties", {}).items():
        _add_rules(child, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        key = LIST_MAP_KEYS.get(path)
        schema["x-kubernetes-list-type"] = "map" if key else "atomic"
        if key:
            schema["x-kubernetes-list-map-keys"] = [key]
        _add_rules(schema["items"], f"{path}[]")


def _add_immutability(spec: Schema) -> None:
    """Transition rules: per field where it always exists, about its presence where it may be absent."""
    sections = [("", spec, MUTABLE_SPEC_FIELDS | set(MUTABLE_BELOW))]
    sections += [(f"{key}.", spec["properties"][key], mutable) for key, mutable in MUTABLE_BELOW.items()]
    for prefix, section, mutable in sections:
        presence = []
        for key, child in section["properties"].items():
            if key in mutable:
                continue
            name = f"{prefix}{key}"
            child["x-kubernetes-validations"] = [{"rule": "self == oldSelf", "message": f"{name} cannot be changed; make a new RLJob"}]
            if key not in section.get("required", ()) and "default" not in child:
                rule = f"has(self.{key}) == has(oldSelf.{key})"
                presence.append({"rule": rule, "message": f"{name} cannot be added or removed; make a new RLJob"})
        if presence:
            section["x-kubernetes-validations"] = presence


def structural(model: type[BaseModel], path: str) -> Schema:
    """The structural schema of one model and all below it; ``path`` is where it stands, for messages.

    Raises:
        SchemaError: a field cannot be expressed, or lacks a docstring or a bound.
    """
    return _Structural(model).schema(path)


class _Structural:
    """Writes one model, with all below it inlined."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model
        self._classes = {cls.__name__: cls for cls in _classes(model)}
        self._defs: dict[str, Schema] = {}

    def schema(self, path: str) -> Schema:
        source = self._model.model_json_schema(by_alias=True)
        self._defs = source.pop("$defs", {})
        return self._object(source, self._model, path, ())

    def _object(self, source: Schema, model: type[BaseModel], path: str, above: tuple[str, ...]) -> Schema:
        docs = attribute_docs(model)
        properties: Schema = {}
        for name, info in model.model_fields.items():
            key = info.alias or name
            child = self._inline(dict(source["properties"][key]), f"{path}.{key}", above)
            if isinstance(info.default, BaseModel):
                if info.default != type(info.default)():
                    raise SchemaError(f"{path}.{key}: the default differs from the section's own defaults")
                child["default"] = {}
            if name not in docs:
                raise SchemaError(f"{path}.{key}: has no docstring; write one below the field")
            properties[key] = {"description": _described(docs[name], child.pop("description", "")), **child}
        result: Schema = {"type": "object", "description": (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")}
        if source.get("required"):
            result["required"] = source["required"]
        result["properties"] = properties
        return result

    def _inline(self, node: Schema, path: str, above: tuple[str, ...]) -> Schema:
        """The structural form of one JSON schema node."""
        node = _without_unions(node, path)
        if "$ref" in node:
            return self._reference(node, path, above)
        if "const" in node:
            node["enum"] = [node.pop("const")]
        if node.get("x-kubernetes-int-or-string"):
            return node
        _exclusive(node)
        if node.get("type") == "array":
            node["items"] = self._inline(dict(node["items"]), f"{path}[]", above)
        extra = node.pop("additionalProperties", None)
        if extra is True:
            node["x-kubernetes-preserve-unknown-fields"] = True
        elif isinstance(extra, dict):
            node["additionalProperties"] = self._inline(dict(extra), f"{path}.*", above)
        _require_bounds(node, path)
        return node

    def _reference(self, node: Schema, path: str, above: tuple[str, ...]) -> Schema:
        name = node.pop("$ref").removeprefix("#/$defs/")
        if name in above:
            raise SchemaError(f"{path}: {name} contains itself, which a structural schema cannot say")
        cls, source = self._classes[name], dict(self._defs[name])
        if issubclass(cls, BaseModel):
            node.pop("default", None)  # _object writes the literal {}
            section = {**self._object(source, cls, path, (*above, name)), **node}
            if not path.endswith("[]"):
                section.pop("description", None)  # the field's own docstring says more about this place
            return section
        docs = attribute_docs(cls)
        undocumented = [member.value for member in cls if member.name not in docs]
        if undocumented:
            raise SchemaError(f"{path}: {name}.{undocumented[0]} has no docstring; write one below the member")
        lines = [f"{member.value}: {docs[member.name]}" for member in cls]
        values = source["enum"] if "enum" in source else [source["const"]]
        return {"type": "string", "enum": values, **node, "description": "\n".join(lines)}


def _without_unions(node: Schema, path: str) -> Schema:
    """The node without keywords that a structural schema lacks; an optional type is the type itself."""
    for keyword in ("oneOf", "allOf", "prefixItems", "discriminator"):
        if keyword in node:
            raise SchemaError(f"{path}: {keyword} cannot be said in a structural schema; use one optional member per case")
    if "anyOf" in node:
        arms = [arm for arm in node.pop("anyOf") if arm != {"type": "null"}]
        if len(arms) != 1:
            raise SchemaError(f"{path}: a union of {len(arms)} types cannot be said in a structural schema")
        node = {**arms[0], **node}
    node.pop("title", None)
    # Rules about a map's keys are not expressible; the models check them.
    node.pop("propertyNames", None)
    if "patternProperties" in node:
        (node["additionalProperties"],) = node.pop("patternProperties").values()
    if node.get("default", 0) is None:
        del node["default"]
    return node


def _described(text: str, choices: str) -> str:
    """A field's own words, then its choices, one a line."""
    return f"{text}\n{choices}" if choices else text


def _exclusive(node: Schema) -> None:
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node:
            node[plain], node[exclusive] = node[exclusive], True


def _require_bounds(node: Schema, path: str) -> None:
    """The API server estimates the cost of CEL rules from these; without them it assumes the largest object possible."""
    kind = node.get("type")
    if kind == "string" and "enum" not in node and "maxLength" not in node:
        raise SchemaError(f"{path}: text without a maximum length")
    if kind == "array" and "maxItems" not in node:
        raise SchemaError(f"{path}: list without a maximum length")
    if kind == "object" and "maxProperties" not in node:
        raise SchemaError(f"{path}: map without a maximum size")
    if kind is None and not node.get("x-kubernetes-preserve-unknown-fields"):
        raise SchemaError(f"{path}: has no type")


def _classes(model: type[BaseModel]) -> Iterator[type[BaseModel] | type[StrEnum]]:
    """The model and every model and enum below it."""
    yield model
    for info in model.model_fields.values():
        yield from _classes_of(info.annotation)


def _classes_of(annotation: object) -> Iterator[type[BaseModel] | type[StrEnum]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _classes(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, StrEnum):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes_of(argument)
