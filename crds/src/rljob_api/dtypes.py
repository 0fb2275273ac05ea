"""Which floating-point type each part of a job uses.

The trainer and a reference compute in ``model.dtype``, an engine in ``engine.dtype``, which is the same unless set. Weights travel in the
trainer's type and the engine converts them, so that an engine of another 16-bit type, or of float32, holds the very weights that the
trainer computes with. Only where all engines compute in one smaller type does the trainer round, and half the bytes travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rljob_api.v1alpha1.components import Component, Engine, Role
from rljob_api.v1alpha1.data import DType
from rljob_api.v1alpha1.learning import Training
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import OptimizerStateDType

DTYPE_BYTES: Mapping[DType, int] = MappingProxyType({DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2})
_STATE_BYTES: Mapping[OptimizerStateDType, int] = MappingProxyType({OptimizerStateDType.FLOAT32: 4, OptimizerStateDType.BFLOAT16: 2})


def engine_dtype(spec: RLJobSpec, engine: Engine | None) -> DType:
    """What an engine holds its weights in and computes with."""
    own = None if engine is None else engine.dtype
    return spec.model.dtype if own is None else own


def engine_dtypes(spec: RLJobSpec) -> frozenset[DType]:
    """Of all engines of a job."""
    return frozenset(engine_dtype(spec, component.engine) for component in _rollouts(spec))


def sync_dtype(spec: RLJobSpec) -> DType:
    """What weights travel in from the trainer to the engines."""
    engines = engine_dtypes(spec)
    (one,) = engines if len(engines) == 1 else (spec.model.dtype,)
    return one if DTYPE_BYTES[one] < DTYPE_BYTES[spec.model.dtype] else spec.model.dtype


def optimizer_state_bytes(training: Training) -> int:
    """Of AdamW's two moments together, for each trained parameter."""
    return 2 * _STATE_BYTES[training.optimizer_state_dtype]


def train_state_bytes(training: Training) -> int:
    """For each trained parameter: its float32 master weight, and AdamW's two moments."""
    return DTYPE_BYTES[DType.FLOAT32] + optimizer_state_bytes(training)


def _rollouts(spec: RLJobSpec) -> tuple[Component, ...]:
    return tuple(component for _, component in spec.with_role(Role.ROLLOUT))
