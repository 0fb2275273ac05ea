"""From a judge's words to a score; runs in a scoring process, under the time limit of its reward."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping

from rljob_runtime.errors import PluginError, RewardSetupError
from rljob_runtime.plugins import check_signature, load_function
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.functions import after_thinking
from rljob_runtime.rewards.judging.config import ReaderConfig

Reader = Callable[[str, str, str, str, Mapping[str, object]], object]
"""``reader(judgement, prompt, response, answer, metadata)``: a number or a mapping with ``score``."""

_SHOWN_CHARACTERS = 80


class UnreadableError(ValueError):
    """Raised when a judgement holds no score; says what it holds."""


def load_reader(config: RewardConfig, folder: str | None) -> Reader:
    """What reads the judgements of an LLMJudge reward.

    ``folder`` (the job file's) is searched first for the module of a function. Raises RewardSetupError.
    """
    if config.judge is None:
        raise RewardSetupError(f"reward {config.name!r}: type {config.type} has no judge whose words could be read")
    reader = config.judge.reader
    if reader.function is not None:
        return _load_function(config.name, reader.function, dict(config.params), folder)
    find = _pattern(reader.pattern) if reader.pattern is not None else _json_field(str(reader.json_field))

    def read(judgement: str, _prompt: str, _response: str, _answer: str, _metadata: Mapping[str, object]) -> float:
        try:
            return score_of(find(after_thinking(judgement)), reader)
        except UnreadableError:
            if reader.otherwise is None:
                raise
            return reader.otherwise

    return read


def score_of(word: str, reader: ReaderConfig) -> float:
    """The score of what pattern or field found.

    Raises:
        UnreadableError: it is none of the values, no number, or out of range.
    """
    if reader.values:
        scores = {name.strip().casefold(): score for name, score in reader.values.items()}
        if word.strip().casefold() not in scores:
            raise UnreadableError(f"the judge said {_shown(word)}, which is none of {', '.join(reader.values)}")
        return scores[word.strip().casefold()]
    try:
        score = float(word)
    except ValueError as error:
        raise UnreadableError(f"the judge said {_shown(word)}, which is not a number") from error
    if not math.isfinite(score):
        raise UnreadableError(f"the judge said {_shown(word)}, which is not a finite number")
    low, high = reader.minimum, reader.maximum
    if (low is not None and score < low) or (high is not None and score > high):
        least, most = "any" if low is None else f"{low:g}", "any" if high is None else f"{high:g}"
        raise UnreadableError(f"the judge said {score:g}, which is not from {least} to {most}")
    return score


def _pattern(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def find(text: str) -> str:
        matches = deque(compiled.finditer(text), maxlen=1)
        if not matches:
            raise UnreadableError(f"the judge said {_shown(text)}, where nothing matches {pattern}")
        return str(matches[0].group(compiled.groups) or "")

    return find


def _json_field(path: str) -> Callable[[str], str]:
    """The field of the last JSON object that has it."""
    decoder = json.JSONDecoder()

    def find(text: str) -> str:
        found = None
        place = text.find("{")
        while place >= 0:
            try:
                value, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                end = place + 1
            else:
                field = _at(value, path)
                found = found if field is None else field
            place = text.find("{", end)
        if found is None:
            raise UnreadableError(f"the judge said {_shown(text)}, which holds no JSON object with {path}")
        return found

    return find


def _at(value: object, path: str) -> str | None:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value)


def _load_function(name: str, reference: str, params: dict[str, object], folder: str | None) -> Reader:
    keywords = {"judgement": "", "prompt": "", "response": "", "answer": "", "metadata": {}} | params
    try:
        function = load_function(reference, folder)
        check_signature(function, reference, (), keywords, f"the keywords {', '.join(keywords)}")
    except PluginError as error:
        raise RewardSetupError(f"reward {name!r}: {error}") from error

    def read(judgement: str, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> object:
        result: object = function(judgement=judgement, prompt=prompt, response=response, answer=answer, metadata=metadata, **params)
        return result

    return read


def _shown(text: str) -> str:
    stripped = text.strip()
    return json.dumps(stripped if len(stripped) <= _SHOWN_CHARACTERS else f"...{stripped[-_SHOWN_CHARACTERS:]}", ensure_ascii=False)
