"""Asks for the server's key on every path of vLLM's server but its health; vLLM itself does so for ``/v1`` alone. Imports no vLLM.

Without it whoever reaches the port could have a reward model score, or the server's workers give their memory back.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rljob_runtime.engine.vllm.server import KEY_VARIABLE

_OPEN_PATHS = ("/health",)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """Pure ASGI middleware."""

    def __init__(self, app: App) -> None:
        """In front of ``app``; the key is in the server's environment."""
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on what has the key, and what is not HTTP."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in _OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"the job's key is needed"})

    def _has_key(self, scope: Message) -> bool:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
