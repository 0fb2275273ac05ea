"""What the learning rule needs of the spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.vocabulary import AdvantageEstimator, EpisodeCount, KLEstimator, KLPlacement, NormScope


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConfig:
    """From scores to advantages; see the fields of ``spec.algorithm`` of the same meaning."""

    max_response_tokens: int
    estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    function: str | None = None
    """Custom only: the estimator as ``module:function``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Custom only: further keyword arguments of it."""
    job_folder: str | None = None
    """Where its module is looked for before the Python path."""
    normalize_std: bool = True
    """GRPO and GiGPO only."""
    gamma: float = 1.0
    episode_weight: float = 1.0
    """GiGPO only, as the next two."""
    turn_weight: float = 1.0
    episode_count: EpisodeCount = EpisodeCount.ONCE
    lambda_: float = 0.95
    whiten: bool = False
    advantage_clip: float | None = None
    reward_center: NormScope | None = None
    reward_scale: NormScope | None = None
    reward_clip: float | None = None
    overlong_buffer_tokens: int | None = None
    """None: no penalty."""
    overlong_penalty: float = 1.0
    kl_coefficient: float = 0.0
    """At the first step."""
    kl_estimator: KLEstimator = KLEstimator.K3
    kl_placement: KLPlacement = KLPlacement.LOSS
    kl_target: float | None = None
    """Nats per token; None keeps the coefficient."""
    kl_horizon: int = 10_000
    distillation_coefficient: float = 0.0
    """Weight of the KL to the teacher; 0 without one."""
    teacher_weights: Mapping[str, float] = field(default_factory=dict)
    """Factor of it by tag of the prompt, in rewards."""
    other_teacher_weight: float = 1.0
    """Factor for all other prompts."""
    distillation_placement: KLPlacement = KLPlacement.REWARD
    drop_truncated: bool = False
    min_group_mean: float | None = None
    max_group_mean: float | None = None
    max_failed_tokens: int | None = None
    weight_by_difficulty: bool = False
    weight_by_length: bool = False

    @property
    def measures_kl(self) -> bool:
        """Whether the rule itself looks at the distance to the reference."""
        return self.kl_coefficient > 0 and (self.kl_placement is KLPlacement.REWARD or self.kl_target is not None)

    @property
    def by_turn(self) -> bool:
        """Whether the turns of an episode have advantages of their own."""
        return self.estimator in {AdvantageEstimator.GIGPO, AdvantageEstimator.STEP_REINFORCE}

    @property
    def shapes_rewards(self) -> bool:
        """Whether scores become other numbers before advantages are computed."""
        options = (self.reward_center, self.reward_scale, self.reward_clip, self.overlong_buffer_tokens)
        return any(option is not None for option in options)

    @property
    def filters(self) -> bool:
        """Whether samples may be left out."""
        options = (self.min_group_mean, self.max_group_mean, self.max_failed_tokens)
        return self.drop_truncated or any(option is not None for option in options)
