"""The files of this repository as the gates see them: tracked or about to be, never ignored ones."""

from __future__ import annotations

import functools
import subprocess
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = {"crds": "rljob_api", "crds/convert": "rljob_convert", "operator": "rljob_operator", "runtime": "rljob_runtime"}


@functools.cache
def repository_files() -> tuple[Path, ...]:
    """Every file git would hand in, sorted.

    Raises:
        AssertionError: nothing was found, so that no gate passes by looking at nothing.
    """
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    files = tuple(sorted(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()))
    assert len(files) > 20, f"only {len(files)} files found under {ROOT}"
    return files


def python_files() -> tuple[Path, ...]:
    """Every Python file of the repository, tests included."""
    return tuple(path for path in repository_files() if path.suffix == ".py")


def member_files() -> tuple[Path, ...]:
    """The Python files of the distributions."""
    return tuple(path for path in python_files() if path.relative_to(ROOT).parts[0] in {folder.partition("/")[0] for folder in MEMBERS})


def text_of(path: Path) -> str | None:
    """The file's text, or None for a binary file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def too_long(sizes: dict[str, int], soft: int, hard: int) -> dict[str, int]:
    """What is over the hard ceiling and has to be split by subject; warns of what is over the soft one."""
    over = {where: lines for where, lines in sizes.items() if lines > soft}
    for where, lines in over.items():
        warnings.warn(f"{where}: {lines} lines (soft ceiling {soft})", stacklevel=2)
    return {where: lines for where, lines in over.items() if lines > hard}
