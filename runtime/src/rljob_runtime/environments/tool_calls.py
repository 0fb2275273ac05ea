"""Tools as a policy reads and calls them. Pure: from a response's text to calls, from tools to a part of the prompt.

::

    <tool_call>
    {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    </tool_call>

is the form of the templates of Hermes and Qwen 2.5 and 3. ``Tags`` is that of models without it, for tools with one text as argument:
``<python>print(6 * 7)</python>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_END_OF_THINKING = "</think>"
_MAX_PROBLEM_CHARACTERS = 200
_MAX_DEPTH = 64
"""Of arguments."""
_DESCRIBED_FORM = re.compile(rf"{OPEN}\s*\{{\s*\"name\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments: an object."""

    def described(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that can be read; neither name nor arguments are checked."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that cannot be read."""

    problem: str
    """For the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a response says."""

    content: str
    """Its text without the calls."""
    calls: tuple[ToolCall | BadCall, ...] = field(default=())
    """In the order of the text."""


def parse(response: str) -> Parsed:
    """Find the calls of a response, after its thinking; the last one may lack its end tag, where a response was cut at it."""
    thinking, said = _split_thinking(response)
    before, *pieces = said.split(OPEN)
    content, calls = [thinking + before], []
    for piece in pieces:
        body, _, after = piece.partition(CLOSE)
        calls.append(_read(body))
        content.append(after)
    return Parsed(content="".join(content).strip(), calls=tuple(calls))


def parse_tags(response: str, arguments: Mapping[str, str]) -> Parsed:
    """Find calls in tags of the tools' names.

    Args:
        response: of the policy.
        arguments: name of the one argument of each tool.
    """
    thinking, said = _split_thinking(response)
    calls: list[ToolCall | BadCall] = []
    names = "|".join(re.escape(name) for name in arguments)
    pattern = re.compile(rf"<({names})>(.*?)(?:</\1>|\Z)", re.DOTALL)
    if names:
        calls = [ToolCall(name=found[1], arguments={arguments[found[1]]: found[2].strip()}) for found in pattern.finditer(said)]
        said = pattern.sub("", said)
    return Parsed(content=(thinking + said).strip(), calls=tuple(calls))


def prompt_part(tools: Sequence[Tool]) -> str:
    """What a system message says of tools, for templates that have no words of their own for them."""
    described = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call functions to help with the task. These are their signatures, one on each line:\n"
        f"<tools>\n{described}\n</tools>\n\n"
        f"For each call write a JSON object with the function's name and its arguments within {OPEN}{CLOSE} tags:\n"
        f'{OPEN}\n{{"name": <name of the function>, "arguments": <object of its arguments>}}\n{CLOSE}'
    )


def prompt_part_tags(tools: Sequence[Tool]) -> str:
    """The same for calls in tags of the tools' names."""
    lines = [f"- <{tool.name}>{next(iter(tool.parameters['properties']))}</{tool.name}>: {tool.description}" for tool in tools]
    return "# Tools\n\nYou may use tools to help with the task. Write what one is to do within its tags:\n" + "\n".join(lines)


def describes_calls(prompt: str) -> bool:
    """Whether a rendered prompt asks for calls of the form that :func:`parse` reads."""
    return _DESCRIBED_FORM.search(prompt) is not None


def _split_thinking(response: str) -> tuple[str, str]:
    """The thinking, in which nothing is a call, and the rest; all of it is thinking where it never ends."""
    thinking, end, said = response.rpartition(_END_OF_THINKING)
    if "<think>" in said:
        return response, ""
    return thinking + end, said


def _read(body: str) -> ToolCall | BadCall:
    try:
        value = json.loads(body, parse_constant=_refuse)
        name, arguments = value["name"], value.get("arguments", {})
        if isinstance(arguments, str):  # OpenAI's form: JSON in a text
            arguments = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return BadCall(problem=_short(f"a tool call must be JSON: {error or type(error).__name__}"))
    except (TypeError, KeyError, AttributeError):
        return BadCall(problem='a tool call must be a JSON object with "name" and "arguments"')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return BadCall(problem='a tool call must have a text as "name" and an object as "arguments"')
    if _is_deep(arguments):
        return BadCall(problem=f"the arguments are nested deeper than {_MAX_DEPTH} levels")
    return ToolCall(name=name, arguments=arguments)


def _is_deep(value: object) -> bool:
    """Whether a value is too deep for whoever walks over it by calling itself."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())]
        if not level:
            return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_PROBLEM_CHARACTERS else f"{text[:_MAX_PROBLEM_CHARACTERS]}..."


def argument_problems(tool: Tool, arguments: Mapping[str, Any]) -> Iterator[str]:
    """What of a call's arguments does not fit the schema, in words for the policy."""
    from jsonschema import Draft202012Validator

    for error in Draft202012Validator(dict(tool.parameters)).iter_errors(dict(arguments)):
        place = ".".join(str(part) for part in error.absolute_path)
        yield _short(f"{place}: {error.message}" if place else error.message)


def schema_problem(parameters: Mapping[str, Any]) -> str | None:
    """Why a JSON Schema cannot be used for arguments; None where it can."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(dict(parameters))
    except SchemaError as error:
        return error.message
    return None if parameters.get("type") == "object" else 'its "type" must be "object"'
