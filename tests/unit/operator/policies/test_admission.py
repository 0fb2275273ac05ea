"""The message of Accepted: all problems that fit, and the number of those that do not."""

from __future__ import annotations

from rljob_operator.policies.admission import problems_text


def test_problems_that_fit_are_listed() -> None:
    assert problems_text(["a", "b"], limit=3) == "a\nb"


def test_what_does_not_fit_is_counted() -> None:
    assert problems_text(["a" * 30, "b" * 30, "c" * 30], limit=60) == "a" * 30 + "\n... and 2 more problems"
    assert problems_text(["a" * 30, "b" * 30, "c" * 30], limit=85) == "\n".join(["a" * 30, "b" * 30, "... and 1 more problem"])


def test_a_single_long_problem_uses_all_of_the_limit() -> None:
    text = problems_text(["x" * 9000] * 5, limit=200)
    assert len(text) == 200
    assert text.endswith("x...\n... and 4 more problems")


def test_what_was_not_checked_is_reported_last_within_the_limit() -> None:
    assert problems_text(["a"], "9 more checks wait") == "a\n9 more checks wait"
    text = problems_text(["a" * 30, "b" * 30], "9 more checks wait", limit=79)
    assert text == "a" * 30 + "\n... and 1 more problem\n9 more checks wait"
    assert len(text) <= 79
