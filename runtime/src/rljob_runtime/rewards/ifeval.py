"""Instructions that can be checked by a program: the 25 of IFEval (Zhou et al., arXiv 2311.07911, table 1).

An entry names them in one of two ways:

* as the IFEval data set does: fields ``instruction_id_list`` and ``kwargs``, lists of equal length;
* as the RLVR data sets made from it do (allenai/RLVR-IFeval, ROLL): the reference answer, or the field ``ground_truth``, is a JSON object
  with ``func_name`` and that function's arguments.

Differences of the second from the first (exact instead of minimal numbers, no language check of capital letters) are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljob_runtime.errors import DataError

Check = Callable[..., bool]

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s")
_RELATIONS = ("less than", "at least", "at most", "around")


def follows(text: str, answer: str, metadata: Mapping[str, object]) -> list[bool]:
    """Whether ``text`` follows each of the entry's instructions.

    Raises:
        DataError: the entry names no instruction, an unknown one, or arguments that it does not take.
    """
    ids = metadata.get("instruction_id_list")
    if isinstance(ids, list) and ids:
        given = metadata.get("kwargs") or [{}] * len(ids)
        if not isinstance(given, list) or len(given) != len(ids):
            raise DataError(f"field 'kwargs' does not match 'instruction_id_list' ({len(ids)} entries); give each instruction its own")
        return [_call(IFEVAL, str(name), text, arguments or {}) for name, arguments in zip(ids, given, strict=True)]
    truth: object = metadata.get("ground_truth", answer)
    try:
        truth = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError:
        truth = None
    if not isinstance(truth, dict) or "func_name" not in truth:
        raise DataError(
            "the entry names no instruction; give it instruction_id_list and kwargs, or a reference answer with a JSON object "
            'such as {"func_name": "validate_no_commas"}'
        )
    arguments = {key.lower(): value for key, value in truth.items() if key != "func_name"}
    return [_call(RLVR, str(truth["func_name"]), text, arguments)]


def _call(checks: Mapping[str, Check], name: str, text: str, given: Mapping[str, Any]) -> bool:
    """Data sets list the arguments of all instructions with each, most of them null; one that takes none of them sees none."""
    if name not in checks:
        raise DataError(f"instruction {name!r} is unknown; known are {', '.join(checks)}")
    check = checks[name]
    code = check.__code__
    wanted = code.co_varnames[1 : code.co_argcount]
    arguments = {key: value for key, value in given.items() if value is not None}
    missing = [key for key in wanted if key not in arguments]
    if missing:
        raise DataError(f"instruction {name!r} lacks its argument {missing[0]!r}; it takes {', '.join(wanted)}")
    return bool(text.strip()) and check(text, *(arguments[key] for key in wanted))


def _compare(count: int, relation: str, wanted: int) -> bool:
    """IFEval's two relations and the RLVR sets' three; around allows a tenth, at least 1."""
    match relation:
        case "less than":
            return count < wanted
        case "at least":
            return count >= wanted
        case "at most":
            return count <= wanted
        case "around":
            return abs(count - wanted) <= max(round(wanted * 0.1), 1)
    raise DataError(f"relation {relation!r} is unknown; known are {', '.join(_RELATIONS)}")


def _language(text: str, language: str) -> bool:
    import py3langid

    return str(py3langid.classify(text)[0]) == language.partition("-")[0]


def _word_count(text: str, word: str) -> int:
    return len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower()))


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def _forbidden(text: str, words: Sequence[str]) -> bool:
    return not any(_word_count(text, word) for word in words)


def _divided(text: str, divider: str) -> list[str] | None:
    """Pieces between dividers, None where one of the inner ones is empty; an empty first or last one does not count."""
    pieces = [piece.strip() for piece in re.split(divider, text)]
    inner = pieces[1 if not pieces[0] else 0 : len(pieces) - (not pieces[-1])]
    return inner if all(inner) else None


def _paragraphs(text: str, number: int) -> bool:
    found = _divided(text, r"\s?\*\s?\*\s?\*\s?")
    return found is not None and len(found) == number


def _nth_paragraph(text: str, number: int, nth: int, first_word: str) -> bool:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\n", text) if paragraph.strip()]
    if len(paragraphs) != number or not 1 <= nth <= number:
        return False
    words = re.findall(r"[\w'-]+", paragraphs[nth - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _postscript(text: str, marker: str) -> bool:
    pattern = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker.lower()))
    return re.search(rf"{pattern}.*\S", text.lower()) is not None


def _bullets(text: str) -> int:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-).+$", text, re.MULTILINE))


def _highlights(text: str) -> int:
    return sum(bool(found.strip("* ")) for found in re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text))


def _is_json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    found = _divided(text, r"\*{6}")
    return found is not None and len(found) == 2 and found[0] != found[1]


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"[\w'-]+", text))


def _quoted(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


IFEVAL: Mapping[str, Check] = {
    "keywords:existence": lambda text, keywords: _keywords(text, keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(_word_count(text, keyword), relation, frequency),
    "keywords:forbidden_words": lambda text, forbidden_words: _forbidden(text, forbidden_words),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: _language(text, language),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        len(_SENTENCE_END.split(text.strip())), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: _paragraphs(text, num_paragraphs),
    "length_constraints:number_words": lambda text, num_words, relation: _compare(len(re.findall(r"\w+", text)), relation, num_words),
    "length_constraints:nth_paragraph_first_word": lambda text, num_paragraphs, nth_paragraph, first_word: _nth_paragraph(
        text, num_paragraphs, nth_paragraph, first_word
    ),
    "detectable_content:number_placeholders": lambda text, num_placeholders: len(re.findall(r"\[.*?\]", text)) >= num_placeholders,
    "detectable_content:postscript": lambda text, postscript_marker: _postscript(text, postscript_marker),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: _bullets(text) == num_bullets,
    "detectable_format:constrained_response": lambda text: any(
        option in text for option in ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: _highlights(text) >= num_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": lambda text: _is_json(text),
    "detectable_format:title": lambda text: _title(text),
    "combination:two_responses": lambda text: _two_responses(text),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda text: _quoted(text),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        _capital_words(text), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""By the identifiers and argument names of the IFEval data set."""

