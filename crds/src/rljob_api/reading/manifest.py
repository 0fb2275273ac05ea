"""Manifest to typed model: picks the document, checks types, explains every problem in the manifest's own words.

Called by :func:`rljob_api.validation.check`. Knows where unknown keys belong and which key was meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rljob_api import paths
from rljob_api.errors import FieldError, SpecInvalidError, counted, did_you_mean, show
from rljob_api.reading import meant, yaml_text
from rljob_api.v1alpha1.base import PATTERN_WORDS, QUANTITY_PATTERN
from rljob_api.v1alpha1.rljob import API_VERSION, KIND, RLJob

UNKNOWN_FIELD = "is not a known field"
MAX_PROBLEMS = 200
"""Problems that are listed; more are counted: nobody reads them, and each costs a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One manifest as plain data."""

    data: dict[str, object]
    lines: Mapping[paths.Parts, int] = field(default_factory=dict)
    """Line of every value, when it came from text."""
    errors: tuple[FieldError, ...] = ()
    """Problems of the text that leave something to go on with."""


def read(text: str, *, name: str | None = None) -> Document:
    """Pick the RLJob out of a YAML or JSON text; documents of other kinds are passed over.

    Args:
        text: one or more YAML documents.
        name: ``metadata.name`` of the job to take; needed when there are several.

    Raises:
        SpecInvalidError: not YAML, no job, several jobs, or none of that name.
    """
    documents = yaml_text.load(text)
    jobs = [document for document in documents if isinstance(document.data, dict) and document.data.get("kind") == KIND]
    names = [_name(job.data) for job in jobs]
    if name is not None:
        chosen = [job for job in jobs if _name(job.data) == name]
        if len(chosen) != 1:
            found = (
                f"holds {len(chosen)} RLJobs called {name}"
                if chosen
                else f"holds no RLJob called {name}, only {', '.join(names) or 'none'}"
            )
            raise _about_the_text(found, "give the name of one of them")
        return _document(chosen[0])
    if len(jobs) > 1:
        raise _about_the_text(f"holds {len(jobs)} RLJobs: {', '.join(names)}", "choose one with --name, or put each in its own file")
    if jobs:
        return _document(jobs[0])
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        raise _about_the_text(
            "is empty" if not documents else "holds no RLJob", "start it with apiVersion: rljob.dev/v1alpha1 and kind: RLJob"
        )
    return _document(documents[0])


def select_text(text: str, name: str) -> str:
    """The one job of that name as JSON text, for callers that take a single job.

    Raises:
        SpecInvalidError: as :func:`read`, and for values that YAML reads otherwise than they seem.
    """
    document = read(text, name=name)
    if document.errors:
        raise SpecInvalidError(arrange(document, document.errors))
    return json.dumps(document.data)


def to_job(document: Document) -> RLJob:
    """The typed job.

    Raises:
        SpecInvalidError: with every unknown key, missing field, wrong type and value out of bounds, and the text's problems.
    """
    job, unknown = to_job_with_unknown_keys(document)
    if unknown:
        raise SpecInvalidError(arrange(document, unknown))
    return job


def to_job_with_unknown_keys(document: Document) -> tuple[RLJob, list[FieldError]]:
    """The typed job, and the problem of each unknown key where these are the only ones, so that other checks can go on.

    A key that is a misspelling stands for the one that was meant, as long as all of them do; otherwise unknown keys count as absent.

    Raises:
        SpecInvalidError: as :func:`to_job` for problems that leave no job to check, unknown keys included.
    """
    errors = list(document.errors)
    job, unknown, surplus = None, [], 0
    try:
        job = RLJob.model_validate_json(json.dumps(document.data))
    except ValidationError as failure:
        known = {error.path for error in errors}
        items = [item for item in failure.errors(include_url=False, include_context=True) if not _is_echo(item)]
        found = [_translate(item) for item in items[:MAX_PROBLEMS]]
        surplus = max(len(items) - MAX_PROBLEMS, 0)
        if not errors and not surplus and all(item["type"] == "extra_forbidden" for item in items):
            job, unknown = _without_unknown_keys(document, [tuple(item["loc"]) for item in items]), found
        # What the text itself misled about would only be explained twice; that a key is unknown is news.
        errors += [error for error in found if error.path not in known or error.problem == UNKNOWN_FIELD]
    if job is None or document.errors:
        raise SpecInvalidError(arrange(document, errors, surplus))
    return job, unknown


def _without_unknown_keys(document: Document, unknown: Sequence[paths.Parts]) -> RLJob | None:
    """The job with the keys that were meant in place of unknown ones, else without these; None where that is none either."""
    for correct in (True, False):
        data = json.loads(json.dumps(document.data))  # what anchors and aliases share is a copy each
        for parts in unknown:
            section: Any = data
            for part in parts[:-1]:
                section = section[part]
            value, meant = section.pop(parts[-1]), _meant_key(parts)
            if correct and meant is not None:
                section.setdefault(meant, value)
        try:
            return RLJob.model_validate_json(json.dumps(data))
        except ValidationError:
            continue
    return None


def arrange(document: Document, errors: Iterable[FieldError], surplus: int = 0) -> list[FieldError]:
    """Errors in the order of the manifest, without repetition, with the line of their path or of what is around it.

    At most :data:`MAX_PROBLEMS` of them; ``surplus`` more were left out before.
    """
    unique = list(dict.fromkeys(errors))
    listed, surplus = unique[:MAX_PROBLEMS], surplus + max(len(unique) - MAX_PROBLEMS, 0)
    ordered = sorted(listed, key=lambda error: paths.position(document.data, error.path))
    placed = [error if error.line is not None else dataclasses.replace(error, line=_line(document, error.path)) for error in ordered]
    return [*placed, _and_more(surplus)] if surplus else placed


def _and_more(count: int) -> FieldError:
    problem = f"{counted(count, 'more problem')} {'is' if count == 1 else 'are'} not listed"
    return FieldError(path="", problem=problem, remedy="fix the first ones")


def _line(document: Document, path: str) -> int | None:
    parts = paths.split(path)
    while parts and parts not in document.lines:
        parts = parts[:-1]
    return document.lines.get(parts)


def _document(source: yaml_text.YamlDocument) -> Document:
    assert isinstance(source.data, dict)
    return Document(data=source.data, lines=source.lines, errors=tuple(source.errors))


def _name(data: object) -> str:
    metadata = data.get("metadata") if isinstance(data, dict) else None
    return str(metadata.get("name")) if isinstance(metadata, dict) else "(no name)"


def _about_the_text(problem: str, remedy: str) -> SpecInvalidError:
    return SpecInvalidError([FieldError(path="", problem=f"the manifest {problem}", remedy=remedy)])


Words = tuple[str, str]
"""Problem and remedy."""


def _is_echo(item: Any) -> bool:
    """Whether pydantic calls a list too short only because it did not count entries with problems of their own."""
    return bool(item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"])


def _translate(item: Any) -> FieldError:
    """One pydantic error in the words of the manifest."""
    kind, context = item["type"], item.get("ctx", {})
    parts: paths.Parts = tuple(item["loc"])
    if parts and parts[-1] == "[key]":
        parts = parts[:-1]
        length = "a key that is not empty" if kind == "string_too_short" else "a shorter key"
        remedy = f"use {PATTERN_WORDS.get(context.get('pattern', ''), length)}"
        return FieldError(path=paths.join(parts), problem="is not a valid key", remedy=remedy)
    path = paths.join(parts)
    if kind == "missing":
        return FieldError(path=path, problem="is missing", remedy=_missing_remedy(parts))
    if kind == "extra_forbidden":
        return _unknown_key(parts)
    problem, remedy = _WORDS.get(kind, _other)(context, item)
    return FieldError(path=path, value=show(item["input"]), problem=problem, remedy=remedy)


def _missing_remedy(parts: paths.Parts) -> str:
    from rljob_api.crd import reference  # only on errors: the index costs a tenth of a second

    known = reference.index().get(reference.pattern(parts))
    if parts in _ALWAYS:
        return f"add {parts[0]}: {_ALWAYS[parts]}"
    return f"add it: {known.description}" if known else "add it"


_ALWAYS: Mapping[paths.Parts, str] = {("apiVersion",): API_VERSION, ("kind",): KIND}
"""Fields that have one value."""


def _unknown_key(parts: paths.Parts) -> FieldError:
    """Name the key that was meant: one with a similar name here, or the same name in another section."""
    from rljob_api.crd import reference  # only on errors: the index costs a tenth of a second

    key, meant = str(parts[-1]), _meant_key(parts)
    if meant is not None:
        remedy = f"did you mean {meant}?"
    else:
        elsewhere = [path for path in reference.index() if path.split(".")[-1].removesuffix("[]") == key]
        if elsewhere:
            remedy = f"it belongs at {' or '.join(elsewhere[:3])}"
        else:
            siblings = reference.children(reference.pattern(parts[:-1]))
            remedy = f"known fields here are {', '.join(siblings)}" if siblings else "remove it"
    return FieldError(path=paths.join(parts), problem=UNKNOWN_FIELD, remedy=remedy)


def _meant_key(parts: paths.Parts) -> str | None:
    """A key with a similar name in the same section."""
    from rljob_api.crd import reference  # only on errors: the index costs a tenth of a second

    key, siblings = str(parts[-1]), reference.children(reference.pattern(parts[:-1]))
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.7)
    folded = {sibling.replace("_", "").lower(): sibling for sibling in siblings}
    return folded.get(key.replace("_", "").replace("-", "").lower()) or (near[0] if near else None)


def _field(item: Any) -> str:
    """Name of the field that an error is about."""
    return next((part for part in reversed(item["loc"]) if isinstance(part, str)), "")


def _text_expected(context: Mapping[str, object], item: Any) -> Words:
    value = item["input"]
    if value is None:
        return "is empty, text is expected", "write a value or remove the line"
    if isinstance(value, list) and (text := meant.text_of_list(_field(item), value)) is not None:
        return "is a list, text is expected", f"write {text}"
    return f"is {_kind(value)}, text is expected", "write it in quotes" if isinstance(value, (int, float)) else "write text"


def _whole_number_expected(context: Mapping[str, object], item: Any) -> Words:
    unit, number = meant.unit_of(_field(item)), meant.number(_field(item), item["input"])
    example = {"bytes": "write a number such as 4294967296 for 4Gi", "seconds": "write a number such as 300 for 5 minutes"}
    problem = f"is {_kind(item['input'])}, a whole number{f' of {unit}' if unit else ''} is expected"
    remedy = example.get(unit, "write a number such as 8") if number is None else f"write {number}"
    if isinstance(item["input"], float):
        remedy = f"write a whole number such as {int(item['input'])}"
    return problem, _without_quotes(item["input"], _WHOLE, remedy)


def _number_expected(context: Mapping[str, object], item: Any) -> Words:
    unit, number = meant.unit_of(_field(item)), meant.number(_field(item), item["input"])
    problem = f"is {_kind(item['input'])}, a number{f' of {unit}' if unit else ''} is expected"
    return problem, _without_quotes(item["input"], _DECIMAL, "write a number such as 0.5" if number is None else f"write {number}")


_WHOLE = re.compile(r"[-+]?\d+", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def _without_quotes(value: object, number: re.Pattern[str], otherwise: str) -> str:
    return "write it without quotes" if isinstance(value, str) and number.fullmatch(value) else otherwise


def _bool_expected(context: Mapping[str, object], item: Any) -> Words:
    return f"is {_kind(item['input'])}, true or false is expected", "write true or false without quotes"


def _list_expected(context: Mapping[str, object], item: Any) -> Words:
    remedy = "start every entry with a dash, or write [a, b]"
    if isinstance(item["input"], dict):
        remedy = "write a dash before its first key, and begin its other keys in the column of that key"
    return f"is {_kind(item['input'])}, a list is expected", remedy


def _map_expected(context: Mapping[str, object], item: Any) -> Words:
    remedy = "indent its keys below it"
    if item["input"] is None and isinstance(item["loc"][-1], int):
        remedy = "write its keys after the dash, or remove the dash"
    elif isinstance(item["input"], list) and item["input"]:
        remedy = "write its keys without dashes"
    return f"is {_kind(item['input'])}, a section with keys is expected", remedy


def _choice(context: Mapping[str, object], item: Any) -> Words:
    choices = re.findall("'([^']*)'", str(context["expected"]))
    value = str(item["input"])
    remedy = meant.algorithm(tuple(item["loc"]), value) or did_you_mean(value, choices) or "write one of them"
    if len(choices) == 1:
        return f"must be {choices[0]}", f"write {choices[0]}"
    return f"is not one of {', '.join(choices)}", remedy


def _pattern(context: Mapping[str, object], item: Any) -> Words:
    pattern = str(context["pattern"])
    if pattern == QUANTITY_PATTERN and (quantity := meant.quantity(str(item["input"]))) is not None:
        return "is not written as it must be", f"write {quantity}"
    if pattern in PATTERN_WORDS:
        return "is not written as it must be", f"use {PATTERN_WORDS[pattern]}"
    return f"does not match the pattern {pattern}", "use only the characters the pattern allows"


def _length(word: str, limit: str, unit: str) -> Callable[[Mapping[str, object], Any], Words]:
    def words(context: Mapping[str, object], item: Any) -> Words:
        bound = context[limit]
        return f"has {len(item['input'])} {unit}, {word} {bound} {'is' if bound == 1 else 'are'} allowed", f"use {word} {bound}"

    return words


def _bound(sign: str, limit: str) -> Callable[[Mapping[str, object], Any], Words]:
    def words(context: Mapping[str, object], item: Any) -> Words:
        return f"must be {sign} {context[limit]}", f"use a number {sign} {context[limit]}"

    return words


def _other(context: Mapping[str, object], item: Any) -> Words:
    return str(item["msg"]), "see `rljob explain` for the field"


def _score_or_drop(context: Mapping[str, object], item: Any) -> Words:
    return "is neither Drop nor a score", "write Drop, or a number from -1e6 to 1e6"


def _quantity_too_large(context: Mapping[str, object], item: Any) -> Words:
    return f"is larger than the largest whole number of Kubernetes, {2**63 - 1}", 'write a quantity with a suffix such as "512Gi"'


def _float16_training(context: Mapping[str, object], item: Any) -> Words:
    return (
        "is a type for engines alone: a model trained in it loses small gradients",
        "write bfloat16, which has the range of float32, and engine.dtype: float16 where engines need it",
    )


def _kind(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true or false"
    kinds: dict[type, str] = {int: "a whole number", float: "a decimal number", str: "text", list: "a list", dict: "a section"}
    return kinds.get(type(value), type(value).__name__)


_WORDS: dict[str, Callable[[Mapping[str, object], Any], Words]] = {
    "string_type": _text_expected,
    "int_type": _whole_number_expected,
    "int_from_float": _whole_number_expected,
    "int_parsing": _whole_number_expected,
    "float_type": _number_expected,
    "float_parsing": _number_expected,
    "bool_type": _bool_expected,
    "bool_parsing": _bool_expected,
    "list_type": _list_expected,
    "tuple_type": _list_expected,
    "dict_type": _map_expected,
    "model_type": _map_expected,
    "model_attributes_type": _map_expected,
    "enum": _choice,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "string_too_long": _length("at most", "max_length", "characters"),
    "string_too_short": _length("at least", "min_length", "characters"),
    "score_or_drop": _score_or_drop,
    "quantity_too_large": _quantity_too_large,
    "float16_training": _float16_training,
    "too_long": _length("at most", "max_length", "entries"),
    "too_short": _length("at least", "min_length", "entries"),
    "greater_than_equal": _bound(">=", "ge"),
    "greater_than": _bound(">", "gt"),
    "less_than_equal": _bound("<=", "le"),
    "less_than": _bound("<", "lt"),
}
