"""The Code reward: tests of the entry on the code in the response. Here everything is ours; the code runs in ``code_runner``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rljob_runtime.errors import DataError
from rljob_runtime.rewards.code_runner import CodeRunner, Outcome, Run

_FENCE = re.compile(r"```[ \t]*+(\w++)?[^\n]*+\n(.*?)```", re.DOTALL)
"""Possessive: a long line without an end would take quadratic time otherwise."""
_PYTHON = {"python", "python3", "py"}
_BUDGET = 0.9
"""Share of the reward's own limit after which the remaining tests fail, so that slow code is a wrong answer and no time-out."""

KINDS = ("input", "assert", "pytest", "check_based")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """Parameters of a Code reward, under the names of ``rewards[].parameters``."""

    timeout_s: float
    """The reward's own limit."""
    case_timeout_s: float = 4.0
    memory_bytes: int = 1 << 30
    partial: bool = False
    tests_field: str = "test_cases"
    kind_field: str = "case_type"
    function_field: str = "test_case_function"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    run: Run
    passes: Callable[[Outcome], bool]


def load_code(settings: CodeSettings, runner: CodeRunner) -> Callable[[str, str, str, Mapping[str, object]], float]:
    """The reward: 1 when every test passes, else 0; with ``partial`` the share of tests that pass."""

    def score(_prompt: str, response: str, _answer: str, metadata: Mapping[str, object]) -> float:
        started = time.monotonic()
        cases = list(_cases(settings, extract_code(response), metadata))
        passed = 0
        for case in cases:
            left_s = settings.timeout_s * _BUDGET - (time.monotonic() - started)
            if left_s <= 0:
                break
            outcome = runner.run(_with_timeout(case.run, min(settings.case_timeout_s, left_s)))
            if outcome.ok and case.passes(outcome):
                passed += 1
            elif not settings.partial:
                return 0.0
        return passed / len(cases) if settings.partial else float(passed == len(cases))

    return score


def extract_code(response: str) -> str:
    """The last fenced block of Python after the thinking, else the last one without a language, else the whole rest."""
    text = response.rpartition("</think>")[2].rpartition("<|begin_of_solution|>")[2]
    found = [(language.lower(), body) for language, body in _FENCE.findall(text)]
    # What a program prints is often shown in a block without a language.
    blocks = [body for language, body in found if language in _PYTHON] or [body for language, body in found if not language]
    return (blocks[-1] if blocks else text).strip()


def _cases(settings: CodeSettings, code: str, metadata: Mapping[str, object]) -> Iterator[_Case]:
    tests = metadata.get(settings.tests_field)
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError as error:
        raise DataError(f"field {settings.tests_field!r} is no JSON: {error}; write a list of tests") from error
    if not isinstance(tests, list) or not tests:
        shown = "is missing" if settings.tests_field not in metadata else f"is {json.dumps(tests)[:40]}"
        raise DataError(f"field {settings.tests_field!r} of the entry {shown}; write a list of tests, or name the field in tests_field")
    function = metadata.get(settings.function_field)
    kind = metadata.get(settings.kind_field) or ("assert" if _has(tests[0], "assert_code") else "input")
    if kind not in KINDS:
        raise DataError(f"field {settings.kind_field!r} is {kind!r}; it must be one of {', '.join(KINDS)}")
    for number, test in enumerate(tests):
        try:
            yield from _case(settings, code, str(kind), test, None if function in (None, "", "None") else str(function))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise DataError(
                f"field {settings.tests_field!r}: test {number} is no {kind} test ({detail}): {json.dumps(test)[:80]}"
            ) from error


def _case(settings: CodeSettings, code: str, kind: str, test: Any, function: str | None) -> Iterator[_Case]:
    def run(source: str = code, **what: Any) -> Run:
        return Run(code=source, timeout_s=settings.case_timeout_s, memory_bytes=settings.memory_bytes, **what)

    if kind == "input" and function is None:
        expected = str(test["expected_stdout"])
        yield _Case(run=run(stdin=str(test["stdin"])), passes=lambda outcome: same_output(outcome.output, expected))
    elif kind == "input":
        arguments = tuple(json.loads(line) for line in str(test["stdin"]).splitlines() if line.strip())
        value = json.loads(test["expected_stdout"])
        yield _Case(run=run(function=function, arguments=arguments), passes=lambda outcome: same_value(outcome.value, value))
    elif kind == "check_based":
        source = f"{test.get('import_prefix', '')}\n{code}"
        asserts = f"{test['assert_code']}\ncheck({test.get('entry_point', 'candidate')})"
        yield _Case(run=run(source, asserts=asserts), passes=lambda outcome: outcome.ok)
    else:
        asserts = test if isinstance(test, str) else str(test["assert_code"])
        named = re.findall(r"^def (test_\w*)\(", asserts, re.MULTILINE)
        yield _Case(run=run(asserts="\n".join([asserts, *(f"{name}()" for name in named)])), passes=lambda outcome: outcome.ok)


def _has(test: object, field: str) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and field in test)


def _with_timeout(run: Run, timeout_s: float) -> Run:
    return Run(
        code=run.code,
        timeout_s=timeout_s,
        memory_bytes=run.memory_bytes,
        stdin=run.stdin,
        function=run.function,
        arguments=run.arguments,
        asserts=run.asserts,
    )


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line without white space at the ends, or number by number (LiveCodeBench, testing_util.py)."""
    ours, theirs = _lines(printed), _lines(expected)
    if ours == theirs:
        return True
    return len(ours) == len(theirs) and all(_same_numbers(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_numbers(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    try:
        return len(ours) == len(theirs) and all(Decimal(a) == Decimal(b) for a, b in zip(ours, theirs, strict=True))
    except InvalidOperation:
        return list(ours) == list(theirs)


def same_value(ours: object, theirs: object) -> bool:
    """Equal as JSON; a number and a truth value are not."""
    if isinstance(ours, bool) != isinstance(theirs, bool):
        return False
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same_value(a, b) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_value(value, theirs[key]) for key, value in ours.items())
    return ours == theirs
