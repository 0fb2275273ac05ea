"""Threads of torch spin only briefly, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from rljob_runtime.openmp import SHORT_SPIN

(NAME,) = SHORT_SPIN
SCRIPT = f"""
import os, sys
from rljob_runtime.commands import cli
sys.argv = ["rljob", "--version"]
try:
    cli.main()
except SystemExit:
    print(os.environ[{NAME!r}])
"""


@pytest.mark.parametrize(("given", "expected"), [({}, SHORT_SPIN[NAME]), ({NAME: "7"}, "7")])
def test_the_command_sets_it_for_itself_and_its_children(given: dict[str, str], expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != NAME} | given
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == expected
