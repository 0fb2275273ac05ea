"""Questions to a judge over the published protocol: many in flight, retries, limits, budget, keys, answers that are remembered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rljob_api.vocabulary import BudgetEnd, RewardType
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import Judgement, RewardRequest
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.judging.config import Budget, JudgeConfig, Limits, ReaderConfig, Retries, Served
from rljob_runtime.rewards.judging.desk import JudgeDesk, question_of
from rljob_runtime.rewards.judging.limits import Pace
from tests.support.judge_endpoint import JudgeEndpoint, Reply
from tests.support.ports import free_port
from tests.support.records import make_prompt

NEVER_S = 3600.0
"""A turn that no test waits for."""
QUICK = Retries(attempts=3, min_backoff_s=0.001, max_backoff_s=0.01)


def always(*replies: Reply) -> Callable[[object], Reply]:
    """These replies, the last one for ever."""
    left = itertools.chain(replies[:-1], itertools.repeat(replies[-1]))
    return lambda messages: next(left)


def judge(url: str, **options: Any) -> JudgeConfig:
    fixed: dict[str, Any] = {"model": "judge", "template": "Is {response} right?", "reader": ReaderConfig(pattern=r"\d+"), "retries": QUICK}
    return JudgeConfig(url=url, **(fixed | options))


@contextmanager
def desk(config: JudgeConfig, **environment: str) -> Iterator[Callable[..., list[Judgement]]]:
    """A desk with one judge; asks about responses."""
    reward = RewardConfig(name="grader", type=RewardType.LLM_JUDGE, judge=config)
    opened = JudgeDesk([reward], environment=environment)

    def ask(*responses: str) -> list[Judgement]:
        requests = [RewardRequest(sample_id=r, prompt=make_prompt(0), response_text=r, finish_reason="stop") for r in responses]
        questions = [question_of(reward, request) for request in requests]
        return opened.ask([question for question in questions if question is not None])

    try:
        yield ask
    finally:
        opened.close()
        opened.close()


def test_all_questions_of_a_call_are_in_flight_together_up_to_the_limit() -> None:
    with (
        JudgeEndpoint(lambda messages: Reply(text=f"re: {messages[-1]['content']}"), waits_for=8) as endpoint,
        desk(judge(endpoint.url, limits=Limits(in_flight=8), system="Be strict.", sampling={"temperature": 0.0, "max_tokens": 9})) as ask,
    ):
        judgements = ask(*(str(n) for n in range(20)))
        assert [judgement.text for judgement in judgements] == [f"re: Is {n} right?" for n in range(20)]
        assert endpoint.most_in_flight == 8
        body = next(b for b in endpoint.requests if "Is 0 right?" in str(b))
        assert body == {
            "model": "judge",
            "temperature": 0.0,
            "max_tokens": 9,
            "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Is 0 right?"}],
        }
        assert {(j.calls, j.prompt_tokens, j.completion_tokens, j.error) for j in judgements} == {(1, 5, 4, None)}


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_a_busy_endpoint_is_asked_again(status: int) -> None:
    busy = Reply(status=status, headers={"Retry-After": "0"})
    with JudgeEndpoint(always(busy, busy, Reply(text="1"))) as endpoint, desk(judge(endpoint.url)) as ask:
        assert [(j.text, j.calls, j.error) for j in ask("a")] == [("1", 3, None)]


def test_a_question_fails_alone_after_all_retries() -> None:
    def say(messages: list[dict[str, str]]) -> Reply:
        return Reply(status=503) if "bad" in messages[-1]["content"] else Reply(text="1")

    with JudgeEndpoint(say) as endpoint, desk(judge(endpoint.url)) as ask:
        good, bad = ask("good", "bad")
        assert (good.text, good.error) == ("1", None)
        assert bad.calls == 3
        assert bad.error is not None
        assert bad.error.endswith("(request 3 of 3, the last one)")
        assert "answered 503" in bad.error


def test_an_endpoint_that_hangs_or_is_not_there_is_late() -> None:
    retries = Retries(attempts=2, min_backoff_s=0.001, max_backoff_s=0.001)
    with (
        JudgeEndpoint(always(Reply(hangs=True), Reply(text="2"))) as endpoint,
        desk(judge(endpoint.url, request_timeout_s=0.3)) as ask,
    ):
        assert [(j.text, j.calls) for j in ask("a")] == [("2", 2)]
    with desk(judge(f"http://127.0.0.1:{free_port()}/v1", retries=retries)) as ask:
        (judgement,) = ask("a")
        assert judgement.error is not None
        assert "cannot be reached: ClientConnectorError" in judgement.error


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(status=400), "answered 400"),
        (Reply(body="<html>"), "answered what is no chat completion: <html>"),
        (Reply(body='{"choices": []}'), "answered what is no chat completion"),
        (Reply(text=None), "the judge said nothing (finish_reason length); raise max_tokens"),
    ],
)
def test_an_answer_without_words_fails_its_question_at_once(reply: Reply, said: str) -> None:
    with JudgeEndpoint(always(reply)) as endpoint, desk(judge(endpoint.url)) as ask:
        (judgement,) = ask("a")
        assert said in str(judgement.error)
        assert judgement.calls == 1


def test_a_key_comes_from_the_environment_and_a_refused_one_ends_the_job() -> None:
    with JudgeEndpoint(always(Reply(text="1")), api_key="sk-right") as endpoint:
        config = judge(endpoint.url, api_key_env="JUDGE_API_KEY")
        with desk(config, JUDGE_API_KEY="sk-right") as ask:
            assert ask("a")[0].text == "1"
        with (
            desk(config, JUDGE_API_KEY="sk-wrong") as ask,
            pytest.raises(RewardSetupError, match=r"answered 401.*check the environment variable JUDGE_API_KEY") as refused,
        ):
            ask("a", "b")
        assert "sk-wrong" not in str(refused.value)
        with pytest.raises(RewardSetupError, match="JUDGE_API_KEY is not set"), desk(config):
            pass


def test_a_wrong_model_or_address_ends_the_job() -> None:
    with JudgeEndpoint(always(Reply(status=307, headers={"Location": "http://elsewhere/"}))) as endpoint:
        with desk(judge(endpoint.url, model="other")) as ask, pytest.raises(RewardSetupError, match=r"answered 404.*and model other"):
            ask("a")
        with desk(judge(endpoint.url)) as ask, pytest.raises(RewardSetupError, match=r"answered 307.*leads elsewhere"):
            ask("a")


def test_a_budget_ends_the_job_or_the_samples() -> None:
    one_by_one = Limits(in_flight=1)
    with JudgeEndpoint(always(Reply(text="1"))) as endpoint:
        with (
            desk(judge(endpoint.url, budget=Budget(calls=2), limits=one_by_one)) as ask,
            pytest.raises(RewardSetupError, match=r"budget of 2 calls .* is spent; .*onExhausted: OnError"),
        ):
            ask("a", "b", "c")
        assert len(endpoint.requests) == 2
        with desk(judge(endpoint.url, budget=Budget(calls=2, on_exhausted=BudgetEnd.ON_ERROR), limits=one_by_one)) as ask:
            assert [j.error is None for j in ask("a", "b", "c")] == [True, True, False]
        assert len(endpoint.requests) == 4


@pytest.mark.parametrize("budget", [Budget(calls=2), Budget(tokens=8)], ids=["calls", "tokens"])  # an answer takes 4
@pytest.mark.parametrize("limits", [Limits(requests_per_minute=1), Limits(tokens_per_minute=1)], ids=["requests", "tokens"])
def test_nobody_waits_for_the_pace_of_a_judge_whose_budget_is_spent(
    budget: Budget, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this pace the second request's turn would be in a minute, and that of the last one in an hour."""
    monkeypatch.setattr(Pace, "reserve", lambda self, units, now_s: NEVER_S if endpoint.requests[1:] else 0.0)
    with (
        JudgeEndpoint(always(Reply(text="1"))) as endpoint,
        desk(judge(endpoint.url, budget=replace(budget, on_exhausted=BudgetEnd.ON_ERROR), limits=limits)) as ask,
    ):
        assert [judgement.error for response in "ab" for judgement in ask(response)] == [None, None]
        late = ask(*(str(n) for n in range(100)))
        assert all(j.calls == 0 and j.error is not None and "is spent" in j.error for j in late)
        assert len(endpoint.requests) == 2


