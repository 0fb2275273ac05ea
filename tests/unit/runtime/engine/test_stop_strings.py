"""Stop strings over real tokenizers: found at the token that completes one, wherever tokens are cut and responses are handed on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.engine.stop_strings import StopFinder, decoder
from tests.support.chat_tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer("chatml")
DECODE = decoder(TOKENIZER)
PIECES = ("</code>", "</co", "de>", "<", "answer>", "é", "🙂", " x", "\n", "<|im_end|>")


def first(token_ids: list[int], stops: list[str], cut: int | None = None) -> int | None:
    """Tokens up to the end of a response that goes on elsewhere after ``cut`` tokens."""
    finder = StopFinder(DECODE, stops)
    for index, token_id in enumerate(token_ids):
        if index == cut:
            finder = StopFinder(DECODE, stops, before=token_ids[:index])
        if finder.completes(token_id):
            return index + 1
    return None


def by_definition(token_ids: list[int], stops: list[str]) -> int | None:
    """The first beginning of the response whose text has a stop string."""
    sizes = range(1, len(token_ids) + 1)
    return next((size for size in sizes if any(stop in DECODE(token_ids[:size]) for stop in stops)), None)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    token_ids=st.one_of(
        st.lists(st.sampled_from(PIECES), max_size=8).map(lambda parts: TOKENIZER.encode("".join(parts), add_special_tokens=False)),
        st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    ),
    stops=st.lists(st.sampled_from(("</code>", "de>", "é", "🙂\n", "<|im_end|>", ">")), min_size=1, max_size=3),
    cut=st.integers(0, 30),
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(token_ids: list[int], stops: list[str], cut: int) -> None:
    assert first(token_ids, stops) == first(token_ids, stops, cut) == by_definition(token_ids, stops)


def test_a_long_response_handed_on_is_watched_from_its_last_tokens_on() -> None:
    """What came long before is not decoded again, and a stop string over the border is found."""
    response = TOKENIZER.encode("x" * 300 + " and then </code> behind", add_special_tokens=False)
    expected = by_definition(response, ["</code>"])
    assert expected is not None
    assert {first(response, ["</code>"], cut) for cut in range(expected - 8, expected)} == {expected}


def test_the_prompt_is_not_watched() -> None:
    finder = StopFinder(DECODE, ["</code>"])
    assert not any(finder.completes(token_id) for token_id in TOKENIZER.encode("ode>", add_special_tokens=False))
