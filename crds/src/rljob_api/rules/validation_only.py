"""Rules about validation-only runs (``training.steps: 0``), which start engines and rewards alone, and about what only they may lack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.v1alpha1.base import SpecModel
from rljob_api.v1alpha1.components import PlacementChoice, Role
from rljob_api.v1alpha1.rljob import Pipeline, RLJobSpec

ROLES = (Role.ROLLOUT, Role.REWARD, Role.ENVIRONMENT, Role.JUDGE)
"""Who answers and who scores."""
READ_FIELDS: dict[str, Collection[str]] = {
    "algorithm": (),
    "rollout": (
        *("max_prompt_tokens", "max_response_tokens", "stop_token_ids", "stall_timeout_seconds", "max_engine_restarts"),
        "standby_processes",
    ),
    "training": ("steps", "step_timeout_seconds"),
    "validation": ("max_prompts", "samples_per_prompt", "max_response_tokens", "temperature", "top_p", "top_k"),
    "overlap": (),
    "offload": (),
    "weight_sync": (),
    "checkpoint": (),
    "report": ("trajectories_every_steps", "trajectories_per_step", "trackers"),
}
"""Sections of a training job, and what of them a validation obeys."""
_REMEDY = "remove it, or write training.steps: 1 or more to train"


def _components(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components) if spec.validates_only else ():
        path = f"spec.components[{index}]"
        if component.role not in ROLES:
            problem = f"{component.name} would do nothing: training.steps is 0, which validates the model alone"
            yield _error(f"{path}.role", component.role, problem, _REMEDY)
        elif component.placement.mode is PlacementChoice.AUTO:
            problem = "is chosen for a Trainer and its engines; training.steps is 0, and there is no Trainer"
            yield _error(f"{path}.placement.mode", PlacementChoice.AUTO, problem, "give ranks or deviceMapping")


def _prompts(spec: RLJobSpec) -> Iterator[FieldError]:
    """What is asked; environments say it of an agentic job."""
    if spec.pipeline is Pipeline.AGENTIC:
        return
    if not spec.validates_only:
        if not spec.data.train:
            problem = f"is empty, and training.steps is {spec.training.steps}"
            yield _error(
                "spec.data.train", None, problem, "add a source of prompts, or write training.steps: 0 to validate the model alone"
            )
        return
    if spec.data.train:
        yield _error("spec.data.train", None, "is never asked: training.steps is 0, which validates the model alone", _REMEDY)
    if not spec.data.validation:
        remedy = "add data.validation, or write training.steps: 1 or more to train"
        yield _error("spec.data.validation", None, "is empty: training.steps is 0, and there is nothing to validate with", remedy)


def _without_effect(spec: RLJobSpec) -> Iterator[FieldError]:
    """Settings of the training that does not happen."""
    if not spec.validates_only:
        return
    problem = "has no effect: training.steps is 0, which validates the model alone"
    for section, read in READ_FIELDS.items():
        name = type(spec).model_fields[section].alias or section
        chosen = getattr(spec, section)
        for path, value in _changed(chosen, type(chosen)(), f"spec.{name}", read):
            yield _error(path, value, problem, _REMEDY)
    if spec.model.lora is not None:
        yield _error("spec.model.lora", None, problem, _REMEDY)


def _changed(section: SpecModel, default: SpecModel, path: str, read: Collection[str] = ()) -> Iterator[tuple[str, object]]:
    """Fields that were set to another value than in ``default``, down to single values; those in ``read`` left out."""
    for name, field in type(section).model_fields.items():
        value, other = getattr(section, name), getattr(default, name)
        if name in read or name not in section.model_fields_set or value == other:
            continue
        below = f"{path}.{field.alias or name}"
        if isinstance(value, SpecModel) and isinstance(other, SpecModel):
            yield from _changed(value, other, below)
        else:
            yield below, None if isinstance(value, SpecModel | tuple | dict) else value


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_components, _prompts, _without_effect)
"""Rules between fields, each independent of the others."""
