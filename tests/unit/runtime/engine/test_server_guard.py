"""Who may ask vLLM's server what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rljob_runtime.engine.vllm.server_guard import Guard


def asked(monkeypatch: pytest.MonkeyPatch, path: str, header: str | None, kind: str = "http") -> list[Any]:
    """What the guard sends, or that it passes the question on."""
    monkeypatch.setenv("VLLM_API_KEY", "key-1")
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("passed")

    async def send(message: Any) -> None:
        sent.append(message.get("status") or message.get("code"))

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    headers = [] if header is None else [(b"Authorization", header.encode())]
    asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/collective_rpc", "/sleep", "/classify", "/v1/chat/completions", "/health/../sleep"])
def test_without_the_key_nothing_but_health_is_answered(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert asked(monkeypatch, path, None)[0] == 401
    assert asked(monkeypatch, path, "Bearer key-2")[0] == 401
    assert asked(monkeypatch, path, "Bearer key-1") == ["passed"]
    assert asked(monkeypatch, path, "Bearer key-2", "websocket") == [1008]


def test_health_and_the_servers_own_start_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "/health", None) == ["passed"]
    assert asked(monkeypatch, "", None, "lifespan") == ["passed"]
