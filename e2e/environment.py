"""What `make e2e` tells the scenarios."""

from __future__ import annotations

import os


def needed(variable: str) -> str:
    """The variable's value; an assertion error names it where it is not set."""
    value = os.environ.get(variable)
    assert value, f"{variable} is not set; `make e2e` sets it"
    return value
