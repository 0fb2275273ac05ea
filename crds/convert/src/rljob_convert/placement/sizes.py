"""How many units one copy of every model needs: what RLinf reads from a run's configuration besides its placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from rljob_api.errors import PlacementError

MAX_SIZE = 1_000_000
"""Units along one axis of parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Parallelism of one further engine of a job with several agents; None where its section does not say."""

    tp: int | None = None
    """Units of tensor parallelism."""
    pp: int | None = None
    """Stages of pipeline parallelism."""
    dp: int | None = None
    """Engines."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            PlacementError: one is below 1 or absurdly large (M4).
        """
        _check_sizes({each.name: getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelSizes:
    """Sizes are units along one axis: tensor (tp), context (cp) and pipeline (pp) parallelism. Defaults are RLinf's."""

    actor_tp: int = 1
    actor_cp: int = 1
    actor_pp: int = 1
    rollout_tp: int = 1
    rollout_pp: int = 1
    inference_tp: int | None = None
    """Log-probability workers; None means as the actor."""
    inference_pp: int | None = None
    """None means as the actor."""
    critic_tp: int = 1
    critic_cp: int = 1
    critic_pp: int = 1
    critic_inference_tp: int | None = None
    """None means as the critic."""
    critic_inference_pp: int | None = None
    """None means as the critic."""
    auto_scheduler: bool = False
    """Units move between components while the job runs: mode AUTO."""
    use_pre_process_policy: bool = False
    """In mode AUTO, engines run on the actor's units too, before training starts."""
    recompute_logprobs: bool = True
    """Whether log-probabilities are computed again before training, which is what inference workers are for."""
    engines: Mapping[str, EngineSizes] = field(default_factory=lambda: MappingProxyType({}))
    """Further engines by component name (several agents)."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            PlacementError: one is below 1 or absurdly large (M4).
        """
        _check_sizes({each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith(("_tp", "_cp", "_pp"))})

    @property
    def actor_model(self) -> int:
        """Units of one copy of the actor."""
        return self.actor_tp * self.actor_cp * self.actor_pp

    @property
    def rollout_engine(self) -> int:
        """Units of one engine."""
        return self.rollout_tp * self.rollout_pp

    @property
    def inference_size(self) -> tuple[int, int]:
        """Tensor and pipeline parallelism of the inference workers."""
        return (
            self.actor_tp if self.inference_tp is None else self.inference_tp,
            self.actor_pp if self.inference_pp is None else self.inference_pp,
        )

    @property
    def critic_inference_size(self) -> tuple[int, int]:
        """Tensor and pipeline parallelism of the critic's inference workers."""
        return (
            self.critic_tp if self.critic_inference_tp is None else self.critic_inference_tp,
            self.critic_pp if self.critic_inference_pp is None else self.critic_inference_pp,
        )


def _check_sizes(sizes: Mapping[str, int | None]) -> None:
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= MAX_SIZE:
            raise PlacementError("M4", f"{name} is {size if abs(size) <= MAX_SIZE else 'out of range'}", f"use a size from 1 to {MAX_SIZE}")
