"""What a chat template does to a conversation that goes on: found out at the start, with conversations made up for it.

A prompt of several turns is all token ids so far and the next message's behind them; nothing is rendered again. A template of class
``APPEND_ONLY`` gives the same text either way. One that ``REWRITES_HISTORY``, such as Qwen3's, which takes reasoning away once the user
speaks again, would show the policy another history than the one it sampled in; with appended ids it keeps the history it has seen. One that
``DROPS_HISTORY`` was not made for several turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import chain

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]
"""Text of a conversation, with the generation prompt behind it."""

MARK = "ASSISTANTSAID"
"""Stands for a response where only what follows it is wanted; plain letters, so that no template changes it."""
_RESPONSES = (
    "Right",
    " <answer> Up </answer>\n",
    "<think>\nreasons\n</think>\n\nDown",
    '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>',
)
_QUESTIONS = ("first question", "second question", "third question")


def user_message(content: str) -> Message:
    """What the user says."""
    return {"role": "user", "content": content}


class TemplateClass(StrEnum):
    """How a render of the whole conversation differs from the appended one."""

    PLAIN = "plain"
    """No template: the texts themselves."""
    APPEND_ONLY = "appendOnly"
    """Not at all."""
    SAMPLED_TURN_DIFFERS = "sampledTurnDiffers"
    """In white space around a response: the sampled ids are kept, and the rest agrees."""
    REWRITES_HISTORY = "rewritesHistory"
    """In the reasoning of earlier responses, or in what stands around them; what else was said is there."""
    DROPS_HISTORY = "dropsHistory"
    """Something that was said before is not there."""


def suffix(render: Render, opening: Sequence[Message], messages: Sequence[Message]) -> str:
    """What follows a response when messages come next: the end of the response's turn, the messages, the generation prompt.

    Args:
        render: of the template.
        opening: what every conversation begins with: the system message, or nothing.
        messages: that come next.
    """
    context = [*opening, {"role": "user", "content": "question"}, {"role": "assistant", "content": MARK}, *messages]
    _, mark, behind = render(context).partition(MARK)
    if not mark:
        raise ValueError("the chat template leaves out what the assistant said")
    return behind


def classify(render: Render, opening: Sequence[Message], follower: Callable[[str], Message] = user_message) -> TemplateClass:
    """The class of a template for conversations in which messages of ``follower`` come after responses; what it raises goes through."""
    return max((_compare(render, opening, response, follower) for response in _RESPONSES), key=list(TemplateClass).index)


def _compare(render: Render, opening: Sequence[Message], response: str, follower: Callable[[str], Message]) -> TemplateClass:
    questions = [user_message(_QUESTIONS[0]), *(follower(question) for question in _QUESTIONS[1:])]
    answer = {"role": "assistant", "content": response}
    appended = render([*opening, questions[0]])
    for question in questions[1:]:
        appended += response + suffix(render, opening, [question])
    turns = chain.from_iterable((question, answer) for question in questions)
    rendered = render([*opening, *list(turns)[:-1]])
    if rendered == appended:
        return TemplateClass.APPEND_ONLY
    if "".join(rendered.split()) == "".join(appended.split()):
        return TemplateClass.SAMPLED_TURN_DIFFERS
    visible = response.rpartition("</think>")[2].strip()
    is_there = all(question in rendered for question in _QUESTIONS) and rendered.count(visible) >= len(questions) - 1
    return TemplateClass.REWRITES_HISTORY if is_there else TemplateClass.DROPS_HISTORY
