"""Paths into a manifest: ``spec.nodeGroups[0].labels["a.b"]`` as text, ``("spec", "nodeGroups", 0, "labels", "a.b")`` as parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

Parts = tuple[str | int, ...]
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w/-]*")
_PART = re.compile(r'\[(?P<index>\d+)\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]|\.?(?P<key>[^.\[\]]+)')


def join(parts: Sequence[str | int]) -> str:
    """Parts as text."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def split(path: str) -> Parts:
    """Text as parts; the inverse of :func:`join`."""
    parts: list[str | int] = []
    for match in _PART.finditer(path):
        if match["index"] is not None:
            parts.append(int(match["index"]))
        elif match["quoted"] is not None:
            parts.append(str(json.loads(match["quoted"])))
        else:
            parts.append(match["key"])
    return tuple(parts)


def position(document: object, path: str) -> tuple[int, ...]:
    """Sort key: where a path lies in a document, reading from the top. What is missing comes after what is there."""
    key: list[int] = []
    here = document
    for part in split(path):
        if isinstance(here, Mapping):
            keys = list(here)
            key.append(keys.index(part) if part in here else len(keys))
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            key.append(part)
            here = here[part] if part < len(here) else None
        else:
            break
    return tuple(key)
