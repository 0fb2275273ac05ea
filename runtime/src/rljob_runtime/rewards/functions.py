"""Answer extraction and the reward functions, run inside the child process.

A loaded reward is a plain callable ``(prompt, response, answer, metadata) -> float | Mapping``. What a reward needs is
imported when it is loaded, never at module import and never during the first evaluation, whose time limit it would eat.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from rljob_api.vocabulary import Extraction, RewardType
from rljob_runtime.errors import DataError, PluginError, RewardSetupError
from rljob_runtime.plugins import check_signature, load_function
from rljob_runtime.rewards.code import CodeSettings, load_code
from rljob_runtime.rewards.code_runner import CodeRunner
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.ifeval import follows

RewardFunction = Callable[[str, str, str, Mapping[str, object]], object]
"""``function(prompt, response, answer, metadata)``: a number or a mapping with ``score``."""

_MATH = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[|\\begin\{")
"""What math-verify reads LaTeX in."""
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*%|\s+[A-Za-z]+)?")
"""A number or fraction, perhaps with a unit: as LaTeX a unit would be a product of variables, and ``1 234`` one of numbers."""
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}")
_SENTENCE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def extract(text: str, config: RewardConfig) -> str | None:
    """Return the part of ``text`` that is scored, or None when it is not there."""
    match config.extraction:
        case Extraction.WHOLE:
            return text.strip()
        case Extraction.LAST_LINE:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else None
        case Extraction.BOXED:
            return _last_boxed(text)
        case Extraction.TAG:
            return _last_tag(text, config.tag)
        case Extraction.LAST_NUMBER:
            numbers = _NUMBER.findall(text)
            return numbers[-1].replace(",", "") if numbers else None


def _last_boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{...}`` holds; braces inside may nest."""
    marker = "\\boxed{"
    start = text.rfind(marker)
    while start >= 0:
        depth = 1
        for end in range(start + len(marker), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(marker) : end].strip()
        start = text.rfind(marker, 0, start)
    return None


def _last_tag(text: str, tag: str) -> str | None:
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if 0 <= start < end else None


def load(config: RewardConfig, folder: str | None, runner: CodeRunner | None = None) -> RewardFunction:
    """Return the callable of a reward, with all it needs imported.

    ``folder`` (the job file's) is searched first for a Function's module; ``runner`` runs the code of a Code reward. Raises
    RewardSetupError.
    """
    match config.type:
        case RewardType.TASK:
            return _load_task()
        case RewardType.EXACT_MATCH:
            return _exact_match(config.extraction, ignore_case=bool(config.params.get("ignore_case", False)))
        case RewardType.MATH_VERIFY:
            return _load_math_verify(config)
        case RewardType.MATH_RULE:
            return _load_math_rule(config.params)
        case RewardType.MULTIPLE_CHOICE:
            return _multiple_choice(require_boxed=bool(config.params.get("require_boxed", True)))
        case RewardType.IF_EVAL:
            return _load_if_eval(partial=bool(config.params.get("partial", False)))
        case RewardType.CODE:
            if runner is None:
                raise RewardSetupError(f"reward {config.name!r}: type Code runs in a scoring process that starts runs")
            return load_code(CodeSettings(timeout_s=config.timeout_s, **_keywords(config.params)), runner)
        case RewardType.FUNCTION:
            return _load_function(config, folder)
        case RewardType.LLM_JUDGE | RewardType.REWARD_MODEL:
            raise RewardSetupError(f"reward {config.name!r}: a judge scores by its words; judging.words reads them")


def _exact_match(extraction: Extraction, *, ignore_case: bool) -> RewardFunction:
    def score(_prompt: str, response: str, answer: str, _metadata: Mapping[str, object]) -> float:
        if extraction is Extraction.LAST_NUMBER:
            answer = answer.replace(",", "")  # as in the number that was found
        if ignore_case:
            return float(response.strip().casefold() == answer.strip().casefold())
        return float(response.strip() == answer.strip())

    return score


def _load_task() -> RewardFunction:
    import reasoning_gym  # noqa: F401 - imported here so that the first evaluation does not pay for it

    from rljob_runtime.data.reasoning_gym_source import ENTRY_KEY, PARAMS_KEY, TASK_KEY, create_task

    scorers: dict[str, Callable[[str, dict[str, object]], float]] = {}

    def score(_prompt: str, response: str, _answer: str, metadata: Mapping[str, object]) -> float:
        entry, task, params = metadata.get(ENTRY_KEY), metadata.get(TASK_KEY), metadata.get(PARAMS_KEY)
        if not isinstance(entry, dict) or not isinstance(task, str) or not isinstance(params, dict):
            raise DataError(
                "the prompt does not come from a reasoning-gym source, so type Task cannot score it; use ExactMatch, MathVerify or Function"
            )
        key = f"{task} {params!r}"
        if key not in scorers:
            scorers[key] = create_task(task, params, seed=0, size=1).score_answer
        return scorers[key](response, entry)

    return score


def _reference_value(answer: str) -> Any:
    """What math-verify finds in a reference answer.

    Raises:
        DataError: nothing.
    """
    # It logs each answer it cannot parse, and warns that its signal-based limit is off; ours applies instead.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    gold = _value(answer)
    if not gold:
        raise DataError(f"math-verify finds no value in the reference answer {answer[:60]!r}; fix the data or use ExactMatch")
    return gold


