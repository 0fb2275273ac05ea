"""Every reward process has its share of a judge's limits; together they are the job's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.judges import Judge
from rljob_api.validation import CheckedJob, check
from rljob_runtime.job.judge_settings import Share, asked_config, longest_question_s, share_of
from tests.unit.api.manifests import manifest

JUDGE: dict[str, Any] = {
    "endpoint": {"url": "http://judge/v1/", "model": "m", "apiKeyEnv": "KEY"},
    "template": "{response}",
    "parser": {"field": "score", "minimum": 0.0, "maximum": 2.0},
    "limits": {"inFlight": 10, "requestsPerMinute": 30, "tokensPerMinute": 600},
    "budget": {"calls": 100, "tokens": 1001, "onExhausted": "OnError"},
    "sampling": {"max_tokens": 7},
    "requestTimeoutSeconds": 9,
    "cacheEntries": 3,
}


def checked(*components: dict[str, Any]) -> CheckedJob:
    """A job whose only reward is the judge's."""
    document = manifest()
    document["spec"]["components"] += components
    document["spec"]["rewards"] = [{"name": "grader", "type": "LLMJudge", "judge": JUDGE}]
    return check(document)


def judge() -> Judge:
    found = checked().job.spec.rewards[0].judge
    assert found is not None
    return found


@given(total=st.integers(1, 10_000), count=st.integers(1, 64))
def test_shares_sum_to_the_whole_and_differ_by_one_at_most(total: int, count: int) -> None:
    shares = [Share(index=index, count=count).of(total) for index in range(count)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_a_process_asks_with_its_share() -> None:
    shares = [asked_config(judge(), Share(index=index, count=4)) for index in range(4)]
    assert [share.limits.in_flight for share in shares] == [3, 3, 2, 2]
    assert [share.budget.tokens for share in shares] == [251, 250, 250, 250]
    assert {(share.limits.requests_per_minute, share.limits.tokens_per_minute) for share in shares} == {(7.5, 150.0)}
    assert (shares[0].url, shares[0].reader.json_field, shares[0].max_answer_tokens) == ("http://judge/v1", "score", 7)
    assert (shares[0].reader.minimum, shares[0].reader.maximum) == (0.0, 2.0)


def test_processes_of_all_reward_components_are_counted() -> None:
    plan = checked({"name": "more", "role": "Reward", "placement": {"workers": 2}}).plan
    assert [share_of(plan, *process) for process in (("reward", 0), ("more", 0), ("more", 1))] == [
        Share(index=index, count=3) for index in range(3)
    ]
    with pytest.raises(ValueError, match="actor_train is no Reward component"):
        share_of(plan, "actor_train", 0)


def test_a_question_has_its_answer_within_retries_and_pace() -> None:
    reward = checked().job.spec.rewards[0]
    tokens = 100 + 7 + len("{response}")
    expected = 5 * (9 + 60 + 60 * 2 / 30 + 60 * 2 * tokens / 600)
    assert longest_question_s(reward, processes=2, shown_tokens=100) == pytest.approx(expected)
    assert longest_question_s(reward.model_copy(update={"judge": None}), processes=2, shown_tokens=100) == 0.0
