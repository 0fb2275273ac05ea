"""Tests with SGLang run where it is installed; CI installs it."""

import os

import pytest

from rljob_runtime.engine.sglang import interpreter
from rljob_runtime.errors import SetupError


def require_sglang() -> None:
    """Skip the test, or the module that calls this, where no interpreter has SGLang.

    Raises:
        SetupError: in CI.
    """
    try:
        interpreter.sglang_python()
    except SetupError:
        if os.environ.get("CI"):
            raise
        pytest.skip("SGLang is not installed: make setup-sglang", allow_module_level=True)
