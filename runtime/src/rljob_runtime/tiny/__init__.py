"""The quickstart model: a small Qwen2 that adds two-digit numbers with doubts, trained on the spot.

Importing this package is cheap; ``make_tiny_model`` imports torch and transformers when called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rljob_runtime.tiny.settings import QUICKSTART, TINY_FILE, TinySize, TinySummary, TinyTask

__all__ = ["QUICKSTART", "TINY_FILE", "TinySize", "TinySummary", "TinyTask", "make_tiny_model"]


def make_tiny_model(
    out_folder: Path,
    *,
    task: TinyTask = QUICKSTART,
    size: TinySize = TinySize.TINY,
    seed: int = 0,
    target_pass: tuple[float, float] = (0.2, 0.4),
    progress: Callable[[str, float], None] | None = None,
    num_threads: int | None = None,
) -> TinySummary:
    """Make the model in ``out_folder``, or return what is there when it was made with the same parameters.

    ``target_pass`` bounds the share of prompts that sampling at temperature 1 solves afterwards; ``progress`` is called
    with a phase's name and the finished fraction. The same arguments give the same weights on one machine.
    Raises ModelError for a folder with something else in it, a task without whole-number answers, or a missed target;
    DataError for an unknown task or parameter.
    """
    from rljob_runtime.tiny.model import make

    return make(out_folder, task=task, size=size, seed=seed, target_pass=target_pass, progress=progress, num_threads=num_threads)
