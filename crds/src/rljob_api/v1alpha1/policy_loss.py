"""Policy losses: for each variant its own settings and what it reads of a batch.

This file is all that the API knows of a loss. ``spec.algorithm.policyLoss`` is one flat section, :class:`PolicyLoss`, with the settings of
all variants. Their defaults differ, so each variant has a class of its own with them; which setting is refused under which variant
follows from these classes. The formulas are in ``rljob_runtime.losses.variants``, by the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from rljob_api.v1alpha1.base import FreeForm, FunctionPath, NonNegative, SpecModel
from rljob_api.vocabulary import Aggregation


class PolicyLossVariant(StrEnum):
    """The policy-gradient loss."""

    PPO = "PPO"
    """Clipped ratio of the new to the old policy."""
    VANILLA = "Vanilla"
    """Log-prob times advantage, without a ratio."""
    TIS = "TIS"
    """Log-prob weighted by the truncated ratio, which carries no gradient."""
    TOPR = "TOPR"
    """Responses with a score above 0 without a ratio, the others weighted by the ratio truncated to [0, 1]."""
    CISPO = "CISPO"
    """Log-prob weighted by the clipped ratio, which carries no gradient."""
    KIMI15 = "Kimi15"
    """Log-prob times advantage, and a squared penalty on the log ratio."""
    GSPO = "GSPO"
    """Clipped ratio of whole sequences."""
    CUSTOM = "Custom"
    """The user's own function."""


class LossInput(StrEnum):
    """What a loss may read besides the policy's log-probs and the advantages."""

    OLD_LOGPROBS = "old log-probs"
    """Log-probs of the proximal policy: the loss has a ratio."""
    SCORES = "scores"
    """Raw score of each response."""
    REFERENCE_LOGPROBS = "reference log-probs"
    """Log-probs of the frozen reference, which then needs a component."""


ClipLow = Annotated[float, Field(ge=0.0, le=1.0)]
"""How far below 1 a ratio may be."""
ClipHigh = Annotated[float, Field(ge=0.0, le=100.0)]
"""How far above 1 a ratio may be."""
DualClip = Annotated[float, Field(ge=0.0, le=1000.0)]
"""A bound of the ratio; 0: none."""


class LossSettings(SpecModel):
    """Settings of one variant."""

    needs: ClassVar[frozenset[LossInput]] = frozenset({LossInput.OLD_LOGPROBS})
    """What batches must hold for it."""
    weighs_by_ratio: ClassVar[bool] = True
    """Whether a token's loss is multiplied by its ratio, so that a correction weight of the same ratio would count twice."""


class PPOLoss(LossSettings):
    """Settings of PPO: 0.2 on both sides (arXiv 1707.06347), dual clip 3 (arXiv 1912.09729, verl's clip_ratio_c)."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = 3.0


class GSPOLoss(LossSettings):
    """Settings of GSPO: the distances of arXiv 2507.18071, section 5.1; the dual clip is not the paper's, see docs/defaults.md."""

    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    dual_clip: DualClip = 3.0


class VanillaLoss(LossSettings):
    """Settings of Vanilla: none."""

    needs = frozenset()
    weighs_by_ratio = False


class TISLoss(LossSettings):
    """Settings of TIS: weights in [0, 2]; Ionides 2008 truncates from above only; 2 is the bound of verl's rollout correction."""

    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 1.0


class CISPOLoss(LossSettings):
    """Settings of CISPO: no lower bound (MiniMax-M1, arXiv 2506.13585, section 3.1), weights up to 5 (ScaleRL, arXiv 2510.13786)."""

    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0
    mask_clipped: bool = False


class TOPRLoss(LossSettings):
    """Settings of TOPR: the canonical form of arXiv 2503.14286, both kinds of responses weigh the same."""

    needs = frozenset({LossInput.OLD_LOGPROBS, LossInput.SCORES})

    positive_weight: NonNegative = 1.0
    negative_weight: NonNegative = 1.0


