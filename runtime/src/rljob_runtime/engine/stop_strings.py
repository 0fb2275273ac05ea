"""Texts that end a response: found while its tokens come, one after another, so that an engine can stop at once.

A response ends with the token that completes one of the texts. Nothing of what was sampled is changed: as in vLLM, whose
``include_stop_str_in_output`` is about text alone, the tokens of the stop string stay in the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""
MAX_CHARACTER_TOKENS = 4
"""Of byte tokens; a character of UTF-8 has at most so many bytes."""
_INCOMPLETE = "\ufffd"
"""What decoders write for bytes that are no character yet."""


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's decoding, past the front end's work where there is a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: str(backend.decode(ids, skip_special_tokens=False))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class StopFinder:
    """Watches one response."""

    def __init__(self, decode: Decode, texts: Sequence[str], before: Sequence[int] = ()) -> None:
        """Watch for ``texts``, none of which is empty.

        Args:
            decode: see :func:`decoder`.
            texts: to be found.
            before: what was sampled of the response earlier, none of which completed a text; a text may begin in it.
        """
        self._decode, self._texts = decode, tuple(texts)
        self._longest = max(len(text) for text in texts)
        self._ids: list[int] = []
        """From the tokens on whose text was known last: a token's text may depend on the one before it."""
        self._known = 0
        """How many of them have a text."""
        self._tail = ""
        for token_id in before[-reach(texts) :]:
            self.completes(token_id)

    def completes(self, token_id: int) -> bool:
        """Take the next token; whether it completes one of the texts."""
        self._ids.append(token_id)
        text = self._decode(self._ids)[len(self._decode(self._ids[: self._known])) :]
        found = self._tail + text.rstrip(_INCOMPLETE)
        if not text.endswith(_INCOMPLETE) or len(self._ids) - self._known >= MAX_CHARACTER_TOKENS:
            del self._ids[: self._known]
            self._known = len(self._ids)
            self._tail = (self._tail + text)[1 - self._longest :] if self._longest > 1 else ""
        return any(wanted in found for wanted in self._texts)


def reach(texts: Sequence[str]) -> int:
    """How many tokens before the next one a text can begin, at most, and a few more for what a token's text depends on."""
    return MAX_CHARACTER_TOKENS * (max(len(text) for text in texts) + 1)
