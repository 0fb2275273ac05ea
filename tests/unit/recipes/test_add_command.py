"""Recipe: a command of ``rljob`` is a function with a docstring, in a module of ``commands/``, registered in ``commands/cli.py``."""

import typer
from typer.testing import CliRunner

from rljob_runtime.commands.cli import JobFile, app


def greet(file: JobFile) -> None:
    """Say hello to a job.

    Exit codes: 0 done, 2 no such file.
    """
    typer.echo(f"hello {file}")


def test_a_command_is_registered_listed_and_run() -> None:
    commands = list(app.registered_commands)
    app.command()(greet)
    try:
        listed = CliRunner().invoke(app, ["--help"]).output
        helped = CliRunner().invoke(app, ["greet", "--help"]).output
        ran = CliRunner().invoke(app, ["greet", "job.yaml"])
    finally:
        app.registered_commands[:] = commands
    assert "greet" in listed
    assert "Say hello to a job." in listed
    assert "Exit codes: 0 done, 2 no such file." in helped
    assert (ran.exit_code, ran.output) == (0, "hello job.yaml\n")