class Kimi15Loss(LossSettings):
    """Settings of Kimi15: arXiv 2501.12599 does not publish its tau."""

    weighs_by_ratio = False

    tau: NonNegative = 0.1


class CustomLoss(LossSettings):
    """A function of the user's own; what it does with a ratio is not known here, so nothing is refused because of it."""

    needs = frozenset({LossInput.OLD_LOGPROBS, LossInput.SCORES})
    weighs_by_ratio = False

    function: FunctionPath | None = None
    parameters: FreeForm = Field(default={})


LOSS_SETTINGS: Mapping[PolicyLossVariant, type[LossSettings]] = MappingProxyType(
    {
        PolicyLossVariant.PPO: PPOLoss,
        PolicyLossVariant.GSPO: GSPOLoss,
        PolicyLossVariant.VANILLA: VanillaLoss,
        PolicyLossVariant.TIS: TISLoss,
        PolicyLossVariant.CISPO: CISPOLoss,
        PolicyLossVariant.TOPR: TOPRLoss,
        PolicyLossVariant.KIMI15: Kimi15Loss,
        PolicyLossVariant.CUSTOM: CustomLoss,
    }
)
"""Every variant's settings."""


class PolicyLoss(SpecModel):
    """From advantages to the loss.

    A field that is not set takes the default of the chosen variant; fields of other variants stay unset.
    """

    variant: PolicyLossVariant = PolicyLossVariant.PPO
    """Loss variant."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""
    clip_low: ClipLow | None = None
    """PPO, GSPO, TIS, CISPO: the ratio is clipped at 1 - clipLow from below. When not set PPO 0.2, GSPO 0.0003, TIS 1, CISPO 1."""
    clip_high: ClipHigh | None = None
    """PPO, GSPO, TIS, CISPO: the ratio is clipped at 1 + clipHigh from above. When not set PPO 0.2, GSPO 0.0004, TIS 1, CISPO 4."""
    dual_clip: DualClip | None = None
    """PPO, GSPO: upper bound of the ratio for negative advantages, above 1; 0 disables it. When not set PPO 3, GSPO 3."""
    mask_clipped: bool | None = None
    """CISPO: tokens whose ratio PPO would clip have no gradient (the unified mask). When not set CISPO false."""
    positive_weight: NonNegative | None = None
    """TOPR: weight of responses with a score above 0. When not set TOPR 1."""
    negative_weight: NonNegative | None = None
    """TOPR: weight of the others. When not set TOPR 1."""
    tau: NonNegative | None = None
    """Kimi15: weight of the squared log ratio. When not set Kimi15 0.1."""
    function: FunctionPath | None = None
    """Custom: the loss as module:function, found next to the job file or on the Python path of the trainer's workers."""
    parameters: FreeForm = Field(default={})
    """Custom: keyword arguments of the function."""

    @model_validator(mode="after")
    def _defaults_of_the_variant(self) -> PolicyLoss:
        for name, value in LOSS_SETTINGS[self.variant]().model_dump().items():
            if getattr(self, name) is None:
                self.__dict__[name] = value  # the model is frozen, and what the user set stays known by model_fields_set
        return self

    @property
    def settings(self) -> LossSettings:
        """Those of the chosen variant; ask them, not this section, what the loss needs."""
        kind = LOSS_SETTINGS[self.variant]
        return kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields})

    def foreign(self) -> Mapping[str, object]:
        """Fields that were set although the chosen variant does not read them, by their name in the manifest."""
        given = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return {key: value for key, value in given.items() if (reading := readers(key)) and self.variant not in reading}


def readers(field: str) -> tuple[PolicyLossVariant, ...]:
    """Variants that read a field of policyLoss, by its name in the manifest; none for fields that every loss reads."""
    return tuple(v for v, kind in LOSS_SETTINGS.items() if field in {info.alias for info in kind.model_fields.values()})