def test_requests_that_wait_for_their_pace_end_with_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    order = itertools.count()
    monkeypatch.setattr(Pace, "reserve", lambda self, units, now_s: NEVER_S if next(order) else 0.0)
    with (
        JudgeEndpoint(always(Reply(text="1"))) as endpoint,
        desk(
            judge(endpoint.url, budget=Budget(tokens=4, on_exhausted=BudgetEnd.ON_ERROR), limits=Limits(in_flight=2, requests_per_minute=1))
        ) as ask,
    ):
        first, *others = ask(*"abcde")
        assert (first.text, first.error) == ("1", None)
        assert [(j.calls, "is spent" in (j.error or "")) for j in others] == [(0, True)] * 4


def test_equal_questions_are_asked_once_where_answers_are_remembered() -> None:
    with JudgeEndpoint(always(Reply(text="1"), Reply(text="2"), Reply(text="3"))) as endpoint:
        with desk(judge(endpoint.url, cache_entries=1)) as ask:
            assert [ask(r)[0].text for r in "aabba"] == ["1", "1", "2", "2", "3"]
            assert ask("a")[0].calls == 0
    with JudgeEndpoint(always(*[Reply(text=str(number)) for number in range(9)])) as endpoint:
        with desk(judge(endpoint.url, cache_entries=1)) as ask:
            together = ask(*"aaaa")
            assert ([j.text for j in together], sum(j.calls for j in together)) == (["0"] * 4, 1)
        with desk(judge(endpoint.url)) as ask:
            assert len({j.text for j in ask(*"aaaa")}) == 4, "each, where none is remembered"


