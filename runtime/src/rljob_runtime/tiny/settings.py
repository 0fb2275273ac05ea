"""What a tiny model is made for, how large, and what came of it; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

TINY_FILE = "tiny.json"
"""Written last into a finished folder."""


class TinySize(StrEnum):
    """How large a model to make."""

    TINY = "tiny"
    """About 0.3 million parameters, with the warm start."""
    FRESH = "fresh"
    """The same with random weights."""
    MIXTURE = "mixture"
    """About 0.5 million parameters in a mixture of four experts, two for a token, with the warm start."""
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


FROZEN_LAKE = "frozen-lake"
"""The task of the model that acts: 4x4 FrozenLake as text, over several turns."""


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
    """Share of measured prompts, or played episodes, solved by sampling at temperature 1."""
    greedy_pass_rate: float
    """Share of them solved by the most likely answer or actions."""
    num_measured: int
    rule_steps: int
    noise_steps: int
    elapsed_s: float
    """Wall time of making it."""
