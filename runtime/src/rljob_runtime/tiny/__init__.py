"""The quickstart model: a small Qwen2 that adds two-digit numbers with doubts, trained on the spot.

Importing this package is cheap; ``make_tiny_model`` imports torch and transformers when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

TINY_FILE = "tiny.json"
"""Written last into a finished folder."""


class TinySize(StrEnum):
    """How large a model to make."""

    TINY = "tiny"
    """About 0.3 million parameters, with the warm start."""
    TEN_MILLION = "10m"
    """About 10 million parameters, random weights: for benchmarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """The reasoning-gym task a tiny model is made for; its answers must be whole numbers."""

    task: str
    params: Mapping[str, object] = field(default_factory=dict)


QUICKSTART = TinyTask(
    task="basic_arithmetic",
    params={
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 2,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
        "format_style": "simple",
    },
)
"""``Calculate 67 + 21.``: operands 0 to 100, seven to eleven tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySummary:
    """What was made, as stored in ``tiny.json``."""

    folder: Path
    reused: bool
    """The folder already held this very model."""
    fingerprint: str
    """Digest of all parameters and library versions."""
    task: str
    seed: int
    num_parameters: int
    vocab_size: int
    sampled_pass_rate: float
    """Share of measured prompts solved by one draw at temperature 1."""
    greedy_pass_rate: float
    """Share of measured prompts solved by the most likely answer."""
    num_measured: int
    rule_steps: int
    noise_steps: int
    elapsed_s: float
    """Wall time of making it."""


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
