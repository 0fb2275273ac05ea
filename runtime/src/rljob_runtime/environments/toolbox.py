"""The tools of one ToolUse environment: what the policy reads of them, and from its calls to results or to work for a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_api.v1alpha1.conversations import Tool as ToolSpec
from rljob_api.v1alpha1.conversations import ToolUseParameters
from rljob_api.vocabulary import CallFormat, ToolType
from rljob_runtime.environments.bm25 import Corpus, read_corpus
from rljob_runtime.environments.calculator import CalculatorError, calculate
from rljob_runtime.environments.tool_calls import BadCall, Parsed, Tool, ToolCall, argument_problems, parse, parse_tags, schema_problem
from rljob_runtime.environments.tool_work import CallFunction, RunProgram, Work
from rljob_runtime.errors import EnvironmentSetupError
from rljob_runtime.rewards.code import extract_code

_BUILT_IN: Mapping[ToolType, tuple[str, str, str]] = {
    ToolType.PYTHON: (
        "Runs a Python program and returns what it prints. It has the standard library and no network; nothing is kept between calls.",
        "code",
        "The program.",
    ),
    ToolType.CALCULATOR: ("Calculates the value of an arithmetic expression.", "expression", "For example (3 + 4) * sqrt(2)."),
    ToolType.SEARCH: ("Finds the passages of a collection of texts that fit a query best.", "query", "A few words."),
}
"""Description, name of the one argument, and its description."""
_SPARE_S = 10.0
"""Beyond a program's own limit until the process that runs it is taken for stuck."""


def tools_of(parameters: ToolUseParameters) -> tuple[Tool, ...]:
    """What the policy reads.

    Raises:
        EnvironmentSetupError: a schema of the user's is none.
    """
    return tuple(_tool(spec) for spec in parameters.tools)


def _tool(spec: ToolSpec) -> Tool:
    if spec.type is ToolType.FUNCTION:
        schema = spec.parameters or {}
        if (problem := schema_problem(schema)) is not None:
            raise EnvironmentSetupError(f"tool {spec.called}: its parameters are no JSON Schema: {problem}; correct it")
        return Tool(name=spec.called, description=spec.description or "", parameters=schema)
    description, argument, meaning = _BUILT_IN[spec.type]
    properties = {argument: {"type": "string", "description": meaning}}
    schema = {"type": "object", "properties": properties, "required": [argument], "additionalProperties": False}
    return Tool(name=spec.called, description=spec.description or description, parameters=schema)


class RefusedCallError(Exception):
    """Raised for a call that cannot be carried out, with a message for the policy."""


class Toolbox:
    """The tools, with the corpora that they search."""

    def __init__(self, parameters: ToolUseParameters) -> None:
        """Read the corpora; raises EnvironmentSetupError where one cannot be read, or a schema is none."""
        self._parameters = parameters
        self._tools = {tool.name: tool for tool in tools_of(parameters)}
        self._specs = {spec.called: spec for spec in parameters.tools}
        self._corpora: dict[str, Corpus] = {
            name: read_corpus(Path(spec.corpus), spec.text_field) for name, spec in self._specs.items() if spec.corpus is not None
        }

    def parse(self, response: str) -> Parsed:
        """The calls of a response."""
        if self._parameters.call_format is CallFormat.TAGS:
            return parse_tags(response, {name: next(iter(tool.parameters["properties"])) for name, tool in self._tools.items()})
        return parse(response)

    def prepare(self, call: ToolCall | BadCall) -> Work | str:
        """What a call needs a process for, or its result.

        Raises:
            RefusedCallError: it is no call of these tools, or cannot be carried out.
        """
        if isinstance(call, BadCall):
            raise RefusedCallError(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            raise RefusedCallError(f"there is no tool {call.name[:64]!r}; there are {', '.join(self._tools)}")
        if problem := next(argument_problems(tool, call.arguments), None):
            raise RefusedCallError(f"the arguments of {tool.name} do not fit: {problem}")
        return self._prepared(self._specs[tool.name], call.arguments)

    def limit_s(self, call: ToolCall) -> float:
        """How long the process of a call may take."""
        spec = self._specs[call.name]
        return spec.timeout_s + (_SPARE_S if spec.type is ToolType.PYTHON else 0.0)

    def shortened(self, result: str) -> str:
        """A result of at most as many characters as allowed, cut in its middle."""
        most = self._parameters.max_result_characters
        if len(result) <= most:
            return result
        head = most // 2
        return f"{result[:head]}\n... ({len(result) - most} characters left out)\n{result[len(result) - (most - head) :]}"

    def _prepared(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Work | str:
        match spec.type:
            case ToolType.PYTHON:
                return RunProgram(code=extract_code(arguments["code"]), timeout_s=spec.timeout_s, memory_bytes=spec.memory_bytes)
            case ToolType.CALCULATOR:
                try:
                    return calculate(arguments["expression"])
                except CalculatorError as error:
                    raise RefusedCallError(str(error)) from error
            case ToolType.SEARCH:
                found = self._corpora[spec.called].search(arguments["query"], spec.top_k)
                return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(found, start=1)) or "(nothing found)"
            case ToolType.FUNCTION:
                return CallFunction(name=spec.called, arguments=arguments)
