"""What is compared: a variant, as RLJob's settings and as those of each peer that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.fidelity.batches import SHARED
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.overlap.rule_config import RuleConfig

PEERS = ("trl", "verl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One variant, run on several batches by RLJob and by its peers."""

    name: str
    rule: RuleConfig | None = None
    """From scores to advantages; None: they are given."""
    trl_epsilon: float | None = None
    """Group advantages by themselves, with this number added to the standard deviation."""
    loss: LossConfig | None = None
    value: ValueLossConfig | None = None
    head_temperature: float | None = None
    """Log-probs and entropies of logits divided by this."""
    given: Literal["token", "sequence"] = "token"
    """Whether given advantages differ within a response."""
    verl: Mapping[str, Any] | None = None
    """Settings as in :mod:`.verl_peer`; None: verl has no such variant, or the case is about TRL."""
    trl: Mapping[str, Any] | None = None
    """Settings as in :mod:`.trl_peer`; None likewise."""
    batches: tuple[str, ...] = SHARED
    only: tuple[str, ...] | None = None
    """Results that are compared; None: all that both sides have."""
    why: str = ""
    """Why the sides differ; empty: they must agree."""
    peers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Note which peers have settings."""
        object.__setattr__(self, "peers", tuple(peer for peer in PEERS if getattr(self, peer) is not None))
