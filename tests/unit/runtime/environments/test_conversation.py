"""Calls joined to samples: by what was said, token by token where it was sampled."""

import re

import numpy as np
import pytest

from rljob_runtime.environments.endpoint.chat import Chat, read_tools
from rljob_runtime.environments.endpoint.conversation import Close, Conversation, Place
from rljob_runtime.environments.endpoint.requests import ChatRequest
from tests.support.chat_tokenizers import chat_tokenizer

USER = {"role": "user", "content": "first question"}
NEXT = {"role": "user", "content": "second question"}


class Talk:
    """A program's calls of one episode, and a policy that writes what the test says."""

    def __init__(self, template: str = "chatml") -> None:
        self.tokenizer = chat_tokenizer(template)
        self.chat = Chat(self.tokenizer)
        self.conversation = Conversation(lambda text: self.tokenizer.encode(text, add_special_tokens=False), self.chat.close)
        self.close = [] if self.chat.close is None else [self.chat.close.token_id]

    def ask(self, *messages, **more) -> Place:
        return self.conversation.place(self.chat.prompt(ChatRequest(messages=list(messages), **more)))

    def say(self, place: Place, text: str, *, closed: bool = True, ids: list[int] | None = None) -> np.ndarray:
        ids = self.tokenizer.encode(text) if ids is None else ids
        sampled = np.asarray(ids + (self.close if closed else []), dtype=np.int32)
        self.conversation.sampled(place, sampled, self.tokenizer.decode(sampled.tolist(), skip_special_tokens=True))
        return sampled

    def text(self, ids) -> str:
        return self.tokenizer.decode(ids.tolist())


@pytest.mark.parametrize("template", ["chatml", "trimming", "tool-calls", "spaced", "role-stops"])
@pytest.mark.parametrize("closed", [True, False])
def test_the_prompt_of_a_call_is_what_was_prompted_and_sampled_before(template, closed) -> None:
    """Whatever the tokens are that a response was sampled as: here one a letter, as no tokenizer writes them."""
    talk = Talk(template)
    first = talk.ask(USER)
    letters = [talk.tokenizer.encode(letter)[0] for letter in " Right"]
    assert letters != talk.tokenizer.encode(" Right")
    said = talk.say(first, "", ids=letters, closed=closed)
    second = talk.ask(USER, {"role": "assistant", "content": " Right"}, NEXT)
    assert (first.begins, second.begins, second.branch) == (True, False, 0)
    assert second.prompt_ids.tolist() == [*first.prompt_ids.tolist(), *said.tolist(), *second.token_ids.tolist()]
    assert "second question" in talk.text(second.token_ids)
    if talk.close:
        assert second.prompt_ids.tolist().count(talk.close[0]) == talk.text(second.prompt_ids).count(talk.chat.close.text)
        assert talk.text(second.token_ids).startswith(talk.chat.close.text) is not closed


def test_a_template_that_rewrites_the_history_begins_a_sample() -> None:
    """Reasoning goes once the user speaks again; inside of a tool chain it stays."""
    talk = Talk("reasoning")
    said = "<think>\nreasons\n</think>\n\nDown"
    talk.say(talk.ask(USER), said)
    answer = {"role": "assistant", "content": said}
    inside = talk.ask(USER, answer, {"role": "tool", "content": "ok"})
    assert not inside.begins
    after = talk.ask(USER, answer, NEXT)
    assert (after.begins, after.branch) == (True, 1)
    assert talk.text(after.prompt_ids) == talk.chat.prompt(ChatRequest(messages=[USER, answer, NEXT]))


def test_a_program_that_rewrites_the_history_begins_a_sample_with_what_it_kept() -> None:
    talk = Talk()
    first = talk.ask(USER)
    said = talk.say(first, "Right")
    answer = {"role": "assistant", "content": "Right"}
    second = talk.ask(USER, answer, NEXT)
    talk.say(second, "Up")
    other = talk.ask(USER, answer, {"role": "user", "content": "another question"})
    assert (other.begins, other.branch) == (True, 1)
    shared = [*first.prompt_ids.tolist(), *said.tolist()]
    assert other.prompt_ids.tolist()[: len(shared)] == shared
    talk.say(other, "Left")
    talk.say(talk.ask({"role": "user", "content": "nothing of that"}), "x")
    assert len(talk.conversation) == 3
    assert talk.ask(USER, answer, NEXT, {"role": "assistant", "content": "Up"}, NEXT).branch == 0
    rest = {"role": "user", "content": "another question"}, {"role": "assistant", "content": "Left"}, NEXT
    again = talk.ask(USER, answer, *rest)
    assert (again.begins, again.branch) == (False, 1)


