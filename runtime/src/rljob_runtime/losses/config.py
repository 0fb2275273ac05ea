"""Settings of the policy loss; imported by the driver, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.vocabulary import Aggregation, KLEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What one policy update minimises."""

    clip_low: float = 0.2
    """Lower clip distance: ratios below ``1 - clip_low`` give no gradient for negative advantages."""
    clip_high: float = 0.2
    """Upper clip distance; above ``clip_low`` it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Bound on the loss at negative advantages, in units of \\|advantage\\|; above 1; None switches it off."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    kl_coefficient: float = 0.0
    """Weight of the KL term; 0 leaves it out, and no reference log-probs are needed."""
    kl_estimator: KLEstimator = KLEstimator.K3

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie in [0, 1] because ratios are positive")
        if self.clip_high < 0.0:
            raise ValueError(f"clip_high is {self.clip_high}; it must be at least 0")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1, or None to switch it off")
        if self.kl_coefficient < 0.0:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}; it must be at least 0")
