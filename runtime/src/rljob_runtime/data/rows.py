"""One row of a file as a question with its answer, or what is wrong with it; and the error that names all bad rows at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_runtime.data.config import FileSource
from rljob_runtime.data.messages import Message, looks_like_messages, question_of, read_messages
from rljob_runtime.errors import DataError

MAX_REPORTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question of any source, before it is formatted and tokenized."""

    question: str
    """What the user says; of a conversation what is said last."""
    answer: str
    tag: str | None = None
    messages: tuple[Message, ...] = ()
    """The conversation up to the response, if the prompt is one."""
    metadata: dict[str, object] = field(default_factory=dict)


def checked(where: str, unit: str, problems: Sequence[tuple[int, str]], total: int) -> None:
    """Refuse bad rows, the first of them by number and reason.

    Args:
        where: the source and its file.
        unit: what a row is called.
        problems: number and reason of each bad one.
        total: rows of the file, blank ones included.

    Raises:
        DataError: there are some.
    """
    if not problems:
        return
    shown = [f"  {unit} {number}: {problem}" for number, problem in problems[:MAX_REPORTED]]
    if len(problems) > len(shown):
        shown.append(f"  and {len(problems) - len(shown)} more")
    noun = f"{unit} is" if len(problems) == 1 else f"{unit}s are"
    raise DataError("\n".join([f"{where}: {len(problems)} {noun} unusable of {total}; fix or remove:", *shown]))


def row_of(value: dict[str, object], source: FileSource) -> Row | str:
    """Return the row of an object, or what is wrong with it."""
    if source.prompt_field not in value:
        return _missing("promptField", source.prompt_field, value)
    messages: tuple[Message, ...] = ()
    if looks_like_messages(value[source.prompt_field]):
        read = _conversation(value[source.prompt_field], source)
        if isinstance(read, str):
            return f"field {source.prompt_field!r}: {read}"
        messages, question = read, question_of(read)
    else:
        asked = value.pop(source.prompt_field)
        if not isinstance(asked, str) or not asked.strip():
            return f"field {source.prompt_field!r} is {_shown(asked)}; it must be non-empty text"
        question = asked
    answer: object = ""
    if source.answer_field is not None:
        found = _pop(value, source.answer_field)
        if found is None:
            return _missing("answerField", source.answer_field, value)
        answer = found[0]
        if not _is_answer(answer):
            return f"field {source.answer_field!r} is {_shown(answer)}; it must be text or a number"
    tag: str | None = None
    if source.tag_field is not None:
        if source.tag_field not in value:
            return _missing("tagField", source.tag_field, value)
        given = value[source.tag_field]
        if not isinstance(given, str) or not given:
            return f"field {source.tag_field!r} is {_shown(given)}; it must be non-empty text"
        tag = given
    return Row(question=question, answer=str(answer), tag=tag, messages=messages, metadata=value)


def _is_answer(value: object) -> bool:
    """Text or a number; NaN, as pandas writes missing answers, is none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def _conversation(value: object, source: FileSource) -> tuple[Message, ...] | str:
    """The messages of a prompt that is a conversation, or what is wrong with it."""
    if source.no_messages is not None:
        return f"a list of messages {source.no_messages}, or write text"
    assert isinstance(value, Sequence)
    return read_messages(value)


def _pop(value: dict[str, object], name: str) -> tuple[object] | None:
    """Take a field out of an object; of one within others, whose names are joined by dots, a copy. None: there is none."""
    if name in value:
        return (value.pop(name),)
    found: object = value
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return (found,)


def _missing(option: str, name: str, value: dict[str, object]) -> str:
    present = ", ".join(sorted(value)) or "none"
    return f"no field {name!r} (other fields: {present}); add it, or set {option}"


def example(source: FileSource) -> str:
    """A row that the source could read, as JSON."""
    fields = {source.prompt_field: "What is 2 + 3?"}
    if source.answer_field is not None:
        fields[source.answer_field] = "5"
    if source.tag_field is not None:
        fields[source.tag_field] = "math"
    return json.dumps(fields)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