def _value(text: str) -> Any:
    """What math-verify finds in an answer alone, such as ``2k+2``: outside of LaTeX it would pick one of the numbers.

    verl boxes references for that (``verl.utils.reward_score.math_verify``).
    """
    from math_verify import parse

    text = text.strip()
    if _SCIENTIFIC.fullmatch(text):
        text = f"{Decimal(text):f}"
    is_sentence = "\\" not in text and _SENTENCE.search(text)
    as_it_is = _MATH.search(text) or _PLAIN_NUMBER.fullmatch(text) or is_sentence
    found = [] if as_it_is else parse(f"${text}$", parsing_timeout=None)
    return found or parse(text, parsing_timeout=None)


def _load_math_verify(config: RewardConfig) -> RewardFunction:
    from math_verify import parse, verify

    options, is_whole = dict(config.params), config.extraction is Extraction.WHOLE

    def score(_prompt: str, response: str, answer: str, _metadata: Mapping[str, object]) -> float:
        gold = _reference_value(answer)
        found = parse(_as_math(response), parsing_timeout=None) if is_whole else _value(response)
        return float(verify(gold, found, timeout_seconds=None, **options))

    score("", "1", "1", {})
    return score


def after_thinking(text: str) -> str:
    """What follows the last </think>; the whole text without one."""
    return text.rpartition("</think>")[2].strip()


def _load_math_rule(params: Mapping[str, object]) -> RewardFunction:
    """As ROLL's math_rule_reward_worker: the answer after the thinking, boxed or not."""
    from math_verify import parse, verify

    options = dict(params)

    def score(_prompt: str, response: str, answer: str, _metadata: Mapping[str, object]) -> float:
        gold = _reference_value(answer)
        text = after_thinking(response)
        boxed = _last_boxed(text)
        found = parse(text if boxed is None else f"${boxed}$", fallback_mode="no_fallback", parsing_timeout=None)
        return float(bool(found) and verify(gold, found, timeout_seconds=None, **options))

    score("", "1", "1", {})
    return score


def _multiple_choice(*, require_boxed: bool) -> RewardFunction:
    """As ROLL's multiple_choice_boxed_rule_reward_worker; without the box what follows "answer is", as its crossthinkqa."""

    def score(_prompt: str, response: str, answer: str, _metadata: Mapping[str, object]) -> float:
        wanted = _choice(answer)
        if wanted is None:
            raise DataError(f"the reference answer {answer[:60]!r} names no choice; write a capital letter such as B")
        text = after_thinking(response)
        boxed = _last_boxed(text)
        if boxed is None and require_boxed:
            return 0.0
        start = text.lower().rfind("answer is")
        part = boxed if boxed is not None else text[start + len("answer is") :] if start >= 0 else text
        return float(_choice(part) == wanted)

    return score


def _choice(text: str) -> str | None:
    return next((letter for letter in text if letter.isupper()), None)


def _load_if_eval(*, partial: bool) -> RewardFunction:
    import py3langid

    py3langid.classify("loads its model, which takes a second")

    def score(_prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
        followed = follows(after_thinking(response), answer, metadata)
        return sum(followed) / len(followed) if partial else float(all(followed))

    return score


def _keywords(params: Mapping[str, object]) -> Mapping[str, Any]:
    return params


def _as_math(text: str) -> str:
    """Put bare LaTeX between dollars: math-verify reads LaTeX only inside an environment."""
    return f"${text}$" if "\\" in text and not _MATH.search(text) else text


def _load_function(config: RewardConfig, folder: str | None) -> RewardFunction:
    params, reference = dict(config.params), str(config.function)
    keywords = {"prompt": "", "response": "", "answer": "", "metadata": {}} | params
    try:
        function = load_function(reference, folder)
        check_signature(function, reference, (), keywords, f"the keywords {', '.join(keywords)}")
    except PluginError as error:
        raise RewardSetupError(f"reward {config.name!r}: {error}") from error
    prepare = getattr(function, "prepare", None)
    if prepare is not None:
        prepare(**params)

    def score(prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> object:
        result: object = function(prompt=prompt, response=response, answer=answer, metadata=metadata, **params)
        return result

    return score


def to_scores(value: object) -> tuple[float, dict[str, float]]:
    """Return (score, further named numbers) of what a reward function returned.

    Accepts a finite number, or a mapping of names to finite numbers with ``score`` among them. Raises TypeError or
    ValueError naming what was returned instead.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"returned a mapping without 'score' (keys: {', '.join(map(str, value)) or 'none'})")
        return _number(value["score"], "score"), {str(k): _number(v, str(k)) for k, v in value.items() if k != "score"}
    return _number(value, "the result"), {}


def _number(value: object, label: str) -> float:
    # numpy and torch scalars offer item(); anything else that is not a number is a mistake to be reported.
    plain = value.item() if hasattr(value, "item") and not isinstance(value, int | float) else value
    if isinstance(plain, bool | int | float):
        number = float(plain)
        if number - number == 0.0:
            return number
        raise ValueError(f"{label} is {number}, not a finite number")
    shown = json.dumps(plain) if isinstance(plain, str | None) else type(plain).__name__
    raise TypeError(f"{label} is {shown[:60]}, not a number")
