"""Settings of a critic; imported by the driver, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.training.config import PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(PolicyConfig):
    """Everything one critic worker needs to know; equal on all ranks.

    Model, optimizer, micro-batches and offload as for a policy, with the critic's own settings where the spec has some. ``loss`` and
    ``logprob_chunk_tokens`` have no effect: a critic has neither a policy loss nor logits.
    """

    value: ValueLossConfig = field(default_factory=ValueLossConfig)

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        PolicyConfig.__post_init__(self)  # not super(): slots make a second class, which super() without arguments does not find
        if not self.trainable:
            raise ValueError("trainable is False; a critic has to be trained, leave it True")
