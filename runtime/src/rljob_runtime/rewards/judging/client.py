"""Asks one judge over OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat/create), or a reward model.

A question becomes at most ``retries.attempts`` requests. 408, 409, 429, 5xx, broken connections and late answers are tried again, as in
OpenAI's own client; 401, 403, 404 and redirects are mistakes of the job; any other answer fails its question alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import Judgement
from rljob_runtime.rewards.judging.config import Answer, JudgeConfig
from rljob_runtime.rewards.judging.limits import BudgetSpentError, Pace, Spending

BYTES_PER_TOKEN = 4
"""For the reservation of a prompt's tokens; what the endpoint counted corrects it."""
_TRY_AGAIN = frozenset({408, 409, 429})
_MISTAKES = {
    401: "does not accept the API key",
    403: "does not accept the API key",
    404: "does not know this URL or model",
}
_SHOWN_CHARACTERS = 200


class _AgainError(Exception):
    """Raised where another request may do better."""

    def __init__(self, problem: str, after_s: float | None = None) -> None:
        super().__init__(problem)
        self.after_s = after_s
        """What the endpoint asks to wait."""


class _QuestionError(Exception):
    """Raised where this question gets no answer."""


@dataclass(slots=True, kw_only=True)
class _Count:
    """Requests sent for one question."""

    calls: int = 0


