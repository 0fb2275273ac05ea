"""All judges of a reward worker: a thread with an event loop, in which the requests of all its calls are in flight together."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import Judgement, RewardRequest
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.functions import extract
from rljob_runtime.rewards.judging.client import JudgeClient
from rljob_runtime.rewards.judging.config import Served

NONE_SERVED: Mapping[str, Served] = MappingProxyType({})
_Place = tuple[tuple[str, ...], str | None]
"""Base URLs and API key of a judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A response that one reward has a judge for."""

    reward: str
    request: RewardRequest
    part: str
    """What the judge is shown of the response."""


def question_of(config: RewardConfig, request: RewardRequest) -> Question | None:
    """What a reward asks about a response; None where it lacks the part that ``extraction`` names, which scores 0 unasked."""
    part = extract(request.response_text, config)
    return None if part is None else Question(reward=config.name, request=request, part=part)


class JudgeDesk:
    """Asks; any thread may call."""

    def __init__(
        self, configs: Sequence[RewardConfig], *, served: Mapping[str, Served] = NONE_SERVED, environment: Mapping[str, str] = os.environ
    ) -> None:
        """``configs`` are the rewards with a judge; keys of endpoints are read from ``environment``.

        ``served`` are the components of the job that serve one, by name. Raises RewardSetupError when a variable is not there.
        """
        self._configs = {config.name: config for config in configs}
        places = {config.name: _place(config, served, environment) for config in configs}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()
        self._session, self._clients = asyncio.run_coroutine_threadsafe(self._open(places), self._loop).result()

    def ask(self, questions: Sequence[Question]) -> list[Judgement]:
        """One judgement for each question, in order.

        Raises:
            RewardSetupError: an endpoint refuses the job, or a budget is spent and the job has to fail; or the desk was closed meanwhile.
        """
        if not questions:
            return []
        try:
            return asyncio.run_coroutine_threadsafe(self._ask(questions), self._loop).result()
        except CancelledError as error:
            raise RewardSetupError("the reward worker was closed while its judges were asked") from error

    def close(self) -> None:
        """Cancel what is asked, close connections and end the thread; may be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, places: Mapping[str, _Place]) -> tuple[aiohttp.ClientSession, dict[str, JudgeClient]]:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))  # clients have limits of their own
        clients = {}
        for name, config in self._configs.items():
            assert config.judge is not None
            urls, api_key = places[name]
            clients[name] = JudgeClient(name, config.judge, urls=urls, api_key=api_key, session=session)
        return session, clients

    async def _ask(self, questions: Sequence[Question]) -> list[Judgement]:
        tasks = [asyncio.ensure_future(self._clients[question.reward].ask(self._body(question))) for question in questions]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the first failure ends the others
                task.cancel()

    def _body(self, question: Question) -> bytes:
        judge, prompt = self._configs[question.reward].judge, question.request.prompt
        assert judge is not None
        return judge.body(question=prompt.question or prompt.text, prompt=prompt.text, response=question.part, answer=prompt.answer)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()


def _place(config: RewardConfig, served: Mapping[str, Served], environment: Mapping[str, str]) -> _Place:
    judge = config.judge
    assert judge is not None
    if judge.component is None:
        return (judge.url,), api_key(config, environment)
    if judge.component not in served:
        raise RewardSetupError(f"judge of reward {config.name!r}: component {judge.component} serves no model; it gave no address")
    return served[judge.component].urls, served[judge.component].api_key


def api_key(config: RewardConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key of a judge's endpoint; None where it needs none.

    Raises:
        RewardSetupError: its variable is not set.
    """
    name = None if config.judge is None else config.judge.api_key_env
    if name is None:
        return None
    if not environment.get(name):
        raise RewardSetupError(
            f"judge of reward {config.name!r}: the environment variable {name} is not set on the reward worker's node; "
            f"add {{name: {name}, valueFrom: ...}} to nodeGroups[].env, and set {name} before a local run"
        )
    return environment[name]
