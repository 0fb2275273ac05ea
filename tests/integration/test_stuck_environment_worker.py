"""A real environment worker that is stopped by a signal: ended and replaced in place, and its episode begins again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.stuck_worker_child import CALL_TIMEOUT_S, NAME
from tests.layout.tree import ROOT
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.pace import HANG_S


@pytest.mark.slow
def test_a_stopped_environment_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    chat_tokenizer("chatml").save_pretrained(tokenizer)
    command = [sys.executable, "-m", "tests.integration.stuck_worker_child", str(tmp_path), str(tokenizer)]
    child = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=4 * HANG_S
    )
    assert child.returncode == 0, child.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["lost"], found["same"], found["processes"], found["alive"]) == ("e", True, 2, 0), found
    assert f"{NAME} is stuck: no answer to " in found["lines"][0]
    assert f" within {CALL_TIMEOUT_S:.0f} s" in found["lines"][0]
    assert f"{NAME} was replaced within" in found["lines"][1]
    assert found["metrics"]["environment/replaced"] == 1.0
