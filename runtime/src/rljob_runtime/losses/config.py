"""Settings of the policy loss; imported by the driver, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.v1alpha1.policy_loss import CustomLoss, LossInput, LossSettings, PPOLoss
from rljob_api.vocabulary import Aggregation, CorrectionLevel, KLEstimator, ProximalPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionWeightConfig:
    """A detached factor on the policy loss: the ratio of the proximal to the behavior policy, truncated to [low, high]."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        """Refuse bounds between which no ratio lies.

        Raises:
            ValueError: naming both bounds.
        """
        _check_bounds("weight", self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionMaskConfig:
    """Tokens whose ratio of the proximal to the behavior policy lies outside of [low, high] give no policy gradient."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        """Refuse bounds between which no ratio lies.

        Raises:
            ValueError: naming both bounds.
        """
        _check_bounds("mask", self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What one policy update minimizes."""

    policy: LossSettings = field(default_factory=PPOLoss)
    """The variant, by the type of its settings; the formula is in :mod:`.variants`."""
    job_folder: str | None = None
    """Where the module of a Custom loss is looked for before the Python path."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    norm_tokens: int | None = None
    """SeqMeanTokenSumNorm: the constant length that token sums are divided by."""
    proximal: ProximalPolicy = ProximalPolicy.BEHAVIOR
    """The old policy of the variant's ratio."""
    weight: CorrectionWeightConfig | None = None
    masks: tuple[CorrectionMaskConfig, ...] = ()
    """A token must pass all."""
    kl_coefficient: float = 0.0
    """Weight of the KL term; 0 leaves it out, and no reference log-probs are needed. A batch may carry another one."""
    kl_estimator: KLEstimator = KLEstimator.K3
    distillation_coefficient: float = 0.0
    """Weight of the distance to a teacher; 0 leaves it out, and no log-probs of a teacher are needed."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; 0 leaves it out, and no entropy is computed."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        for name in ("kl_coefficient", "distillation_coefficient", "entropy_coefficient"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.norm_tokens is not None and self.norm_tokens < 1:
            raise ValueError(f"norm_tokens is {self.norm_tokens}; it must be at least 1")
        if self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM and self.norm_tokens is None:
            raise ValueError(f"aggregation {self.aggregation} with norm_tokens None; set norm_tokens to the longest response")
        if isinstance(self.policy, CustomLoss) and self.policy.function is None:
            raise ValueError("policy is CustomLoss with function None; name it as module:function")

    @property
    def needs_proximal(self) -> bool:
        """Whether batches must hold ``proximal_logprobs``."""
        return self.proximal is ProximalPolicy.RECOMPUTE

    @property
    def needs_staleness(self) -> bool:
        """Whether batches must hold ``staleness``."""
        return self.proximal is ProximalPolicy.INTERPOLATE

    @property
    def needs_scores(self) -> bool:
        """Whether batches must hold ``scores``."""
        return LossInput.SCORES in self.policy.needs

    @property
    def needs_reference(self) -> bool:
        """Whether batches must hold ``reference_logprobs``."""
        return self.kl_coefficient > 0.0 or LossInput.REFERENCE_LOGPROBS in self.policy.needs

    @property
    def needs_teacher(self) -> bool:
        """Whether batches must hold ``teacher_logprobs``."""
        return self.distillation_coefficient > 0.0

    @property
    def takes_reference(self) -> bool:
        """Whether the loss is given ``reference_logprobs`` that a batch holds."""
        return self.needs_reference or isinstance(self.policy, CustomLoss)


def _check_bounds(name: str, low: float, high: float) -> None:
    """Refuse bounds between which no ratio lies."""
    if not 0.0 <= low <= high:
        raise ValueError(f"{name} has low {low} and high {high}; 0 <= low <= high is needed because ratios are positive")
