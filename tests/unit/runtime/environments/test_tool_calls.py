"""Calls in a response's text, and tools in a prompt."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.environments.tool_calls import (
    BadCall,
    Tool,
    ToolCall,
    argument_problems,
    describes_calls,
    parse,
    parse_tags,
    prompt_part,
    prompt_part_tags,
    schema_problem,
)

ADD = Tool(
    name="add",
    description="Adds.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)
CODE = Tool(name="python", description="Runs code.", parameters={"type": "object", "properties": {"code": {"type": "string"}}})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_found_in_their_order_and_the_rest_is_content() -> None:
    parsed = parse(
        f"<think>\nuse {call('no', {})}?\n</think>\n\nLet me see. {call('add', {'a': 1, 'b': 2})}\n{call('add', {'a': 3, 'b': 4})}"
    )
    assert parsed.calls == (ToolCall(name="add", arguments={"a": 1, "b": 2}), ToolCall(name="add", arguments={"a": 3, "b": 4}))
    assert parsed.content.endswith("Let me see.")


def test_a_call_that_was_cut_at_its_end_tag_counts() -> None:
    assert parse(call("add", {"a": 1, "b": 2}).removesuffix("</tool_call>")).calls == (ToolCall(name="add", arguments={"a": 1, "b": 2}),)


def test_thinking_that_never_ends_holds_no_call() -> None:
    assert parse(f"<think>\n{call('add', {})}").calls == ()


def test_arguments_may_be_json_in_a_text() -> None:
    assert parse(call("add", '{"a": 1}')).calls == (ToolCall(name="add", arguments={"a": 1}),)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{add(1, 2)}", "must be JSON: Expecting property name"),
        ("[1]", 'object with "name" and "arguments"'),
        ('{"arguments": {}}', 'object with "name" and "arguments"'),
        ('{"name": "add", "arguments": [1]}', 'an object as "arguments"'),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ("[" * 100_000, "must be JSON"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}", "nested deeper than 64 levels"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(body, problem) -> None:
    (found,) = parse(f"<tool_call>{body}</tool_call>").calls
    assert isinstance(found, BadCall)
    assert problem in found.problem


@given(name=st.text(max_size=20), arguments=st.dictionaries(st.text(), JSON, max_size=4))
def test_whatever_json_writes_is_read(name, arguments) -> None:
    # A tag inside a text would have to be escaped, as in any template.
    written = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    assert parse(f"<tool_call>{written}</tool_call>").calls == (ToolCall(name=name, arguments=arguments),)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a"}', "x", "\n"]), max_size=12))
def test_no_text_is_too_odd_to_be_parsed(pieces) -> None:
    parsed = parse("".join(pieces))
    assert len(parsed.calls) <= pieces.count("<tool_call>")


def test_calls_in_tags() -> None:
    parsed = parse_tags("First <python>\nprint(1)\n</python> then <python>print(2)", {"python": "code"})
    assert [call.arguments for call in parsed.calls] == [{"code": "print(1)"}, {"code": "print(2)"}]
    assert parsed.content == "First  then"
    assert parse_tags("<python>1</python>", {}).calls == ()


def test_the_part_of_the_prompt_asks_for_what_is_read() -> None:
    part = prompt_part([ADD])
    assert describes_calls(part)
    assert json.dumps(ADD.described()) in part
    assert "- <python>code</python>: Runs code." in prompt_part_tags([CODE])
    assert not describes_calls("[TOOL_CALLS] and <tool_call> of another form")


def test_arguments_are_compared_with_the_schema() -> None:
    assert list(argument_problems(ADD, {"a": 1, "b": 2})) == []
    assert sorted(argument_problems(ADD, {"a": "1"})) == ["'b' is a required property", "a: '1' is not of type 'integer'"]


@pytest.mark.parametrize(
    ("schema", "problem"), [({"type": "object"}, None), ({"type": "objct"}, "not valid"), ({"properties": {}}, 'must be "object"')]
)
def test_a_schema_of_no_use_is_found(schema, problem) -> None:
    found = schema_problem(schema)
    assert found is None if problem is None else problem in found
