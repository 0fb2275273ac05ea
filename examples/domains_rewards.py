"""The verifier of one domain of domains.yaml. It runs in a process of its own, without network, secrets or other files."""

from __future__ import annotations

from collections.abc import Mapping


def even(prompt: str, response: str, answer: str, metadata: Mapping[str, object], *, digits: int) -> float:
    """1 for an even number of at most so many digits."""
    text = response.strip()
    return float(text.isdecimal() and len(text) <= digits and int(text) % 2 == 0)
