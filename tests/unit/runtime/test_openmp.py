"""Threads of torch spin only briefly, unless the user says otherwise: in the command's process and in workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_runtime.openmp import SHORT_SPIN, SPIN_VARIABLE

COMMAND = """
import sys
from rljob_runtime.commands import cli
sys.argv = ["rljob", "--version"]
try:
    cli.main()
except SystemExit:
    pass
"""
WORKER = """
import sys
from rljob_runtime.cluster.host import WorkerHost
WorkerHost("w-0", "collections:namedtuple", {}, {"A": "1"}, sys.argv[1])
"""
SHOWN = f"import os; open(sys.argv[-1] + '.spin', 'w').write(os.environ[{SPIN_VARIABLE!r}])"


@pytest.mark.parametrize("code", [COMMAND, WORKER], ids=["command", "worker"])
@pytest.mark.parametrize(("given", "expected"), [({}, SHORT_SPIN), ({SPIN_VARIABLE: "7"}, "7")])
def test_it_is_set_unless_the_environment_has_it(tmp_path: Path, code: str, given: dict[str, str], expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != SPIN_VARIABLE} | given
    shown = SHOWN.replace("sys.argv[-1]", repr(str(tmp_path / "log")))
    subprocess.run([sys.executable, "-c", code + shown, str(tmp_path / "log")], env=env, capture_output=True, check=True)
    assert (tmp_path / "log.spin").read_text() == expected
