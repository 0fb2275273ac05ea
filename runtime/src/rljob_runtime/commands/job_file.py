"""Job files as commands read them: what is wrong with one is printed, and ends the command with exit code 2.

Imports the spec's code only when it is called, as :mod:`~rljob_runtime.commands.cli` does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from rljob_runtime.commands.files import cause, read_text
from rljob_runtime.errors import SetupError
from rljob_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from rljob_api.errors import SpecInvalidError
    from rljob_api.v1alpha1 import RLJobSpec
    from rljob_api.v1alpha1.components import ServedModel
    from rljob_api.v1alpha1.data import Model
    from rljob_api.validation import CheckedJob


def fail(message: str) -> NoReturn:
    """Print it to standard error and end the command."""
    typer.echo(message, err=True)
    raise typer.Exit(ExitCode.INVALID)


def write(path: Path, text: str) -> None:
    """Write a file and report it on standard error, which leaves standard output to the plan."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}; name a file in a folder that exists")
    typer.echo(f"wrote {path}", err=True)


def read(file: str, remedy: str = "give the path of a job file, for example examples/quickstart.yaml") -> str:
    """Text of the file or of standard input; a file that cannot be read ends the command, with the remedy."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig") if file == "-" else read_text(Path(file), remedy)
    except UnicodeDecodeError as error:
        fail(f"standard input {cause(error)}; save it as UTF-8")
    except SetupError as error:
        fail(str(error))


def checked(file: str, name: str | None, *, runnable: bool = True) -> CheckedJob:
    """The checked job of a file; ``name`` chooses among several."""
    return check_text(read(file), file, name, runnable=runnable)


def check_text(text: str, file: str, name: str | None, *, runnable: bool = True) -> CheckedJob:
    """The checked job; problems are printed and end the command."""
    from rljob_api.errors import SpecInvalidError
    from rljob_api.validation import check
    from rljob_runtime.job.model_shape import read_config, read_shape

    try:
        return check(text, name=name, runnable=runnable, shape_of=read_shape, config_of=read_config)
    except SpecInvalidError as error:
        fail(problems(file, error))


def absent_models(spec: RLJobSpec) -> list[str]:
    """Models of a job, each once, that this machine does not know and no check has looked at."""
    from rljob_runtime.job.model_shape import read_config

    models: list[Model | ServedModel] = [spec.model, *(component.model for component in spec.components if component.model is not None)]
    return list(dict.fromkeys(model.path for model in models if read_config(model) is None))


def single(file: str, name: str | None) -> str:
    """The text of the one job to run, chosen by name among several."""
    text = read(file)
    if name is None:
        return text
    from rljob_api.errors import SpecInvalidError
    from rljob_api.reading import manifest

    try:
        return manifest.select_text(text, name)
    except SpecInvalidError as error:
        fail(problems(file, error))


def problems(file: str, error: SpecInvalidError) -> str:
    """All that is wrong, a line each."""
    where = "standard input" if file == "-" else file
    count = len(error.errors)
    lines = [f"{where} is not valid, {count} problem{'' if count == 1 else 's'}:"]
    lines += [f"  {f'line {problem.line}: ' if problem.line and problem.path else ''}{problem}" for problem in error.errors]
    return "\n".join([*lines, *([error.unchecked] if error.unchecked else [])])
