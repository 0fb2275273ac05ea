"""Responses in OpenAI's form, whole or as server-sent events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_runtime.environments.endpoint.chat import Said

PIECE_CHARACTERS = 256
"""Of a streamed chunk; the response is complete when the first one leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A response that is complete."""

    call_id: str
    created_s: int
    """Unix time."""
    model: str
    said: Said
    finish_reason: str
    """``stop`` or ``length``."""
    num_prompt: int
    token_ids: Sequence[int]
    prompt_token_ids: Sequence[int] | None = None
    """Where the call asked for token ids."""
    logprobs: Sequence[float] | None = None
    token_texts: Sequence[str] = ()
    """Of each token, with log-probs."""

    @property
    def chat_reason(self) -> str:
        """OpenAI's word for why a chat response ended."""
        return "tool_calls" if self.said.tool_calls else self.finish_reason

    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        sampled = len(self.token_ids)
        return {"prompt_tokens": self.num_prompt, "completion_tokens": sampled, "total_tokens": self.num_prompt + sampled}


def chat(done: Finished) -> dict[str, Any]:
    """A chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": done.said.content, "refusal": None}
    if done.said.tool_calls:
        message["tool_calls"] = _tool_calls(done.said)
    choice = {"index": 0, "message": message, "logprobs": _chat_logprobs(done), "finish_reason": done.chat_reason} | _ids(done)
    return _head(done, "chat.completion") | {"choices": [choice], "usage": done.usage()} | _prompt_ids(done)


def completion(done: Finished) -> dict[str, Any]:
    """A completion."""
    choice = {"index": 0, "text": done.said.content or "", "logprobs": _text_logprobs(done), "finish_reason": done.finish_reason}
    return _head(done, "text_completion") | {"choices": [choice | _ids(done)], "usage": done.usage()} | _prompt_ids(done)


def chat_events(done: Finished, *, usage: bool) -> Iterator[bytes]:
    """A chat completion, chunk by chunk."""
    head = _head(done, "chat.completion.chunk")

    def event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        return _event(head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | more]})

    yield event({"role": "assistant", "content": ""})
    for piece in _pieces(done.said.content or ""):
        yield event({"content": piece})
    for number, call in enumerate(_tool_calls(done.said)):
        yield event({"tool_calls": [{"index": number, **call}]})
    yield event({}, done.chat_reason, logprobs=_chat_logprobs(done), **_ids(done))
    if usage:
        yield _event(head | {"choices": [], "usage": done.usage()})
    yield b"data: [DONE]\n\n"


def completion_events(done: Finished, *, usage: bool) -> Iterator[bytes]:
    """A completion, chunk by chunk."""
    head = _head(done, "text_completion")

    def event(text: str, reason: str | None = None, **more: Any) -> bytes:
        return _event(head | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason} | more]})

    for piece in _pieces(done.said.content or ""):
        yield event(piece)
    yield event("", done.finish_reason, logprobs=_text_logprobs(done), **_ids(done))
    if usage:
        yield _event(head | {"choices": [], "usage": done.usage()})
    yield b"data: [DONE]\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """An error where the stream has begun already."""
    return _event(body)


def _head(done: Finished, kind: str) -> dict[str, Any]:
    return {"id": done.call_id, "object": kind, "created": done.created_s, "model": done.model}


def _tool_calls(said: Said) -> list[dict[str, Any]]:
    return [{"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in said.tool_calls]


def _ids(done: Finished) -> dict[str, Any]:
    return {} if done.prompt_token_ids is None else {"token_ids": list(done.token_ids)}


def _prompt_ids(done: Finished) -> dict[str, Any]:
    return {} if done.prompt_token_ids is None else {"prompt_token_ids": list(done.prompt_token_ids)}


def _chat_logprobs(done: Finished) -> dict[str, Any] | None:
    if done.logprobs is None:
        return None
    pairs = zip(done.token_texts, done.logprobs, strict=True)
    return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs], "refusal": None}


def _text_logprobs(done: Finished) -> dict[str, Any] | None:
    if done.logprobs is None:
        return None
    offsets, place = [], 0
    for text in done.token_texts:
        offsets.append(place)
        place += len(text)
    return {"tokens": list(done.token_texts), "token_logprobs": list(done.logprobs), "top_logprobs": None, "text_offset": offsets}


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
