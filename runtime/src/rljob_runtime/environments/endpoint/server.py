"""The HTTP server of an environment worker: one thread with an event loop, bound to this machine's loopback.

| wait                | bounded by                                   | then                                              |
|---------------------|----------------------------------------------|---------------------------------------------------|
| start               | START_TIMEOUT_S                              | EnvironmentSetupError                             |
| a call's body       | BODY_TIMEOUT_S                               | 408                                               |
| a call's response   | the episode's deadline (``Session``)         | 410                                               |
| the end             | CLOSE_TIMEOUT_S                              | the thread, a daemon, is left                     |
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from aiohttp import web

from rljob_runtime.environments.endpoint import answers
from rljob_runtime.environments.endpoint.answers import Finished
from rljob_runtime.environments.endpoint.requests import ApiError, ChatRequest, CompletionRequest, JobSampling, parse
from rljob_runtime.environments.endpoint.session import Model, Session
from rljob_runtime.environments.messages import EpisodeAction
from rljob_runtime.environments.outcome import Call, Read
from rljob_runtime.errors import EnvironmentSetupError

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
START_TIMEOUT_S, BODY_TIMEOUT_S, CLOSE_TIMEOUT_S = 30.0, 60.0, 10.0
MAX_BODY_BYTES = 64 << 20
HEARTBEAT_S = 3.0
"""Between comments on a stream whose response is not complete: proxies and clients see that it lives."""
_REMEMBERED = 1000
"""Tokens of episodes that are over: their calls are answered accordingly."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Whole = Callable[[Finished], dict[str, Any]]
Events = Callable[[Finished], Iterator[bytes]]


class Streamed(Protocol):
    """A response as server-sent events."""

    def __call__(self, done: Finished, *, usage: bool) -> Iterator[bytes]:
        """Its events, at the end the numbers of tokens where they are asked for."""


class Endpoint:
    """Serves the episodes of one environment. ``open``, ``answer`` and ``end`` are called by the worker's thread."""

    def __init__(self, model: Model, sampling: JobSampling, post: Callable[[Call | Read], None]) -> None:
        """Start the server.

        Args:
            model: of the policy.
            sampling: of the job.
            post: takes calls, and what programs were given; called by the endpoint's thread.

        Raises:
            EnvironmentSetupError: no port could be had.
        """
        self._model, self._sampling, self._post = model, sampling, post
        self._sessions: dict[str, Session] = {}
        """By key."""
        self._by_token: dict[str, Session] = {}
        self._ended: deque[str] = deque()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        port: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(port,), name="endpoint", daemon=True)
        self._thread.start()
        try:
            self.port = port.result(START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise EnvironmentSetupError(f"the endpoint for agent programs cannot be served on {HOST}: {error!r}") from error

    @property
    def url(self) -> str:
        """What clients take for OpenAI's."""
        return f"http://{HOST}:{self.port}/v1"

    def open(self, key: str, deadline: float) -> Session:
        """Serve an episode."""
        session = Session(key, self._model, deadline, self._post)
        self._sessions[key] = self._by_token[session.token] = session
        return session

    def answer(self, key: str, action: EpisodeAction) -> None:
        """Bring what was sampled for an episode's call; of one that is over it is passed by."""
        session = self._sessions.get(key)
        if session is not None:
            self._loop.call_soon_threadsafe(session.answer, action)

    def end(self, key: str) -> None:
        """An episode is over; unknown ones are passed by."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._loop.call_soon_threadsafe(session.end)
        self._ended.append(session.token)
        while len(self._ended) > _REMEMBERED:
            del self._by_token[self._ended.popleft()]

    def close(self) -> None:
        """Stop serving; may be called twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, port: Future[int]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve(port))
            except BaseException as error:
                if not port.done():
                    port.set_exception(error)
                raise

    async def _serve(self, port: Future[int]) -> None:
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/healthz", _healthy),
            ]
        )
        # No access log: a request's head has its token.
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            port.set_result(runner.addresses[0][1])
            await self._stop.wait()
        finally:
            for session in self._sessions.values():
                session.end()
            await runner.cleanup()

    def _session(self, request: web.Request) -> Session:
        """Whose call it is; raises ApiError."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        session = self._by_token.get(token.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise ApiError(401, "no episode has this API key; use OPENAI_API_KEY of the program's environment", code="invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": self._model.name, "object": "model", "created": int(time.time()), "owned_by": "rljob"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ChatRequest, answers.chat, answers.chat_events)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, CompletionRequest, answers.completion, answers.completion_events)

    async def _respond(
        self, request: web.Request, kind: type[ChatRequest] | type[CompletionRequest], whole: Whole, events: Streamed
    ) -> web.StreamResponse:
        session = self._session(request)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
            asked = parse(kind, json.loads(body), self._sampling)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}") from error
        digest = hashlib.blake2b(request.path.encode() + b"\0" + body, digest_size=16).digest()
        task = session.begin(asked, digest, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
        if not asked.stream:
            return web.json_response(whole(await asyncio.shield(task)))
        return await _stream(request, task, lambda done: events(done, usage=asked.includes_usage))


async def _stream(request: web.Request, task: asyncio.Task[Finished], events: Events) -> web.StreamResponse:
    """Server-sent events; an error that comes at once is an HTTP error."""
    await asyncio.wait({task}, timeout=HEARTBEAT_S)
    if task.done() and (error := task.exception()) is not None:
        raise error
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        while not task.done():
            await response.write(b": the policy is at it\n\n")
            await asyncio.wait({task}, timeout=HEARTBEAT_S)
        if (error := task.exception()) is None:
            await response.write(b"".join(events(task.result())))
        else:
            body = error.body() if isinstance(error, ApiError) else ApiError(500, repr(error)).body()
            await response.write(answers.error_event(body))
        await response.write_eof()
    except ConnectionResetError:
        _log.info("a program closed a stream before its end")
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI's object."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        return web.json_response(ApiError(error.status, message).body(), status=error.status)
    except Exception as error:  # noqa: BLE001 - thread border: the program is answered, the log has the traceback
        _log.exception("a call could not be answered")
        return web.json_response(ApiError(500, f"{type(error).__name__}: {error}").body(), status=500)


async def _healthy(request: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})
