"""Rules about data: sources, the prompt, the tokenizer, and names and types that must be unique."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.rules.pods import environments
from rljob_api.v1alpha1.data import DataSourceType, PromptFormat
from rljob_api.v1alpha1.operations import Report
from rljob_api.v1alpha1.rljob import RLJobSpec


def _unique_names(spec: RLJobSpec) -> Iterator[FieldError]:
    """Node groups and components are the planner's."""
    named = (
        ("spec.rewards", spec.rewards),
        ("spec.data.train", spec.data.train),
        ("spec.data.validation", spec.data.validation),
        ("spec.environments", spec.environments),
        ("spec.imagePullSecrets", spec.image_pull_secrets),
    )
    for path, items in named:
        yield from _repeats(path, [item.name for item in items])
    for path, env in environments(spec):
        yield from _repeats(path, [variable.name for variable in env])


def _repeats(path: str, names: list[str]) -> Iterator[FieldError]:
    counts = Counter(names)
    for index, name in enumerate(names):
        first = names.index(name) if counts[name] > 1 else index
        if first != index:
            yield _error(f"{path}[{index}].name", name, f"is already the name of {path}[{first}]", "give every entry its own name")


def _trackers(spec: RLJobSpec) -> Iterator[FieldError]:
    types = [tracker.type for tracker in spec.report.trackers]
    for index, tracker in enumerate(types):
        if (first := types.index(tracker)) != index:
            problem = f"is already that of spec.report.trackers[{first}]"
            yield _error(f"spec.report.trackers[{index}].type", tracker.value, problem, "name every tracker once")


def _trajectories(spec: RLJobSpec) -> Iterator[FieldError]:
    report = spec.report
    if report.trajectories_every_steps == 0 and report.trajectories_per_step != Report().trajectories_per_step:
        problem = "has no effect, report.trajectoriesEverySteps is 0 and none are written"
        yield _error("spec.report.trajectoriesPerStep", report.trajectories_per_step, problem, "remove it, or set trajectoriesEverySteps")


def _sources(spec: RLJobSpec) -> Iterator[FieldError]:
    for field, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            path = f"spec.data.{field}[{index}]"
            members = {
                DataSourceType.REASONING_GYM: ("reasoningGym", source.reasoning_gym),
                DataSourceType.JSONL: ("jsonl", source.jsonl),
                DataSourceType.PARQUET: ("parquet", source.parquet),
            }
            for kind, (member, settings) in members.items():
                if source.type is kind and settings is None:
                    yield _error(path, None, f"has type {kind} but no {member}", f"add {member} with the settings of the source")
                if source.type is not kind and settings is not None:
                    problem = f"belongs to type {kind}, the type is {source.type}"
                    yield _error(f"{path}.{member}", None, problem, "remove it or change the type")


def _prompt(spec: RLJobSpec) -> Iterator[FieldError]:
    prompt = spec.data.prompt
    if prompt.chat_template:
        if prompt.template != PromptFormat().template:
            problem = "has no effect, chatTemplate is on and takes the question alone"
            yield _error("spec.data.prompt.template", prompt.template, problem, "remove it, or switch chatTemplate off")
        return
    if prompt.system:
        problem = "has no effect without a chat template"
        yield _error("spec.data.prompt.system", prompt.system, problem, "remove it, or write chatTemplate: true")
    if prompt.template_parameters:
        problem = "has no effect without a chat template"
        yield _error("spec.data.prompt.templateParameters", prompt.template_parameters, problem, "remove it, or write chatTemplate: true")
    yield from _template(prompt.template)


def _template(template: str) -> Iterator[FieldError]:
    """The template is a Python format string with one plain field."""
    path = "spec.data.prompt.template"
    try:
        fields = [piece[1:] for piece in string.Formatter().parse(template) if piece[1] is not None]
    except ValueError as error:
        yield _error(path, template, f"is not a template: {error}", "write literal braces as {{ and }}")
        return
    if ("question", "", None) not in fields:
        yield _error(path, template, "does not contain {question}", "put {question} where the question belongs")
    for name, form, conversion in fields:
        if (name, form, conversion) != ("question", "", None):
            problem = f"contains the placeholder {{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}"
            yield _error(path, template, problem, "only {question} is filled in; write literal braces as {{ and }}")


def _tokenizer(spec: RLJobSpec) -> Iterator[FieldError]:
    model = spec.model
    if model.tokenizer_revision is not None and model.tokenizer_path in (None, model.path):
        problem = "has no effect, the tokenizer is the model's"
        remedy = "write spec.model.revision, or name the tokenizer's own repository as spec.model.tokenizerPath"
        yield _error("spec.model.tokenizerRevision", model.tokenizer_revision, problem, remedy)


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _unique_names,
    _trackers,
    _trajectories,
    _sources,
    _prompt,
    _tokenizer,
)
"""Rules between fields, each independent of the others."""
