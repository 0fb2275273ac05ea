"""Reward models: what is sent to a classification endpoint, and the number that is read of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_api.vocabulary import RewardType
from rljob_runtime.records import Judgement, RewardRequest
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.judging.config import Retries, RewardModelConfig, Served
from rljob_runtime.rewards.judging.desk import JudgeDesk, Question
from rljob_runtime.rewards.judging.words import load_reader
from tests.support.judge_endpoint import JudgeEndpoint, Reply
from tests.support.records import make_prompt

QUICK = Retries(attempts=3, min_backoff_s=0.001, max_backoff_s=0.01)


def asked(say: Callable[[Any], Reply], **options: Any) -> tuple[list[Judgement], list[dict[str, Any]]]:
    """What becomes of the responses "one" and "two", and the requests."""
    with JudgeEndpoint(say) as endpoint:
        model = RewardModelConfig(url=endpoint.url, model="judge", retries=QUICK, **options)
        desk = JudgeDesk([RewardConfig(name="scorer", type=RewardType.REWARD_MODEL, judge=model)], environment={})
        try:
            requests = [RewardRequest(sample_id=r, prompt=make_prompt(0), response_text=r, finish_reason="stop") for r in ("one", "two")]
            return desk.ask([Question(reward="scorer", request=r, part=r.response_text) for r in requests]), endpoint.requests
        finally:
            desk.close()


def score(text: str) -> object:
    config = RewardConfig(name="scorer", type=RewardType.REWARD_MODEL, judge=RewardModelConfig(url="http://x", model="m"))
    return load_reader(config, None)(text, "", "", "", {})


def test_a_conversation_is_scored_by_the_models_own_template_unless_there_is_a_text() -> None:
    answers, requests = asked(lambda messages: Reply(text="-1.5"))
    assert [answer.text for answer in answers] == ["-1.5", "-1.5"]
    assert [answer.prompt_tokens for answer in answers] == [7, 7]
    assert sorted(r["messages"][1]["content"] for r in requests) == ["one", "two"]
    assert [m["role"] for m in requests[0]["messages"]] == ["user", "assistant"]
    assert all(r["use_activation"] is False for r in requests)
    _, requests = asked(lambda m: Reply(text="1"), template="{prompt}|{response}", activation=True, sampling={"truncate_prompt_tokens": 8})
    assert sorted(r["input"] for r in requests) == [f"{make_prompt(0).text}|one", f"{make_prompt(0).text}|two"]
    assert all(r["use_activation"] and r["truncate_prompt_tokens"] == 8 for r in requests)


@pytest.mark.parametrize(("said", "number"), [("-1.5", -1.5), ("1e-07", 1e-07), ("3.0", 3.0)])
def test_the_score_is_the_models_number(said: str, number: float) -> None:
    assert score(said) == number


def test_one_of_several_outputs_is_the_score_and_a_missing_one_is_an_error() -> None:
    answers, _ = asked(lambda messages: Reply(text="0.25 4.5"), label=1)
    assert {answer.text for answer in answers} == {"4.5"}
    answers, _ = asked(lambda messages: Reply(text="0.25"), label=1)
    assert all("1 outputs and none with number 1" in str(answer.error) for answer in answers)


def test_a_busy_server_is_asked_again() -> None:
    replies = iter([Reply(status=503), Reply(text="1.0"), Reply(text="1.0")])
    answers, requests = asked(lambda messages: next(replies))
    assert [answer.error for answer in answers] == [None, None]
    assert len(requests) == 3
    assert sum(answer.calls for answer in answers) == 3


def test_servers_of_the_job_are_asked_beside_their_base_url() -> None:
    model = RewardModelConfig(component="scorer_model", model="scorer_model")
    assert model.request_url("http://node:8000/v1") == "http://node:8000/classify"
    served = {"scorer_model": Served(urls=("http://node:8000/v1",), api_key="k")}
    JudgeDesk([RewardConfig(name="scorer", type=RewardType.REWARD_MODEL, judge=model)], served=served, environment={}).close()
