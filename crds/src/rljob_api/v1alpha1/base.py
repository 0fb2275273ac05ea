"""The base of all spec models and the bounded scalar types they share.

Every string, list and map has a bound: the API server estimates the cost of CEL rules from them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from rljob_api.vocabulary import DROP


class SpecModel(BaseModel):
    """A frozen section of the spec: camelCase outside, snake_case inside, unknown keys are errors.

    The docstring below each field is its documentation. :mod:`rljob_api.crd.docstrings` reads it when a schema or a
    reference is written; pydantic's own reading of them would cost a fifth of the start-up time of every command.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        strict=True,
        validate_by_alias=True,
        validate_by_name=False,
    )

    def changed(self) -> dict[str, object]:
        """Fields with another value than their default, by their name in the manifest; for sections without required fields."""
        defaults = type(self)().model_dump(mode="json", by_alias=True)
        return {key: value for key, value in self.model_dump(mode="json", by_alias=True).items() if value != defaults[key]}


LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
COMPONENT_NAME_PATTERN = r"^[a-z]([_a-z0-9-]*[a-z0-9])?$"
QUANTITY_PATTERN = r"^\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3}|[numkMGTPE]|[KMGTPE]i)?$"
LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
SECRET_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
SECRET_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
ABSOLUTE_PATH_PATTERN = r"^/[^:]*$"
FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
PROJECT_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9 _.-]*[A-Za-z0-9])?$"
URL_PATTERN = r"^https?://[^\s/?#]+(/[^\s?#]*)?$"
PATTERN_WORDS = {
    LABEL_PATTERN: "lower-case letters, digits and inner dashes",
    JOB_NAME_PATTERN: "lower-case letters, digits and inner dashes, starting with a letter",
    COMPONENT_NAME_PATTERN: "lower-case letters, digits, inner dashes and underscores, starting with a letter",
    QUANTITY_PATTERN: 'a Kubernetes quantity such as "64" or "512Gi"',
    LABEL_KEY_PATTERN: 'a Kubernetes label key such as "team" or "example.com/team"',
    LABEL_VALUE_PATTERN: "at most 63 letters, digits, and inner dashes, underscores and dots",
    ENV_NAME_PATTERN: "letters, digits and underscores, not starting with a digit",
    SECRET_NAME_PATTERN: "lower-case letters, digits, inner dashes and dots",
    SECRET_KEY_PATTERN: "letters, digits, dashes, underscores and dots",
    ABSOLUTE_PATH_PATTERN: "a path that starts with / and has no colon",
    PROJECT_PATTERN: "letters, digits, and inner dashes, underscores, dots and spaces",
    URL_PATTERN: "http:// or https:// with a host and a path, without a query",
    FUNCTION_PATTERN: "module:function, for example my_rewards:brevity",
}
"""What a value that fails a pattern should look like, in words."""

Label = Annotated[str, Field(min_length=1, max_length=40, pattern=LABEL_PATTERN)]
"""A name that becomes part of Kubernetes names and Ray labels."""
ComponentName = Annotated[str, Field(min_length=1, max_length=40, pattern=COMPONENT_NAME_PATTERN)]
"""A component's name: underscores are allowed because ROLL and RLinf use them."""
ShortText = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
PathText = Annotated[str, Field(min_length=1, max_length=1024)]


def _quantity_text(value: object) -> object:
    """YAML reads ``cpu: 64`` as a number, which Kubernetes takes for a quantity too, up to 64 bits with a sign."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if value >= 2**63:
        raise PydanticCustomError("quantity_too_large", "is larger than a whole number of Kubernetes can be")
    return str(value)


Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    Field(min_length=1, max_length=32, pattern=QUANTITY_PATTERN),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 32}),
]
"""A Kubernetes quantity, not negative: "64", 64, "512Gi", "500m", "1.5e3"; :mod:`rljob_api.quantities` reads it."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""A duration in whole seconds, at most a year."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e9)]
Positive = Annotated[float, Field(gt=0.0, le=1e9)]
Score = Annotated[float, Field(ge=-1e6, le=1e6)]
"""A sample's reward, or a bound of one."""


def _score_or_drop(value: object) -> object:
    if value == DROP:
        return DROP
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
        raise PydanticCustomError("score_or_drop", "is neither Drop nor a score")
    return float(value)


ScoreOrDrop = Annotated[Any, BeforeValidator(_score_or_drop), WithJsonSchema({"x-kubernetes-preserve-unknown-fields": True})]
"""A score, or the word Drop. A structural schema has no unions, so that the API server takes any value and validation checks it."""
FunctionPath = Annotated[str, Field(max_length=256, pattern=FUNCTION_PATTERN)]
"""A function of the user's own as module:function."""
FreeForm = Annotated[dict[str, Any], Field(max_length=64)]
"""Settings that are passed on without being understood here."""
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)]
"""Key of a Kubernetes label, with an optional prefix such as "example.com/"."""
AnnotationValue = Annotated[str, Field(max_length=16384)]
"""Value of a Kubernetes annotation."""
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE_PATTERN)]
"""Value of a Kubernetes label; may be empty."""