def test_the_same_question_again_is_a_sample_of_its_own() -> None:
    talk = Talk()
    first = talk.ask(USER)
    talk.say(first, "Right")
    again = talk.ask(USER)
    assert again.begins
    assert again.prompt_ids.tolist() == first.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("said", "behind", "left"),
    [
        ("said", ">\n next", " next"),  # the last token says a line break more
        ("said", "> next", " next"),
        ("said", " next", " next"),
        ("said\n", "> next", " next"),  # the program trims what it was shown
    ],
)
def test_what_is_put_back_of_a_stop_string_is_not_encoded_again(said, behind, left) -> None:
    conversation = Conversation(lambda text: [ord(letter) for letter in text], None)
    conversation.sampled(conversation.place("q"), np.array([1, 2], dtype=np.int32), said, (">\n", ">"))
    place = conversation.place(f"qsaid{behind}")
    assert not place.begins
    assert "".join(map(chr, place.token_ids)) == left
    conversation.sampled(place, np.array([3], dtype=np.int32), "again")
    assert conversation.place(f"qsaid{behind}again.").token_ids.tolist() == [ord(".")]  # the same text is read the same way once more


@pytest.mark.parametrize("hidden", ["<", "<|"])
def test_a_stop_string_that_begins_like_the_close_of_the_template_leaves_it_whole(hidden: str) -> None:
    def encode(text: str) -> list[int]:
        return [0 if part == "<|end|>" else ord(part) for part in re.findall(r"<\|end\|>|.", text, re.DOTALL)]

    conversation = Conversation(encode, Close(token_id=0, text="<|end|>"))
    conversation.sampled(conversation.place("q"), np.array([1, 2], dtype=np.int32), "said", (hidden,))
    assert conversation.place("qsaid<|end|>\nnext").token_ids.tolist() == encode("<|end|>\nnext")
    assert conversation.place(f"qsaid{hidden}<|end|>\nnext").token_ids.tolist() == encode("<|end|>\nnext")


def test_a_changed_response_is_another_history() -> None:
    talk = Talk()
    talk.say(talk.ask(USER), "Right")
    assert talk.ask(USER, {"role": "assistant", "content": "Left"}, NEXT).begins
    assert talk.ask({"role": "user", "content": "first  question"}, {"role": "assistant", "content": "Right"}, NEXT).begins


def test_tool_calls_join_though_the_template_writes_them_in_its_own_way() -> None:
    talk = Talk("tool-calls")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    first = talk.ask(USER, tools=tools)
    written = 'I look. <tool_call> {"name":"look", "arguments":{"where":"north",  "far":true}}</tool_call>'
    said = talk.say(first, written)
    read = read_tools(written)
    assert read.content == "I look."
    (call,) = read.tool_calls
    assert (call.name, call.arguments) == ("look", '{"where": "north", "far": true}')
    calls = [{"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]
    result = {"role": "tool", "tool_call_id": call.call_id, "content": "a wall"}
    second = talk.ask(USER, {"role": "assistant", "content": read.content, "tool_calls": calls}, result, tools=tools)
    assert not second.begins
    assert second.prompt_ids.tolist()[: -len(second.token_ids)] == [*first.prompt_ids.tolist(), *said.tolist()]
    assert talk.ask(USER, {"role": "assistant", "content": read.content, "tool_calls": calls}, result).begins  # without the tools


@pytest.mark.parametrize(
    "text", ["no call", "<tool_call>{broken</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>5</tool_call>"]
)
def test_what_is_no_tool_call_is_text(text) -> None:
    assert read_tools(text).content == text
    assert read_tools(text).tool_calls == ()


def test_two_tool_calls_without_text() -> None:
    read = read_tools('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "b"}\n</tool_call>')
    assert read.content is None
    assert [call.name for call in read.tool_calls] == ["a", "b"]


def test_prompts_of_token_ids_continue_what_they_begin_with() -> None:
    conversation = Conversation(lambda text: [], None)
    first = conversation.place_ids([5, 6, 7], str)
    conversation.sampled(first, np.array([8, 9], dtype=np.int32), "x")
    second = conversation.place_ids([5, 6, 7, 8, 9, 10], str)
    assert (second.begins, second.token_ids.tolist()) == (False, [10])
    assert conversation.place_ids([5, 6, 7, 8, 1], str).begins


def test_a_call_that_nests_without_end_is_text() -> None:
    text = f"<tool_call>{'[' * 3000}</tool_call>"
    assert read_tools(text).content == text
