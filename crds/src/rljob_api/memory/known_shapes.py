"""How large a job's models are: the policy, and those that Judges and Teachers have of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rljob_api.memory.shape import ModelShape, shape_from_count
from rljob_api.v1alpha1.components import ServedModel
from rljob_api.v1alpha1.data import Model
from rljob_api.v1alpha1.rljob import RLJobSpec

Served = Mapping[str, ModelShape]
"""Sizes of components' own models, by component; those of unknown size are missing."""
ShapeReader = Callable[[Model | ServedModel], ModelShape | None]
"""Finds out how large a model is; None where that cannot be known."""


def declared(model: Model | ServedModel) -> ModelShape | None:
    """What the manifest itself says of a model's size."""
    return None if model.parameter_count is None else shape_from_count(model.parameter_count)


def shape_of(spec: RLJobSpec) -> ModelShape | None:
    """What the spec itself says of its model's size."""
    return declared(spec.model)


def served_shapes(spec: RLJobSpec, shape_of: ShapeReader = declared) -> Served:
    """Sizes of the models that components have of their own."""
    found = {one.name: shape_of(one.model) for one in spec.components if one.model is not None}
    return {name: shape for name, shape in found.items() if shape is not None}
