"""Describe in one line what foreign code raised, for the processes that run it."""

from __future__ import annotations

import os
import traceback

MAX_CHARACTERS = 300


def one_line(error: BaseException, own_folder: str) -> str:
    """Return type, text and the innermost place outside ``own_folder`` (the program that called the code), in at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own_folder)]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[: MAX_CHARACTERS - len(place)] + place