RLVR: Mapping[str, Check] = {
    "verify_keywords": lambda text, keyword_list: _keywords(text, keyword_list),
    "verify_keyword_frequency": lambda text, word, n: _word_count(text, word) == n,
    "validate_forbidden_words": lambda text, forbidden_words: not any(word.lower() in text.lower() for word in forbidden_words),
    "verify_letter_frequency": lambda text, letter, n: text.count(letter) == n,
    "validate_response_language": lambda text, language: _language(text, language),
    "verify_paragraph_count": lambda text, n: all(p.strip() for p in text.split("* * *")) and len(text.split("* * *")) == n,
    "validate_word_constraint": lambda text, n, quantifier: _compare(len(text.split()), quantifier, n),
    "verify_sentence_constraint": lambda text, n, quantifier: _compare(len(_SENTENCE_END.split(text.strip())), quantifier, n),
    "validate_paragraphs": lambda text, n, first_word, i: (
        len(text.split("\n\n")) == n and text.split("\n\n")[i - 1].strip().startswith(first_word)
    ),
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda text, n: len(re.findall(r"\[(.*?)\]", text)) >= n,
    "verify_bullet_points": lambda text, n: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == n,
    "validate_title": lambda text: re.search(r"<<(.*?)>>", text) is not None,
    "validate_choice": lambda text, options: any(text.strip() in option for option in options),
    "validate_highlighted_sections": lambda text, n: len(re.findall(r"\*(.*?)\*", text)) >= n,
    "validate_sections": lambda text, n, section_splitter: len(text.removeprefix(section_splitter).split(section_splitter)) == n,
    "validate_json_format": lambda text: _is_json(text),
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: _two_responses(text),
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, n, quantifier: _compare(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, n),
    "validate_end": lambda text, end_phrase: text.rstrip().endswith(end_phrase),
    "validate_quotation": lambda text: _quoted(text),
    "validate_no_commas": lambda text: "," not in text,
}
"""By the function and argument names of allenai/RLVR-IFeval, whose N is n here."""
