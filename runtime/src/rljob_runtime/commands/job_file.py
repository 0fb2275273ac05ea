"""Job files as commands read them: what is wrong with one is printed, and ends the command with exit code 2.

Imports the spec's code only when it is called, as :mod:`~rljob_runtime.commands.cli` does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
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


def refused_tasks(spec: RLJobSpec) -> list[str]:
    """Tasks of data sources that the reasoning-gym of this machine does not have, with their paths.

    Its parameters are checked when the job starts: importing the package takes a second, its sources are searched in a hundredth of one.
    """
    sources = {f"spec.data.{split}[{i}]": one for split in ("train", "validation") for i, one in enumerate(getattr(spec.data, split))}
    wanted = {path: source.reasoning_gym for path, source in sources.items() if source.reasoning_gym is not None}
    unknown = _absent_from("reasoning_gym", [settings.task for settings in wanted.values()])
    if not unknown:
        return []
    from rljob_runtime.data.reasoning_gym_source import create_task
    from rljob_runtime.errors import DataError

    refused = []
    for path, settings in wanted.items():
        try:
            create_task(settings.task, settings.parameters, seed=0, size=settings.size)
        except DataError as error:
            refused.append(f"{path}.reasoningGym: {error}")
    return refused


def _absent_from(package: str, names: Sequence[str]) -> set[str]:
    """Which names no source file of an installed package contains as a string; none where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return set()
    absent = set(names)
    for source in Path(found.origin).parent.rglob("*.py") if absent else ():
        text = source.read_text(encoding="utf-8")
        absent = {name for name in absent if f'"{name}"' not in text}
    return absent


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
    found = [f"{f'line {problem.line}: ' if problem.line and problem.path else ''}{problem}" for problem in error.errors]
    return "\n".join([problem_lines(file, found), *([error.unchecked] if error.unchecked else [])])


def problem_lines(file: str, found: Sequence[str]) -> str:
    """How many problems a file has, and below each of them."""
    where = "standard input" if file == "-" else file
    return "\n".join([f"{where} is not valid, {len(found)} problem{'' if len(found) == 1 else 's'}:", *(f"  {one}" for one in found)])
