"""ROLL and RLinf configurations to RLJob manifests, with an account of everything that could not be taken over.

::

    text -> source.read -> Source ── roll.convert / rlinf.convert ─> manifest
                             └── keys.note_leftovers ──────────────> notes about all that was not read

Every leaf of the file is in the manifest or in a note (CONVERT-COMPLETE). The manifest has the shape of a job, but a file can ask
for what a job cannot be: :func:`problems` says what is left to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.generate import to_yaml
from rljob_api.validation import check
from rljob_convert import kinds_of_file
from rljob_convert.notes import Note, NoteKind
from rljob_convert.notes import lines as note_lines
from rljob_convert.rlinf import manifest as rlinf
from rljob_convert.roll import manifest as roll
from rljob_convert.source import read

FRAMEWORKS = ("roll", "rlinf")
NAMES = {"roll": "ROLL", "rlinf": "RLinf"}
DEFAULT_DEVICES_PER_NODE = 8
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""What YAML does not allow, not even in a comment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A manifest and what has to be known about it."""

    framework: str
    """``roll`` or ``rlinf``."""
    manifest: Mapping[str, Any]
    """The RLJob as plain data, keys in reading order."""
    notes: tuple[Note, ...]
    """By kind, each in the order of the file."""


def convert(
    source: str,
    text: str,
    *,
    name: str | None = None,
    devices_per_node: int | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Converted:
    """Make a manifest of another framework's configuration.

    Args:
        source: the framework, one of :data:`FRAMEWORKS`.
        text: its configuration as YAML; OmegaConf references are followed.
        name: of the job; the experiment's name in the file when not given.
        devices_per_node: accelerators of a node, which RLinf's files do not say; 8 when not given. ROLL's files say it, and win.
        folder: where the file lies, so that the files of Hydra's defaults lists are found; None for a text alone, which must not have any.
        environment: variables that ``${oc.env:..}`` asks for; those of this process when None.

    Raises:
        SpecInvalidError: the text is not a configuration at all: not YAML, too large, not a map; it describes no RL job; or it needs a file
            or an environment variable that is not there.
        ValueError: ``source`` is no framework.
    """
    if source not in FRAMEWORKS:
        raise ValueError(f"{source} is not one of {', '.join(FRAMEWORKS)}")
    config = read(text, NAMES[source], folder=folder, environment=os.environ if environment is None else environment)
    kinds_of_file.refuse_what_is_no_job(config, source)
    if source == "roll":
        manifest = roll.convert(config, name)
    else:
        manifest = rlinf.convert(config, name, devices_per_node)
    kinds = list(NoteKind)
    notes = sorted(config.notes, key=lambda note: (kinds.index(note.kind), note.line is None, note.line or 0))
    return Converted(framework=source, manifest=manifest, notes=tuple(notes))


def problems(converted: Converted) -> tuple[FieldError, ...]:
    """What stands between the manifest and a run, as ``rljob validate`` says it: empty for a job that runs as it is."""
    error = refusal(converted)
    return () if error is None else error.errors


def refusal(converted: Converted) -> SpecInvalidError | None:
    """How the manifest is refused; None for a job that runs as it is."""
    try:
        check(converted.manifest)
    except SpecInvalidError as error:
        return error
    return None


def report(converted: Converted) -> str:
    """The notes for people, under a heading per kind; ends with a newline."""
    lines: list[str] = []
    for kind, meaning in _MEANINGS.items():
        notes = [note for note in converted.notes if note.kind is kind]
        if notes:
            lines.append(f"{kind.value} ({len(notes)}): {meaning}")
            lines += [f"  {line}" for line in note_lines(notes)]
    if not lines:
        lines = ["Everything in the file became a field of the manifest."]
    return "\n".join(lines) + "\n"


def render(converted: Converted) -> str:
    """The manifest as YAML, with the report as a comment on top."""
    head = f"Converted from {NAMES[converted.framework]}. Read the notes below, then remove them.\n{report(converted)}"
    # Line breaks of every kind end a comment; a value that holds one must not become YAML.
    comment = "\n".join(f"# {_UNPRINTABLE.sub('?', line)}".rstrip() for line in head.splitlines())
    return f"{comment}\n{to_yaml(converted.manifest)}"


_MEANINGS = {
    NoteKind.UNKNOWN: "not understood, without effect",
    NoteKind.DROPPED: "not in the manifest",
    NoteKind.DIFFERENT: "in the manifest with another meaning",
    NoteKind.ASSUMED: "not in the file",
}
