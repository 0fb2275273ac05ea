"""Shell completion of ``rljob`` and, by kubectl's protocol for plug-ins, of ``kubectl rlj``."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest

from tests.layout.tree import ROOT
from tests.support.pace import HANG_S

MAIN = "rljob_runtime.commands.cli:main"
SCRIPTS = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]["scripts"]


def call(entry_point: str, program: str, *words: str, **environment: str) -> str:
    """What an installed program prints."""
    module, _, function = entry_point.partition(":")
    code = f"import sys; from {module} import {function} as main; sys.argv[0] = {program!r}; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_for_a_shell_asks_rljob_for_completions() -> None:
    script = call(MAIN, "rljob", "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_RLJOB_COMPLETE=complete_bash" in script
    assert script.rstrip().endswith("rljob")


@pytest.mark.parametrize(("line", "expected"), [("rljob va", {"validate"}), ("rljob plan --ou", {"--output"})])
def test_bash_gets_commands_and_options(line: str, expected: set[str]) -> None:
    position = str(line.count(" "))
    assert set(call(MAIN, "rljob", _RLJOB_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=position).split()) == expected


def test_kubectl_finds_the_program_that_completes() -> None:
    assert "kubectl_complete-rlj" in SCRIPTS, "kubectl looks for kubectl_complete- and the plug-in's name"


@pytest.mark.parametrize(
    ("words", "expected", "directive"),
    [
        ([""], ["describe", "logs", "open", "top"], ":4"),
        (["des"], ["describe"], ":4"),
        (["logs", "math", "--wor"], ["--worker"], ":4"),
        (["open", "math", "--what", ""], ["dashboard", "metrics", "report", "tensorboard"], ":4"),
        (["describe", "it's a fold"], [], ":0"),
    ],
    ids=["commands", "command", "option", "value", "folder"],
)
def test_kubectl_gets_completions_and_then_a_directive(words: list[str], expected: list[str], directive: str) -> None:
    *completions, last = call(SCRIPTS["kubectl_complete-rlj"], "kubectl_complete-rlj", *words).splitlines()
    assert (sorted(line.partition("\t")[0] for line in completions), last) == (expected, directive)
