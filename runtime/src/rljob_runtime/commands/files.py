"""Text files that people name: what is wrong with one in words, where a bare error of the system would name no remedy."""

from __future__ import annotations

from pathlib import Path

from rljob_runtime.errors import SetupError


def read_text(path: Path, remedy: str) -> str:
    """Text of a file.

    Raises:
        SetupError: it is missing, is no file or not text, or may not be read; ends with ``remedy``.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path}: {cause(error)}; {'save it as UTF-8' if isinstance(error, UnicodeDecodeError) else remedy}") from error


def cause(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start})"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "is a folder, a file is needed"
    return f"cannot be read ({error.strerror or error})"
