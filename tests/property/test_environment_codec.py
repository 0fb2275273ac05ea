"""Invariant EXACT of the codec: over any number of turns, ids that were sampled stay, and what stands around them is the template's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.environments.codec import Codec, Place, PromptSettings
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.tool_calls import Tool, prompt_part
from tests.support.chat_tokenizers import chat_tokenizer

PLACE = Place(turn=0, actions_left=1, max_tokens=1)
WORDS = st.text(alphabet="PG_O\nabc <>/", max_size=20)
SPOKEN = st.text(alphabet="PG_Oabc", min_size=1, max_size=20)


def conversation(kind, opening, said, responses, closed):
    """Ids of an episode with given sampled ids, and where those lie."""
    codec = Codec(chat_tokenizer(kind), PromptSettings(system=opening))
    ids = codec.first_prompt(Turn(observation=said[0]), PLACE).tolist()
    spans = []
    for text, response, is_closed in zip(said[1:], responses, closed, strict=True):
        sampled = [*response, *([codec.close_token_id] if is_closed else [])]
        spans.append((len(ids), sampled))
        ids += sampled
        ids += codec.continuation(sampled[-1] if sampled else None, Turn(observation=text), PLACE).tolist()
    return ids, spans


@pytest.mark.parametrize("kind", ["chatml", "trimming", "reasoning", "role-stops", "spaced", "tools", "no-tools"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sampled_ids_stay_whatever_they_are(kind, data) -> None:
    turns = data.draw(st.integers(1, 10))
    size = len(chat_tokenizer(kind))
    said = data.draw(st.lists(WORDS, min_size=turns + 1, max_size=turns + 1))
    responses = data.draw(st.lists(st.lists(st.integers(3, size - 1), max_size=8), min_size=turns, max_size=turns))
    closed = data.draw(st.lists(st.booleans(), min_size=turns, max_size=turns))
    ids, spans = conversation(kind, data.draw(st.sampled_from(["", "Play."])), said, responses, closed)
    assert all(ids[start : start + len(sampled)] == sampled for start, sampled in spans)
    # One close token ends each response: the sampled one, or the one put behind a response that was cut.
    close = Codec(chat_tokenizer(kind), PromptSettings()).close_token_id
    for start, sampled in spans:
        end = start + len(sampled)
        assert close in (sampled[-1:] or [None]) or close in ids[end : end + 2]


@pytest.mark.parametrize("kind", ["chatml", "reasoning", "role-stops"])
@settings(max_examples=40, deadline=None)
@given(said=st.lists(SPOKEN, min_size=2, max_size=6), data=st.data())
def test_an_append_only_template_gives_the_same_ids_as_a_render_of_the_whole(kind, said, data) -> None:
    tokenizer = chat_tokenizer(kind)
    answers = data.draw(st.lists(SPOKEN, min_size=len(said) - 1, max_size=len(said) - 1))
    closed = data.draw(st.lists(st.booleans(), min_size=len(answers), max_size=len(answers)))
    ids, _ = conversation(kind, "Play.", said, [tokenizer.encode(answer) for answer in answers], closed)
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": said[0]}]
    for text, answer in zip(said[1:], answers, strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert np.asarray(ids).max() < len(tokenizer)


TOOL = Tool(name="look", description="Looks.", parameters={"type": "object", "properties": {"at": {"type": "string"}}})


@pytest.mark.parametrize("kind", ["chatml", "tools", "reasoning"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ids_over_tool_calls_are_those_sampled_and_around_them_a_render_of_the_whole(kind, data) -> None:
    """Nothing is encoded twice: whatever was sampled stays, and results are framed as the template frames them."""
    tokenizer = chat_tokenizer(kind)
    codec = Codec(tokenizer, PromptSettings(system="Play.", tools=(TOOL,)))
    ids = codec.first_prompt(Turn(observation="go"), PLACE).tolist()
    turns = data.draw(st.lists(st.tuples(SPOKEN, st.lists(SPOKEN, min_size=1, max_size=3)), min_size=1, max_size=6))
    encode = data.draw(st.sampled_from([tokenizer.encode, lambda text: [i for letter in text for i in tokenizer.encode(letter)]]))
    messages = [
        {"role": "system", "content": "Play." if kind == "tools" else f"Play.\n\n{prompt_part((TOOL,))}"},
        {"role": "user", "content": "go"},
    ]
    spans = []
    for said, results in turns:
        sampled = [*encode(said), codec.close_token_id]
        spans.append((len(ids), sampled))
        turn = Turn(observation="", role="tool", results=tuple(results))
        ids += [*sampled, *codec.continuation(sampled[-1], turn, PLACE).tolist()]
        messages += [{"role": "assistant", "content": said}, *({"role": "tool", "content": result} for result in results)]
    assert all(ids[start : start + len(sampled)] == sampled for start, sampled in spans)
    tools = {"tools": [TOOL.described()]} if kind == "tools" else {}
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools)
