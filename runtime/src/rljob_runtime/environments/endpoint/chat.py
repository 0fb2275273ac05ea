"""Between a conversation in OpenAI's form and the text of a prompt, and between a response's text and the tool calls in it.

Tool calls are read in the format of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.
A response in which one cannot be read is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rljob_runtime.environments.endpoint.conversation import Close
from rljob_runtime.environments.endpoint.requests import ApiError, ChatRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = {"developer": "system"}
"""Templates know the older name."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote."""

    call_id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A response as a program reads it."""

    content: str | None
    """Text before the first tool call; None where there is nothing but calls."""
    tool_calls: tuple[ToolCall, ...] = ()


class Chat:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out what closes a response; a tokenizer without a chat template has none."""
        self._tokenizer = tokenizer
        self.close = self._find_close() if tokenizer.chat_template else None

    def prompt(self, request: ChatRequest) -> str:
        """The text of a call's prompt, generation prompt included.

        Raises:
            ApiError: the model has no chat template, or it does not take these messages.
        """
        if not self._tokenizer.chat_template:
            raise ApiError(400, "the model's tokenizer has no chat template; use /v1/completions, or an instruction-tuned model")
        messages = [_plain(message, index) for index, message in enumerate(request.messages)]
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None
        try:
            return self._render(messages, tools=tools, **(request.chat_template_kwargs or {}))
        except Exception as error:  # whatever a template raises
            raise ApiError(400, f"the chat template does not take these messages: {error}", param="messages") from error

    def _render(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **keywords))

    def _find_close(self) -> Close | None:
        """The first special token between a response and the next message."""
        mark = "ASSISTANTSAID"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}, {"role": "user", "content": "QUESTION"}]
        try:
            between = self._render(messages).partition(mark)[2].partition("QUESTION")[0]
        except Exception:  # noqa: BLE001 - such a template may still take what programs send; a call that it does not take says so
            return None
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        found = next((token for token in self._tokenizer.encode(between, add_special_tokens=False) if token in special), None)
        text = "" if found is None else str(self._tokenizer.decode([found]))
        # A template without one has the next role's token there, which is no part of the response.
        return Close(token_id=found, text=text) if found is not None and between.lstrip().startswith(text) else None


def read_tools(text: str) -> Said:
    """A response with its tool calls; text alone where there are none or one cannot be read."""
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Said(content=text)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Said(content=text)
        calls.append(ToolCall(call_id=f"call_{secrets.token_hex(12)}", name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    if not calls:
        return Said(content=text)
    return Said(content=text[: text.index("<tool_call>")].strip() or None, tool_calls=tuple(calls))


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates take it: content is text, arguments of tool calls are mappings.

    Raises:
        ApiError: it is no message, or has content other than text.
    """
    where = f"messages.{index}"
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError(400, f"{where} has no role", param=where)
    plain = dict(message) | {"role": _ROLES.get(role, role), "content": _text(message.get("content"), where)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    return {name: value for name, value in plain.items() if value is not None}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ApiError(400, f"{where}.content may be text or parts of type text", param=f"{where}.content")
    return "".join(str(part.get("text", "")) for part in content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    except (ValueError, TypeError, KeyError) as error:
        raise ApiError(400, f"{where}.tool_calls cannot be read: {error!r}", param=f"{where}.tool_calls") from error
    return {**call, "function": function}
