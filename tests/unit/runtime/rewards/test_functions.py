"""Extraction, the built-in rewards and what a reward may return: no processes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.errors import DataError, RewardSetupError
from rljob_runtime.rewards import Extraction, RewardConfig, RewardType
from rljob_runtime.rewards.config import check_tags
from rljob_runtime.rewards.functions import extract, load, to_scores


def config(type_=RewardType.EXACT_MATCH, **options):
    return RewardConfig(name="r", type=type_, **options)


@pytest.mark.parametrize(
    ("extraction", "text", "expected"),
    [
        (Extraction.WHOLE, "  12 \n", "12"),
        (Extraction.LAST_LINE, "work\n 12 \n\n", "12"),
        (Extraction.LAST_LINE, " \n", None),
        (Extraction.BOXED, r"\boxed{1} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (Extraction.BOXED, r"\boxed{3} then \boxed{4", "3"),
        (Extraction.BOXED, "4", None),
        (Extraction.TAG, "<answer>1</answer> no: <answer> 2 </answer> done", "2"),
        (Extraction.TAG, "</answer>1<answer>", None),
        (Extraction.TAG, "12", None),
        (Extraction.LAST_NUMBER, "3 apples, 1,234 pears.", "1234"),
        (Extraction.LAST_NUMBER, "so -2.50", "-2.50"),
        (Extraction.LAST_NUMBER, "it is 1.5e-3", "1.5e-3"),
        (Extraction.LAST_NUMBER, "none", None),
    ],
)
def test_extraction(extraction, text, expected):
    assert extract(text, config(extraction=extraction)) == expected


def test_the_tag_can_be_named():
    assert extract("<final>7</final>", config(extraction=Extraction.TAG, tag="final")) == "7"


@given(value=st.integers(-(10**9), 10**9), around=st.text(alphabet="abc \n.", max_size=10))
def test_last_number_finds_any_whole_number(value, around):
    assert extract(f"1 {around} {value}", config(extraction=Extraction.LAST_NUMBER)) == str(value)


@pytest.mark.parametrize(
    ("params", "response", "answer", "score"),
    [({}, " Yes", "Yes ", 1.0), ({}, "yes", "Yes", 0.0), ({"ignore_case": True}, "yes", "Yes", 1.0)],
)
def test_exact_match(params, response, answer, score):
    assert load(config(params=params), None)("", response, answer, {}) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("0.5", "1/2", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"so $x = 3$", "3", 1.0),
        ("2", "3", 0.0),
        ("no value", "3", 0.0),
        (r"\boxed{4}", "4", 1.0),
    ],
)
def test_math_verify(response, answer, score):
    assert load(config(RewardType.MATH_VERIFY), None)("", response, answer, {}) == score


@pytest.mark.parametrize("kind", [RewardType.MATH_VERIFY, RewardType.MATH_RULE])
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("2k+2", "2k + 2", "2"),
        ("3R^2", "3R^2", "3"),
        ("y = 2x + 3", "y=2x+3", "3"),
        ("6 - 5i", "6-5i", "5"),
        ("1,-2", "-2, 1", "1"),
        ("3,5,7", "3,5,7", "3.5"),
        ("(6,31,-1)", "(6, 31, -1)", "31"),
        ("[-2,7]", "[-2,7]", "(-2,7)"),
        ("(0, 1)", "(0,1)", "1"),
        ("2^{10}", "1024", "2"),
        ("x^2+1", "1+x^2", "1"),
        ("A", "A", "B"),
        ("1.5e3", "1500", "1.5"),
        ("1,234", "1234", "1"),
        ("5 hours", "5", "6"),
        ("50%", "0.5", "5"),
        ("$12.50", "12.5", "12"),
        (r"12\pi", r"12\pi", "12"),
        ("$x^2+1$", "x^2+1", "1"),
    ],
)
def test_references_are_read_as_a_whole_and_not_as_one_of_their_numbers(kind, answer, right, wrong):
    score = load(config(kind), None)
    assert (score("", rf"\boxed{{{right}}}", answer, {}), score("", rf"\boxed{{{wrong}}}", answer, {})) == (1.0, 0.0)
    if kind is RewardType.MATH_VERIFY:
        extracted = load(config(kind, extraction=Extraction.BOXED), None)
        assert (extracted("", right, answer, {}), extracted("", wrong, answer, {})) == (1.0, 0.0)


@pytest.mark.parametrize("response", [r"Hence \[ x = \frac{3}{4} \]", r"The area is \( \frac{3}{4} \) square units.", "$x = 3/4$"])
def test_math_of_a_response_stays_in_its_own_environment(response):
    assert load(config(RewardType.MATH_VERIFY), None)("", response, r"\frac{3}{4}", {}) == 1.0


def test_the_last_number_is_compared_without_commas():
    score = load(config(extraction=Extraction.LAST_NUMBER), None)
    assert score("", extract("Total: 1,234", config(extraction=Extraction.LAST_NUMBER)) or "", "1,234", {}) == 1.0


def test_math_verify_tells_an_unreadable_reference_answer():
    with pytest.raises(RuntimeError, match="finds no value in the reference answer 'see above'"):
        load(config(RewardType.MATH_VERIFY), None)("", "1", "see above", {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1.0, {})),
        (True, (1.0, {})),
        (np.float32(0.5), (0.5, {})),
        ({"score": 0.25, "length": 3}, (0.25, {"length": 3.0})),
    ],
)
def test_usable_results(value, expected):
    assert to_scores(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "the result is nan, not a finite number"),
        (-math.inf, "the result is -inf, not a finite number"),
        (None, "the result is null, not a number"),
        ("1.0", 'the result is "1.0", not a number'),
        ([1.0], "the result is list, not a number"),
        ({"reward": 1}, r"without 'score' \(keys: reward\)"),
        ({"score": 1, "extra": math.nan}, "extra is nan"),
        (np.array(math.nan), "the result is nan"),
    ],
)
def test_unusable_results(value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        to_scores(value)


@pytest.mark.parametrize(
    ("type_", "options", "message"),
    [
        (RewardType.TASK, {"timeout_s": 0.0}, "timeout_s is 0.0"),
        (RewardType.TASK, {"weight": math.inf}, "weight is inf"),
        (RewardType.TASK, {"tag": "x"}, "tag 'x' is set but extraction is Whole"),
        (RewardType.TASK, {"function": "a:b"}, "function 'a:b' is set but type is Task"),
        (RewardType.TASK, {"params": {"a": 1}}, "has no parameter 'a'; it takes: none"),
        (RewardType.EXACT_MATCH, {"params": {"ignorecase": True}}, "did you mean 'ignore_case'"),
        (RewardType.EXACT_MATCH, {"params": {"ignore_case": "yes"}}, "'ignore_case' is 'yes'; it must be a bool"),
        (RewardType.FUNCTION, {}, "function is None; write it as module:function"),
        (RewardType.FUNCTION, {"function": "score"}, "function is 'score'"),
        (RewardType.FUNCTION, {"function": "a/b.py:score"}, "function is 'a/b.py:score'"),
    ],
)
def test_unusable_configurations_are_refused(type_, options, message):
    with pytest.raises(RewardSetupError, match=message):
        config(type_, **options)


MODULE = """
import math
LIMIT = 3
def score(prompt, response, answer, metadata, scale=1.0):
    return scale * len(response)
