"""Finds halves of surrogate pairs in parsed JSON: what JSON may write as an escape and no tokenizer, log or file of UTF-8 can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAY_HOLD_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed|\x00")
"""An escape, a half in Python's ``surrogatepass`` form of UTF-8, or a line of UTF-16 or UTF-32, all of which ``json`` reads."""
_HALF = re.compile("[\ud800-\udfff]")


def half_pair(line: bytes, value: dict[str, object]) -> str | None:
    """Where an object has half of a surrogate pair, or None: a sentence for a message.

    Args:
        line: what the object was read from; most lines tell at once that there is none.
        value: the object.
    """
    if _MAY_HOLD_HALVES.search(line) is None:
        return None
    for name, inside in value.items():
        for text in (name, *_texts(inside)):
            if (found := _HALF.search(text)) is not None:
                half = f"\\u{ord(found[0]):04x}"
                return f"field {name!a} has {half}, half of a surrogate pair, which is no character; remove or complete it"
    return None


def _texts(value: object) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _texts(one)
