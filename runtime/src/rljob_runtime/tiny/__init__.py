"""Small Qwen2 models, trained on the spot: the quickstart's, which adds two-digit numbers with doubts, and one that crosses a frozen lake.

Importing this package is cheap; its functions import torch and transformers when called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rljob_runtime.tiny.settings import FROZEN_LAKE, QUICKSTART, TINY_FILE, TinySize, TinySummary, TinyTask

__all__ = ["FROZEN_LAKE", "QUICKSTART", "TINY_FILE", "TinySize", "TinySummary", "TinyTask", "make_lake_model", "make_tiny_model"]


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
    with a phase's name and the finished fraction. ``num_threads`` is by default 2, or fewer if OMP_NUM_THREADS is; the same arguments
    and threads give the same weights on one machine.
    Raises ModelError for a folder with something else in it, a task without whole-number answers, or a missed target;
    DataError for an unknown task or parameter.
    """
    from rljob_runtime.tiny.model import make

    return make(out_folder, task=task, size=size, seed=seed, target_pass=target_pass, progress=progress, num_threads=num_threads)


def make_lake_model(
    out_folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    num_threads: int | None = None,
) -> TinySummary:
    """Make a model that acts on FrozenLake in ``out_folder``, or return what is there when it was made with the same parameters.

    Sampling at temperature 1, it reaches the goal in 20 to 28 of 100 episodes. Arguments as those of :func:`make_tiny_model`.
    Raises ModelError for a folder with something else in it or a missed target.
    """
    from rljob_runtime.tiny.lake import make_lake

    return make_lake(out_folder, seed=seed, progress=progress, num_threads=num_threads)
