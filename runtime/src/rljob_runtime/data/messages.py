"""Prompts that are conversations: lists of messages, as datasets for chat models have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Message = Mapping[str, str]
"""``role`` and ``content``."""
KEYS = frozenset({"role", "content"})


def looks_like_messages(value: object) -> bool:
    """Whether a value is meant as a conversation: a list of objects with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def read_messages(value: Sequence[object]) -> tuple[Message, ...] | str:
    """The messages of a conversation that ends where the response begins, or what is wrong with it.

    Content is text, or a list of parts of which all are text, which are joined. Further keys that are null, as Parquet files have them for
    keys of other rows, are left out.
    """
    read: list[Message] = []
    for index, one in enumerate(value):
        assert isinstance(one, dict)
        role, content = one["role"], _text(one.get("content"))
        if not isinstance(role, str) or not role:
            return f"message {index} has role {role!r}; it must be non-empty text"
        if content is None:
            return f"message {index} ({role}) {_no_text(one.get('content'))}"
        if further := sorted(key for key, inside in one.items() if key not in KEYS and inside is not None):
            return f"message {index} ({role}) has {', '.join(map(repr, further))}; only role and content reach the prompt, remove the rest"
        read.append({"role": role, "content": content})
    if read[-1]["role"] == "assistant":
        return f"message {len(read) - 1}, the last, is the assistant's; a prompt ends where the response begins: remove it"
    if not question_of(read).strip():
        return "no message of the user has text"
    return tuple(read)


def question_of(messages: Sequence[Message]) -> str:
    """What the user said last."""
    return next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")


def _text(content: object) -> str | None:
    """The text of a message; None if it is not, or not only, text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None for part in content]
    return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def _no_text(content: object) -> str:
    """Why a message's content is not text."""
    if isinstance(content, list):
        kinds = sorted({str(part.get("type", "text")) for part in content if isinstance(part, dict)} - {"text"})
        if kinds:
            return f"has parts of type {', '.join(kinds)}; models are trained on text alone"
    return "has content that is not text"
