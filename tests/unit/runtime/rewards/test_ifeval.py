"""Every instruction holds for one text and not for another."""

import json

import pytest

from rljob_runtime.errors import DataError
from rljob_runtime.rewards.ifeval import IFEVAL, RLVR, follows

ENGLISH = "The weather was fine and we walked along the river until the evening came."
GERMAN = "Das Wetter war schön und wir gingen am Fluss entlang, bis der Abend kam."

CASES = {
    "keywords:existence": ({"keywords": ["Sun", "rain"]}, "rain and sun", "rain"),
    "keywords:frequency": ({"keyword": "rain", "frequency": 2, "relation": "at least"}, "rain, Rain", "rain train"),
    "keywords:forbidden_words": ({"forbidden_words": ["rain"]}, "the train", "the rain"),
    "keywords:letter_frequency": ({"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a b", "a A"),
    "language:response_language": ({"language": "de"}, GERMAN, ENGLISH),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "One. Two!", "One."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb\n***\nc"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "a b", "a b c"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First\n\nThen, b",
        "Then\n\nFirst",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "a\nP. S. more", "a PS more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    "detectable_format:multiple_sections": ({"section_spliter": "Section", "num_sections": 2}, "Section 1 a\nSection 2 b", "Section 1"),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<a title>>\ntext", "<< >>"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "say it. Yes", "Yes. say it."),
    "startend:end_checker": ({"end_phrase": "The end."}, "so. the end.", "The end. so"),
    "startend:quotation": ({}, '"a"', 'a "b"'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, "A BC d", "A b c"),
    "change_case:english_capital": ({}, "ALL OF IT", "All of it"),
    "change_case:english_lowercase": ({}, "all of it", "All of it"),
    "punctuation:no_comma": ({}, "a b", "a, b"),
}

RLVR_CASES = {
    "verify_keywords": ({"keyword_list": ["sun"]}, "Sun", "moon"),
    "verify_keyword_frequency": ({"word": "sun", "N": 2}, "sun Sun", "sun"),
    "validate_forbidden_words": ({"forbidden_words": ["sun"]}, "moon", "Sunny"),
    "verify_letter_frequency": ({"letter": "a", "N": 2}, "aa A", "a"),
    "validate_response_language": ({"language": "en"}, ENGLISH, GERMAN),
    "verify_paragraph_count": ({"N": 2}, "a\n* * *\nb", "a\n* * *\n"),
    "validate_word_constraint": ({"N": 20, "quantifier": "around"}, "a " * 18, "a " * 17),
    "verify_sentence_constraint": ({"N": 1, "quantifier": "at most"}, "One.", "One. Two."),
    "validate_paragraphs": ({"N": 2, "first_word": "Then", "i": 2}, "a\n\nThen b", "Then a\n\nb"),
    "verify_postscript": ({"postscript_marker": "P.S."}, "a P.S. b", "a P.S."),
    "validate_placeholders": ({"N": 1}, "[a]", "a"),
    "verify_bullet_points": ({"N": 2}, "* a\n- b", "* a"),
    "validate_title": ({}, "<<a>>", "<a>"),
    "validate_choice": ({"options": ["yes", "no"]}, "yes", "maybe"),
    "validate_highlighted_sections": ({"N": 2}, "*a* *b*", "*a*"),
    "validate_sections": ({"N": 2, "section_splitter": "SECTION"}, "SECTION 1 a SECTION 2 b", "SECTION 1"),
    "validate_json_format": ({}, "[1]", "[1"),
    "validate_repeat_prompt": ({"original_prompt": "Say"}, "Say it", "it Say"),
    "validate_two_responses": ({}, "a ****** b", "a ****** a"),
    "validate_uppercase": ({}, "AB 1", "Ab"),
    "validate_lowercase": ({}, "ab 1", "Ab"),
    "validate_frequency_capital_words": ({"N": 1, "quantifier": "at most"}, "A b", "A B"),
    "validate_end": ({"end_phrase": "end."}, "the end.\n", "end. more"),
    "validate_quotation": ({}, '"a"', '"a'),
    "validate_no_commas": ({}, "a", "a,"),
}


def test_every_instruction_has_a_case():
    assert set(CASES) == set(IFEVAL)
    assert set(RLVR_CASES) == set(RLVR)
    assert len(IFEVAL) == len(RLVR) == 25


@pytest.mark.parametrize("name", CASES)
def test_instructions_of_the_ifeval_set(name):
    arguments, good, bad = CASES[name]
    metadata = {"instruction_id_list": [name], "kwargs": [arguments | {"nth_of_another": None}]}
    assert follows(good, "", metadata) == [True]
    assert follows(bad, "", metadata) == [False]
    assert follows("  ", "", metadata) == [False]


@pytest.mark.parametrize("name", RLVR_CASES)
def test_instructions_of_the_rlvr_sets(name):
    arguments, good, bad = RLVR_CASES[name]
    answer = json.dumps({"func_name": name, "quantifier": None, "N": None, **arguments})
    assert follows(good, answer, {}) == [True]
    assert follows(bad, answer, {}) == [False]
    assert follows(good, "", {"ground_truth": json.loads(answer)}) == [True]


def test_each_instruction_of_an_entry_counts():
    metadata = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"], "kwargs": [{}, {}]}
    assert follows("One two", "", metadata) == [True, False]


@pytest.mark.parametrize(
    ("answer", "metadata", "message"),
    [
        ("7", {}, "the entry names no instruction"),
        ('{"func_name": "validate_commas"}', {}, "instruction 'validate_commas' is unknown; known are verify_keywords"),
        ('{"func_name": "verify_bullet_points"}', {}, "instruction 'verify_bullet_points' lacks its argument 'n'; it takes n"),
        ("", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "does not match 'instruction_id_list'"),
        ('{"func_name": "validate_word_constraint", "N": 1, "quantifier": "about"}', {}, "relation 'about' is unknown"),
    ],
)
def test_an_unusable_entry_says_what_is_wrong(answer, metadata, message):
    with pytest.raises(DataError, match=message):
        follows("text", answer, metadata)
