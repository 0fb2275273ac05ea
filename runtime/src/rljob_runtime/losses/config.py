"""Settings of the policy loss; imported by the driver, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.vocabulary import Aggregation, CorrectionLevel, KLEstimator, PolicyLossVariant, ProximalPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionWeightConfig:
    """A detached factor on the policy loss: the ratio of the proximal to the behaviour policy, cut to [low, high]."""

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
    """Tokens whose ratio of the proximal to the behaviour policy lies outside of [low, high] give no policy gradient."""

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
    """What one policy update minimises."""

    variant: PolicyLossVariant = PolicyLossVariant.PPO
    clip_low: float = 0.2
    """Lower clip distance: ratios below ``1 - clip_low`` give no gradient for negative advantages (TIS, CISPO: count as that)."""
    clip_high: float = 0.2
    """Upper clip distance; above ``clip_low`` it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """PPO, GSPO: bound on the loss at negative advantages, in units of \\|advantage\\|; above 1; None switches it off."""
    mask_clipped: bool = False
    """CISPO: the unified mask."""
    positive_weight: float = 1.0
    """TOPR: weight of responses with a score above 0."""
    negative_weight: float = 1.0
    """TOPR: weight of the others."""
    tau: float = 0.1
    """Kimi15: weight of the squared log-ratio."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    norm_tokens: int | None = None
    """SeqMeanTokenSumNorm: the constant length that token sums are divided by."""
    proximal: ProximalPolicy = ProximalPolicy.BEHAVIOUR
    """The old policy of the variant's ratio."""
    weight: CorrectionWeightConfig | None = None
    masks: tuple[CorrectionMaskConfig, ...] = ()
    """A token must pass all."""
    kl_coefficient: float = 0.0
    """Weight of the KL term; 0 leaves it out, and no reference log-probs are needed. A batch may carry another one."""
    kl_estimator: KLEstimator = KLEstimator.K3
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; 0 leaves it out, and no entropy is computed."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie in [0, 1] because ratios are positive")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1, or None to switch it off")
        for name in ("clip_high", "positive_weight", "negative_weight", "tau", "kl_coefficient", "entropy_coefficient"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.norm_tokens is not None and self.norm_tokens < 1:
            raise ValueError(f"norm_tokens is {self.norm_tokens}; it must be at least 1")
        if self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM and self.norm_tokens is None:
            raise ValueError(f"aggregation {self.aggregation} with norm_tokens None; set norm_tokens to the longest response")

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
        return self.variant is PolicyLossVariant.TOPR

    @property
    def needs_reference(self) -> bool:
        """Whether batches must hold ``reference_logprobs``."""
        return self.kl_coefficient > 0.0


def _check_bounds(name: str, low: float, high: float) -> None:
    """Refuse bounds between which no ratio lies."""
    if not 0.0 <= low <= high:
        raise ValueError(f"{name} has low {low} and high {high}; 0 <= low <= high is needed because ratios are positive")
