"""The Code reward: every kind of test, what counts as equal, and what is wrong with an entry."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.records import Prompt, RewardRequest
from rljob_runtime.rewards import RewardConfig, RewardType
from rljob_runtime.rewards.code import extract_code, same_output, same_value
from rljob_runtime.rewards.pool import RewardPool

SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
STDIN = {"test_cases": [{"stdin": "1 2\n", "expected_stdout": "3"}, {"stdin": "5 6", "expected_stdout": "11 \n"}]}
CALLS = {
    "case_type": "input",
    "test_case_function": "add",
    "test_cases": json.dumps([{"stdin": "[1]\n[2, 3]", "expected_stdout": "[1, 2, 3]"}]),
}
ASSERTS = {"test_cases": [{"assert_code": "assert add(1, 2) == 3"}, {"assert_code": "assert add(0, 0) == 0"}]}
PYTEST = {"case_type": "pytest", "test_cases": [{"assert_code": "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 3"}]}
CHECKS = {
    "case_type": "check_based",
    "test_cases": [
        {"import_prefix": "import math\n", "assert_code": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}
    ],
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("code"), {}

    def get(**params):
        key = json.dumps(params)
        if key not in made:
            config = RewardConfig(name="code", type=RewardType.CODE, timeout_s=4.0, params=params)
            made[key] = RewardPool([config], log_file=folder / "rewards.log")
        return made[key]

    yield get
    for pool in made.values():
        pool.close()


def score(pool, code, metadata):
    prompt = Prompt(index=0, text="", token_ids=(1,), answer="", source="s", metadata=metadata)
    (result,) = pool.score([RewardRequest(sample_id="s", prompt=prompt, response_text=code, finish_reason="stop")])
    return result


@pytest.mark.parametrize(
    ("code", "tests", "wanted"),
    [
        (SUM, STDIN, 1.0),
        (SUM + "\nimport sys; sys.exit(0)", STDIN, 1.0),
        ("print(3)", STDIN, 0.0),
        ("raise ValueError", STDIN, 0.0),
        ("not python (", STDIN, 0.0),
        ("print(sum(map(int, open(0).read().split())))", STDIN, 1.0),
        (ADD, CALLS, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS, 1.0),
        ("def add(a, b):\n    return 'no'", CALLS, 0.0),
        ("def sub(a, b):\n    return 0", CALLS, 0.0),
        ("class Yes:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Yes()", CALLS, 0.0),
        (ADD, ASSERTS, 1.0),
        ("def add(a, b):\n    return 3", ASSERTS, 0.0),
        ("import sys; sys.exit(0)", ASSERTS, 0.0),
        (ADD, PYTEST, 1.0),
        ("def add(a, b):\n    return 4", PYTEST, 0.0),
        (ADD, CHECKS, 1.0),
        ("def add(a, b):\n    return 4", CHECKS, 0.0),
        ("def add(a, b):\n    return sum(accumulate([a, b])) - a if gcd(a, 1) else Counter()", CHECKS, 1.0),
    ],
)
def test_code_is_scored_by_the_tests_of_its_entry(pools, code, tests, wanted):
    result = score(pools(), f"<think>a guess: ```python\nprint(0)\n```</think>It is\n```python\n{code}\n```\n", tests)
    assert (result.score, result.error) == (wanted, None)


def test_partial_scores_are_the_share_of_tests(pools):
    assert score(pools(partial=True), "def add(a, b):\n    return 3", ASSERTS).score == 0.5


def test_slow_code_is_a_wrong_answer_and_no_time_out(pools):
    pool = pools(case_timeout_s=1.5, partial=True)
    slow_once = "if input() == '1 2':\n    while True: pass\nprint(11)"
    result = score(pool, slow_once, STDIN)
    assert (result.score, result.timeouts, result.error) == (0.5, (), None)
    many = {"test_cases": [{"stdin": "", "expected_stdout": "x"}] * 50}
    result = score(pools(case_timeout_s=2.0, partial=True), "while True: pass", many)
    assert (result.score, result.timeouts) == (0.0, ())


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "field 'test_cases' of the entry is missing; write a list of tests, or name the field in tests_field"),
        ({"test_cases": []}, "field 'test_cases' of the entry is []"),
        ({"test_cases": "[1"}, "field 'test_cases' is no JSON"),
        ({"test_cases": [{"stdin": "1"}]}, "is no input test (KeyError: 'expected_stdout')"),
    ],
)
def test_an_entry_without_usable_tests_says_what_is_wrong(pools, metadata, message):
    result = score(pools(), SUM, metadata)
    assert result.score is None
    assert message in str(result.error)


def test_other_field_names(pools):
    pool = pools(tests_field="tests", kind_field="kind")
    assert score(pool, ADD, {"tests": ["assert add(1, 1) == 2"], "kind": "assert"}).score == 1.0


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("```python\na\n```\ntext\n```py\nb\n```", "b"),
        ("```python\na\n```\n```cpp\nb\n```", "a"),
        ("```python\na\n```\nIt prints:\n```\n3\n```", "a"),
        ("```\na\n```\nor\n```\nb\n```", "b"),
        ("<think>```python\na\n```</think>b", "b"),
    ],
)
def test_code_is_the_last_block_of_python(response, code):
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("printed", "expected", "wanted"),
    [
        ("1 2\n", "1 2", True),
        (" 1\n2 \n\n", "1\n2", True),
        ("1.0", "1", True),
        ("9007199254740993", "9007199254740992.0", False),
        ("1\n2", "1 2", False),
        ("a  b", "a b", True),
        ("a", "b", False),
        ("", "", True),
    ],
)
def test_outputs_are_equal_but_for_white_space_and_the_spelling_of_numbers(printed, expected, wanted):
    assert same_output(printed, expected) is wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON, JSON)
def test_values_are_equal_as_json_is(a, b):
    assert same_value(a, json.loads(json.dumps(a)))
    assert same_value(a, b) == (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))
