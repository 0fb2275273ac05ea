"""A judge's endpoint on the loopback interface, as strict as the published protocol: chat completions of OpenAI's API.

https://platform.openai.com/docs/api-reference/chat/create and /errors. What a request must not be is answered as OpenAI does, with 400.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

_KNOWN = {"model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "response_format"}
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the endpoint answers: a text, or another status."""

    text: str | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    """Instead of a chat completion or an error of the protocol."""
    hangs: bool = False
    """Nothing until the client goes."""


Say = Callable[[list[dict[str, str]]], Reply]
"""From a request's messages to its reply."""


class JudgeEndpoint:
    """Serves in a thread of its own; use as a context manager."""

    def __init__(self, say: Say, *, api_key: str | None = None, model: str = "judge", waits_for: int = 1) -> None:
        """``waits_for``: a request is answered when so many were in flight at the same time, which shows that they are."""
        self.requests: list[dict[str, Any]] = []
        self.most_in_flight = 0
        self._say, self._api_key, self._model, self._waits_for = say, api_key, model, waits_for
        self._in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_post("/classify", self._classify)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._many = asyncio.Event()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if self._api_key is not None and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return _error(401, "Incorrect API key provided")
        if request.content_type != "application/json":
            return _error(400, f"content type {request.content_type}")
        body = await request.json()
        if problem := self._problem(body):
            return _error(404 if problem.startswith("The model") else 400, problem)
        self.requests.append(body)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        if self._in_flight >= self._waits_for:
            self._many.set()
        try:
            await asyncio.wait_for(self._many.wait(), 30)
            reply = self._say(body["messages"])
            if reply.hangs:
                await asyncio.Event().wait()
        finally:
            self._in_flight -= 1
        return self._response(reply, body)

    async def _classify(self, request: web.Request) -> web.StreamResponse:
        """As vLLM's server: the reply's text holds the outputs of the model, between spaces."""
        body = await request.json()
        if set(body) - {"model", "input", "messages", "use_activation", "truncate_prompt_tokens"} or ("input" in body) == (
            "messages" in body
        ):
            return _error(400, f"request has {', '.join(sorted(body))}")
        self.requests.append(body)
        reply = self._say(body["messages"] if "messages" in body else [{"role": "user", "content": body["input"]}])
        if reply.text is None:
            return _error(reply.status, f"status {reply.status}", reply.headers)
        outputs = [float(word) for word in reply.text.split()]
        data = [{"index": 0, "label": "LABEL_0", "probs": outputs, "num_classes": len(outputs)}]
        usage = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
        return web.json_response({"id": "classify-1", "object": "list", "created": 0, "model": self._model, "data": data, "usage": usage})

    def _response(self, reply: Reply, body: dict[str, Any]) -> web.Response:
        if reply.body is not None:
            return web.Response(status=reply.status, text=reply.body, headers=reply.headers)
        if reply.status != 200:
            return _error(reply.status, f"status {reply.status}", reply.headers)
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        said = len((reply.text or "").split())
        choice = {"index": 0, "message": {"role": "assistant", "content": reply.text}, "finish_reason": "stop" if reply.text else "length"}
        usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": self._model}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    def _problem(self, body: dict[str, Any]) -> str | None:
        if unknown := set(body) - _KNOWN:
            return f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}"
        if body.get("model") != self._model:
            return f"The model `{body.get('model')}` does not exist"
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return "messages is not a list with something in it"
        if any(set(m) != {"role", "content"} or m["role"] not in _ROLES or not isinstance(m["content"], str) for m in messages):
            return "messages have a role and a content"
        return None


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=headers)
