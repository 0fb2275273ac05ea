"""HTTP to SGLang's server: what it answers, and its refusals as errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from rljob_runtime.errors import RuntimeFault

_LINE_BYTES = 64 << 20
"""Longest piece of a streamed answer: sampling masks make them long."""


class RefusedError(RuntimeFault):
    """Raised when the server answers that it does not do what it was asked."""


class SglangClient:
    """Calls of one server; belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """Nothing is sent before the first call."""
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """One call; its answer, None where that is no JSON.

        Raises:
            RefusedError: with what the server says.
            TimeoutError: no answer within ``timeout_s``.
            aiohttp.ClientError: the server is not there.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._open().post(self.url + path, json=body, timeout=timeout) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RefusedError(f"SGLang answered {path} with {answer.status}: {text[:500]}")
        return json.loads(text) if text.startswith(("{", "[")) else None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Pieces of a streamed answer; errors as of :meth:`post`."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._open().post(self.url + path, json={**body, "stream": True}, timeout=timeout) as answer:
            if answer.status != 200:
                raise RefusedError(f"SGLang answered {path} with {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                text = line.strip().removeprefix(b"data: ")
                if not text or text == b"[DONE]":
                    continue
                piece = json.loads(text)
                if "error" in piece:
                    raise RefusedError(f"SGLang answered {path} with: {piece['error']}")
                yield piece

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=_LINE_BYTES, trust_env=False)
        return self._session
