"""A reward worker asks judges and has their words read in the sandbox, beside rewards of other types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rljob_api.vocabulary import Extraction, RewardType
from rljob_runtime.data.tokenizer import load_tokenizer, tokenizer_files
from rljob_runtime.packed import RewardBatch, reward_batch
from rljob_runtime.records import RewardResult
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.judging.config import JudgeConfig, ReaderConfig, Retries
from rljob_runtime.rewards.worker import RewardWorker
from rljob_runtime.tiny.tokenizer import build_tokenizer
from tests.support.judge_endpoint import JudgeEndpoint, Reply
from tests.support.records import ids, make_prompt

SPY = """
import os, socket
def read(judgement, prompt, response, answer, metadata):
    found = float("JUDGE_API_KEY" in os.environ)
    try:
        socket.socket()
        found += 2
    except PermissionError:
        pass
    return {"score": float(judgement), "saw": found}
"""
Score = Callable[..., list[RewardResult]]


def grader(url: str, *, name: str = "grader", reader: ReaderConfig | None = None, **options: Any) -> RewardConfig:
    judge = JudgeConfig(
        url=url,
        model="judge",
        api_key_env="JUDGE_API_KEY",
        template="{question}|{response}|{answer}",
        reader=reader or ReaderConfig(pattern=r"\d+"),
        retries=Retries(attempts=1),
    )
    return RewardConfig(name=name, type=RewardType.LLM_JUDGE, judge=judge, **options)


@pytest.fixture
def batch_of(tmp_path: Path) -> Callable[..., RewardBatch]:
    folder = tmp_path / "model"
    build_tokenizer(["12 apples and 7 pears, x"]).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)

    def make(*texts: str) -> RewardBatch:
        tokens = [ids(*tokenizer(text)["input_ids"]) for text in texts]
        return reward_batch(list(texts), [make_prompt(0)] * len(texts), ["stop"] * len(texts), tokens)

    return make


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_of: Callable[..., RewardBatch]) -> Callable[..., Any]:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-1")

    @contextmanager
    def started(*configs: RewardConfig) -> Iterator[Score]:
        running = RewardWorker(configs, log_file=tmp_path / "log", folder=tmp_path)
        try:
            running.prepare(tokenizer_files(tmp_path / "model", code=False), trust_remote_code=False)
            yield lambda *texts: running.score(batch_of(*texts))
        finally:
            running.close()

    return started


def test_scores_are_the_weighted_sum_with_what_judges_said(worker: Callable[..., Any]) -> None:
    def say(messages: list[dict[str, str]]) -> Reply:
        question, response, answer = messages[-1]["content"].split("|")
        assert (question, answer) == (make_prompt(0).text, make_prompt(0).answer)
        return Reply(text=f"{len(response)} points")

    with JudgeEndpoint(say, api_key="sk-1") as endpoint:
        exact = RewardConfig(name="exact", type=RewardType.EXACT_MATCH)
        with worker(grader(endpoint.url, weight=0.5, pass_threshold=3.0), exact) as score:
            first, second = score("12", "7 pears")
    assert (first.score, first.parts, first.passed) == (1.0, {"grader": 2.0, "exact": 0.0}, False)
    assert (second.score, second.passed) == (3.5, True)
    (said,) = second.judgements
    assert (said.reward, said.text, said.calls, said.error) == ("grader", "7 points", 1, None)


def test_what_fails_of_a_judge_fails_its_sample_as_on_error_says(worker: Callable[..., Any]) -> None:
    def say(messages: list[dict[str, str]]) -> Reply:
        response = messages[-1]["content"].split("|")[1]
        return {"12": Reply(status=500), "7": Reply(text="hm")}.get(response, Reply(text="1"))

    with JudgeEndpoint(say) as endpoint, worker(grader(endpoint.url), grader(endpoint.url, name="kind", on_error=-1.0)) as score:
        lost, unreadable, good = score("12", "7", "apples")
    assert (good.score, good.error) == (2.0, None)
    assert (lost.score, lost.errors, lost.parts) == (None, ("grader", "kind"), {"kind": -1.0})
    assert "answered 500" in str(lost.error)
    assert unreadable.score is None
    assert "reward 'grader': UnreadableError: the judge said \"hm\"" in str(unreadable.error)


def test_a_response_without_the_part_that_is_scored_is_not_asked_about(worker: Callable[..., Any]) -> None:
    with (
        JudgeEndpoint(lambda messages: Reply(text=messages[-1]["content"].split("|")[1])) as endpoint,
        worker(grader(endpoint.url, extraction=Extraction.LAST_NUMBER, pass_threshold=0.0)) as score,
    ):
        results = score("x", "12 apples and 7 pears")
        assert [(r.score, len(r.judgements)) for r in results] == [(0.0, 0), (7.0, 1)]
        assert len(endpoint.requests) == 1


def test_a_function_that_reads_words_has_neither_key_nor_network(worker: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "judge_spy.py").write_text(SPY)
    with (
        JudgeEndpoint(lambda messages: Reply(text="4"), api_key="sk-1") as endpoint,
        worker(grader(endpoint.url, reader=ReaderConfig(function="judge_spy:read"), timeout_s=20.0)) as score,
    ):
        (result,) = score("12")
    assert (result.score, result.parts) == (4.0, {"grader": 4.0, "grader/saw": 0.0})


def test_calls_overlap_while_judges_are_slow(worker: Callable[..., Any]) -> None:
    """The endpoint answers nobody before three calls of the worker wait for it."""
    with (
        JudgeEndpoint(lambda messages: Reply(text="1"), waits_for=3) as endpoint,
        worker(grader(endpoint.url)) as score,
        ThreadPoolExecutor(3) as threads,
    ):
        results = list(threads.map(score, ["12", "7", "x"], timeout=60))
    assert [[r.sample_id for r in found] for found in results] == [["12"], ["7"], ["x"]]