def needs_more(prompt, response):
    return 0.0
async def later(prompt, response, answer, metadata):
    return 0.0
"""


@pytest.fixture
def job_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "house_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import math\nraise KeyError('no such key')\n")
    (tmp_path / "hungry_rewards.py").write_text("import a_module_nobody_has\n")
    return tmp_path


def test_a_function_gets_its_parameters(job_folder):
    score = load(config(RewardType.FUNCTION, function="house_rewards:score", params={"scale": 2.0}), str(job_folder))
    assert score("p", "abc", "a", {}) == 6.0


@pytest.mark.parametrize(
    ("function", "params", "message"),
    [
        ("house_reward:score", {}, "no module 'house_reward' in .* and on the Python path; nearest there: house_rewards.py"),
        ("zzz:score", {}, "Python files there: broken_rewards.py, house_rewards.py, hungry_rewards.py"),
        ("house_rewards:scores", {}, r"no function 'scores'; did you mean 'score'\? it defines: later, needs_more, score"),
        ("house_rewards:LIMIT", {}, "no function 'LIMIT'"),
        ("house_rewards:needs_more", {}, r"needs_more\(prompt, response\) cannot be called: got an unexpected keyword argument 'answer'"),
        ("house_rewards:score", {"scal": 1}, "unexpected keyword argument 'scal'"),
        ("house_rewards:later", {}, "is an async function"),
        ("broken_rewards:score", {}, "importing module 'broken_rewards' failed: KeyError: 'no such key'"),
        (
            "hungry_rewards:score",
            {},
            "importing module 'hungry_rewards' failed: ModuleNotFoundError: No module named 'a_module_nobody_has'",
        ),
    ],
)
def test_functions_that_cannot_work_are_refused_when_loaded(job_folder, function, params, message):
    with pytest.raises(RewardSetupError, match=message):
        load(config(RewardType.FUNCTION, function=function, params=params), str(job_folder))


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"<think>\boxed{8}</think>So \boxed{\frac{14}{2}}.", "7", 1.0),
        (r"<think>\boxed{7}</think>So \boxed{8}.", "7", 0.0),
        ("<think>8</think>The answer is $7$.", "7", 1.0),
        ("<think>7</think>no idea", "7", 0.0),
        (r"\boxed{words}", "7", 0.0),
        ("7", r"\frac{14}{2}", 1.0),
    ],
)
def test_math_rule_reads_the_answer_after_the_thinking(response, answer, score):
    assert load(config(RewardType.MATH_RULE), None)("", response, answer, {}) == score


@pytest.mark.parametrize(
    ("response", "answer", "boxed", "free"),
    [
        (r"<think>\boxed{A}</think>It is \boxed{\text{B}}.", "B", 1.0, 1.0),
        (r"\boxed{(C) all of it}", "C. all of it", 1.0, 1.0),
        (r"\boxed{A} no, \boxed{B}", "A", 0.0, 0.0),
        ("I think The Answer is B", "B", 0.0, 1.0),
        ("a or b", "A", 0.0, 0.0),
    ],
)
def test_multiple_choice_reads_the_first_capital_letter(response, answer, boxed, free):
    assert load(config(RewardType.MULTIPLE_CHOICE), None)("", response, answer, {}) == boxed
    assert load(config(RewardType.MULTIPLE_CHOICE, params={"require_boxed": False}), None)("", response, answer, {}) == free


def test_an_answer_that_names_no_choice_is_an_error_of_the_data():
    with pytest.raises(DataError, match="the reference answer 'b' names no choice"):
        load(config(RewardType.MULTIPLE_CHOICE), None)("", "B", "b", {})


def test_if_eval_scores_all_or_a_share():
    entry = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"], "kwargs": [{}, {}]}
    assert load(config(RewardType.IF_EVAL), None)("", "<think>a, b</think>One two", "", entry) == 0.0
    assert load(config(RewardType.IF_EVAL, params={"partial": True}), None)("", "One two", "", entry) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_timeout": math.inf}, "on_timeout is inf; it must be a finite number"),
        ({"network": True}, "network, processes and read_paths are for type Function, the type is ExactMatch"),
        ({"params": {"ignore_cases": True}}, "did you mean 'ignore_case'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(RewardSetupError, match=message):
        config(**options)


def test_a_tag_of_the_data_without_a_reward_is_named():
    rewards = [config(sources=("math", "code"))]
    check_tags(rewards, {"math": "data source 'a'"})
    check_tags([*rewards, config()], {"poetry": "data source 'a'"})
    with pytest.raises(RewardSetupError, match=r"the tag 'poetry' of data source 'a' has no reward \(sources of the rewards: math, code\)"):
        check_tags(rewards, {"math": "data source 'a'", "poetry": "data source 'a'"})
