"""The command of the recipe: listed, described, run, and its exit codes."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from rljob_runtime.commands.cli import app
from tests.unit.api.manifests import manifest


def rljob(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


Path("job.json").write_text(json.dumps(manifest()))
assert "Say hello to a job." in rljob("--help").output
assert "Exit codes: 0 done, 2 invalid." in rljob("greet", "--help").output
ran = rljob("greet", "job.json")
assert (ran.exit_code, ran.output) == (0, "hello case, 3 components\n"), ran
Path("job.json").write_text(json.dumps(manifest() | {"kind": "Job"}))
assert rljob("greet", "job.json").exit_code == 2
