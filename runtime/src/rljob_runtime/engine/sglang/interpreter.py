"""Where SGLang is installed: its pins conflict with those of vLLM and of this package, so its server has an interpreter of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rljob_runtime.errors import SetupError

VARIABLE = "RLJOB_SGLANG_PYTHON"
"""Names the interpreter; set in the image with SGLang."""
FOLDER = ".venv-sglang"
"""Beside the environment that this process runs in: what ``make setup-sglang`` makes."""
REMEDY = f"run make setup-sglang, take the image runtime-sglang, or set {VARIABLE} to a Python that has sglang"


def sglang_python() -> Path:
    """The interpreter of the server.

    Raises:
        SetupError: there is none here.
    """
    if named := os.environ.get(VARIABLE):
        if not os.access(named, os.X_OK):
            raise SetupError(f"{VARIABLE} is {named}, which is not a program here; {REMEDY}")
        return Path(named)
    found = Path(sys.prefix).parent / FOLDER / "bin" / "python"
    if not os.access(found, os.X_OK):
        raise SetupError(f"SGLang is not installed here: {VARIABLE} is not set and there is no {found}; {REMEDY}")
    return found
