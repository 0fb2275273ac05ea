"""``rljob convert``: the manifest to standard output or a file, the notes to standard error."""

from __future__ import annotations

from pathlib import Path

import typer

from rljob_convert import conversion
from rljob_convert.notes import NoteKind

MAX_PROBLEMS = 40
LOST = (NoteKind.UNKNOWN, NoteKind.DROPPED)


def convert_file(
    text: str,
    source: str,
    *,
    folder: Path | None,
    out: Path | None,
    name: str | None,
    devices_per_node: int | None,
    strict: bool,
) -> bool:
    """Convert, print manifest and report; with ``strict`` nothing is written when something was lost.

    Args:
        text: the configuration.
        source: the framework, ``roll`` or ``rlinf``.
        folder: where the file lies, for the files that it takes in; None of standard input.
        out: where the manifest goes, with the notes as a comment; standard output when None.
        name: of the job.
        devices_per_node: accelerators of a node where the configuration does not contain it.
        strict: refuse when something was dropped or not understood.

    Returns:
        Whether the manifest was written.

    Raises:
        rljob_api.errors.SpecInvalidError: the text is no configuration of an RL job, or needs a file or variable that is not there.
        OSError: ``out`` cannot be written.
    """
    converted = conversion.convert(source, text, name=name, devices_per_node=devices_per_node, folder=folder)
    typer.echo(conversion.report(converted), nl=False, err=True)
    lost = sum(note.kind in LOST for note in converted.notes)
    if strict and lost:
        typer.echo(f"--strict: {lost} part{'s are' if lost != 1 else ' is'} lost, nothing was written", err=True)
        return False
    rendered = conversion.render(converted)
    if out is None:
        typer.echo(rendered, nl=False)
    else:
        out.write_text(rendered, encoding="utf-8")
        typer.echo(f"wrote {out}", err=True)
    _print_problems(converted)
    return True


def _print_problems(converted: conversion.Converted) -> None:
    """What is left to do, on standard error."""
    refusal = conversion.refusal(converted)
    if refusal is None:
        typer.echo("The manifest is valid: rljob plan shows where everything runs.", err=True)
        return
    problems = refusal.errors
    typer.echo(f"Left to do before rljob run ({len(problems)}):", err=True)
    for problem in problems[:MAX_PROBLEMS]:
        typer.echo(f"  {problem}", err=True)
    if len(problems) > MAX_PROBLEMS:
        typer.echo(f"  and {len(problems) - MAX_PROBLEMS} more, see rljob validate", err=True)
    if refusal.unchecked:
        typer.echo(refusal.unchecked, err=True)