class JudgeClient:
    """One judge; lives in one event loop."""

    def __init__(self, name: str, config: JudgeConfig, *, urls: Sequence[str], api_key: str | None, session: aiohttp.ClientSession) -> None:
        """``name`` is the reward's; each request goes to the least loaded of ``urls``; ``session`` is the caller's to close."""
        self._name = name
        self._config = config
        self._session = session
        self._in_flight = dict.fromkeys((config.request_url(url) for url in urls), 0)
        self._headers = {"Content-Type": "application/json"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        self._timeout = aiohttp.ClientTimeout(total=config.request_timeout_s)
        self._slots = asyncio.Semaphore(config.limits.in_flight)
        self._requests = None if config.limits.requests_per_minute is None else Pace(config.limits.requests_per_minute)
        self._tokens = None if config.limits.tokens_per_minute is None else Pace(config.limits.tokens_per_minute)
        self._spending = Spending(budget=config.budget)
        self._tokens_spent = asyncio.Event()
        """Ends the waits of requests that will not be sent."""
        self._failures_in_row = 0
        self._jitter = random.Random(name)
        self._remembered: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Event] = {}
        """By question, set when it was answered or failed."""

    async def ask(self, body: bytes) -> Judgement:
        """What the judge says to a request's body; a question that gets no answer has an ``error``.

        Raises:
            RewardSetupError: no question will be answered: the endpoint refuses the job, or the budget is spent and the job has to fail.
        """
        if not self._config.cache_entries:
            return await self._ask(body)
        while (answered := self._under_way.get(body)) is not None:  # equal responses of a group ask together
            await answered.wait()
        if (known := self._remembered.get(body)) is not None:
            self._remembered.move_to_end(body)
            return Judgement(reward=self._name, text=known)
        self._under_way[body] = answered = asyncio.Event()
        try:
            return await self._ask(body)
        finally:
            del self._under_way[body]
            answered.set()

    async def _ask(self, body: bytes) -> Judgement:
        """As :meth:`ask`, whatever was asked before."""
        began_s = asyncio.get_running_loop().time()
        judgement, count = Judgement(reward=self._name), _Count()
        try:
            self._spending.check()
            async with self._slots:
                answer = await self._answer(body, count)
        except BudgetSpentError as error:
            if self._spending.fails_job:
                raise RewardSetupError(
                    f"judge of reward {self._name!r}: {error}; raise budget, or write onExhausted: OnError to go on without the judge"
                ) from error
            judgement = replace(judgement, error=str(error))
        except _QuestionError as error:
            self._count_failure(error)
            judgement = replace(judgement, error=str(error))
        else:
            self._failures_in_row = 0
            self._remember(body, answer.text)
            judgement = replace(judgement, text=answer.text, prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
        return replace(judgement, calls=count.calls, elapsed_s=asyncio.get_running_loop().time() - began_s)

    def _count_failure(self, error: _QuestionError) -> None:
        self._failures_in_row += 1
        if self._failures_in_row >= self._config.retries.failures_in_row:
            raise RewardSetupError(
                f"judge of reward {self._name!r}: {self._failures_in_row} questions in a row got no answer, the last one because {error}; "
                "see that the judge is up, or raise judge.retries.failuresInRow"
            ) from error

    async def _answer(self, body: bytes, count: _Count) -> Answer:
        attempts, pause_s = self._config.retries.attempts, 0.0
        while True:
            await self._take_turn(body, pause_s)
            count.calls += 1
            try:
                return await self._request(body)
            except _AgainError as error:
                if count.calls >= attempts:
                    raise _QuestionError(f"{error} (request {count.calls} of {attempts}, the last one)") from error
                pause_s = self._pause_s(count.calls, error.after_s)

    async def _take_turn(self, body: bytes, pause_s: float) -> None:
        """Wait until a request may be sent, after ``pause_s`` at the earliest.

        Raises:
            BudgetSpentError: it may not, which is known before the wait, or when others have used the last tokens.
        """
        self._spending.take_call()
        try:
            await self._wait(pause_s)
            await self._wait(self._reserved_s(body))
        except BaseException:
            self._spending.give_call_back()
            raise

    async def _wait(self, seconds: float) -> None:
        """Raises BudgetSpentError at the moment when the last tokens are used."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._tokens_spent.wait()
        self._spending.check_tokens()

    def _reserved_s(self, body: bytes) -> float:
        """Take a place behind all others that keep the pace; seconds until it is reached."""
        now_s = asyncio.get_running_loop().time()
        waits_s = [
            pace.reserve(units, now_s)
            for pace, units in ((self._requests, 1.0), (self._tokens, float(self._reserved_tokens(body))))
            if pace is not None
        ]
        return max(waits_s, default=0.0)

    def _reserved_tokens(self, body: bytes) -> int:
        return len(body) // BYTES_PER_TOKEN + self._config.max_answer_tokens

    def _pause_s(self, calls: int, after_s: float | None) -> float:
        retries = self._config.retries
        if after_s is not None:
            return min(after_s, retries.max_backoff_s)
        doubled_s = min(retries.min_backoff_s * 2.0 ** min(calls - 1, 60), retries.max_backoff_s)
        return doubled_s * self._jitter.uniform(0.5, 1.0)

    async def _request(self, body: bytes) -> Answer:
        url = min(self._in_flight, key=lambda each: self._in_flight[each])
        self._in_flight[url] += 1
        try:
            return await self._post(url, body)
        finally:
            self._in_flight[url] -= 1

    async def _post(self, url: str, body: bytes) -> Answer:
        request = self._session.post(url, data=body, headers=self._headers, timeout=self._timeout, allow_redirects=False)
        try:
            async with request as response:
                status, received = response.status, await response.read()
                after = response.headers.get("Retry-After")
        except TimeoutError as error:
            raise _AgainError(f"{url} gave no answer within {self._config.request_timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _AgainError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        if status == 200:
            return self._read(url, body, received)
        said = " ".join(received.decode(errors="replace").split())[:_SHOWN_CHARACTERS]
        problem = f"{url} answered {status}: {said or 'nothing'}"
        if status in _TRY_AGAIN or status >= 500:
            raise _AgainError(problem, _seconds(after))
        if status in _MISTAKES or 300 <= status < 400:
            raise RewardSetupError(f"judge of reward {self._name!r}: {self._mistake(problem, status)}")
        raise _QuestionError(problem)

    def _mistake(self, problem: str, status: int) -> str:
        if status not in _MISTAKES:
            return f"{problem}; it leads elsewhere: write the final address as judge.endpoint.url"
        source = f"the environment variable {self._config.api_key_env}" if self._config.api_key_env else "judge.endpoint.apiKeyEnv, not set"
        remedy = f"check {source}" if status != 404 else f"check endpoint.url and model {self._config.model}"
        return f"{problem}: it {_MISTAKES[status]}; {remedy}"

    def _read(self, url: str, body: bytes, received: bytes) -> Answer:
        try:
            found = self._config.read(json.loads(received))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            said = " ".join(received.decode(errors="replace").split())[:_SHOWN_CHARACTERS]
            raise _QuestionError(f"{url} answered what is no {self._config.answers_with}: {said}") from error
        used = found.prompt_tokens + found.completion_tokens
        if self._spending.used(used):
            self._tokens_spent.set()
        if self._tokens is not None and used:
            self._tokens.correct(used - self._reserved_tokens(body))
        if not found.text:
            raise _QuestionError(found.silence)
        return found

    def _remember(self, body: bytes, text: str) -> None:
        if self._config.cache_entries:
            self._remembered[body] = text
            if len(self._remembered) > self._config.cache_entries:
                self._remembered.popitem(last=False)


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header; None where it is absent or a date (RFC 9110 allows both)."""
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return None