def test_a_judge_that_never_answers_ends_the_job() -> None:
    with JudgeEndpoint(always(Reply(text="1"), Reply(status=400))) as endpoint:
        config = judge(endpoint.url, retries=replace(QUICK, failures_in_row=3), limits=Limits(in_flight=1))
        with desk(config) as ask:
            assert [j.error is None for j in ask("a", "b", "c")] == [True, False, False]
            with pytest.raises(RewardSetupError, match=r"3 questions in a row got no answer, the last one because .*answered 400"):
                ask("d")


def test_engines_of_a_component_share_the_questions() -> None:
    replies = always(Reply(text="1"))
    with JudgeEndpoint(replies, api_key="k", waits_for=2) as first, JudgeEndpoint(replies, api_key="k", waits_for=2) as second:
        reward = RewardConfig(name="grader", type=RewardType.LLM_JUDGE, judge=judge("", component="graders", limits=Limits(in_flight=4)))
        served = {"graders": Served(urls=(first.url, second.url), api_key="k")}
        opened = JudgeDesk([reward], served=served, environment={})
        try:
            request = RewardRequest(sample_id="a", prompt=make_prompt(0), response_text="a", finish_reason="stop")
            question = question_of(reward, request)
            assert question is not None
            assert [j.text for j in opened.ask([question] * 4)] == ["1"] * 4
        finally:
            opened.close()
        assert (len(first.requests), len(second.requests)) == (2, 2)
        with pytest.raises(RewardSetupError, match="component graders serves no model"):
            JudgeDesk([reward], environment={})


def test_requests_keep_their_pace() -> None:
    """1200 requests a minute are 50 ms apart: ten of them take at least 450 ms, whatever else happens."""
    with (
        JudgeEndpoint(always(Reply(text="1"))) as endpoint,
        desk(judge(endpoint.url, limits=Limits(requests_per_minute=1200.0))) as ask,
    ):
        assert max(judgement.elapsed_s for judgement in ask(*"abcdefghij")) >= 0.44
