"""Policy losses: for each variant its own settings and what it reads of a batch.

This file is all that the API knows of a loss. ``spec.algorithm.policyLoss`` is one flat section with the settings of all variants;
:class:`PolicyLoss` puts it together from their classes, and which setting is refused under which variant follows from them. The
formulas are in ``rljob_runtime.losses.variants``, by the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field

from rljob_api.v1alpha1.base import FreeForm, FunctionPath, NonNegative, SpecModel
from rljob_api.vocabulary import Aggregation


class PolicyLossVariant(StrEnum):
    """The policy-gradient loss."""

    PPO = "PPO"
    """Clipped ratio of the new to the old policy."""
    VANILLA = "Vanilla"
    """Log-prob times advantage, without a ratio."""
    TIS = "TIS"
    """Log-prob weighted by the ratio, truncated to [1 - clipLow, 1 + clipHigh]."""
    TOPR = "TOPR"
    """Good responses without a ratio, bad ones weighted by the ratio truncated to [0, 1]."""
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


class LossSettings(SpecModel):
    """Settings of one variant."""

    needs: ClassVar[frozenset[LossInput]] = frozenset({LossInput.OLD_LOGPROBS})
    """What batches must hold for it."""
    weighs_by_ratio: ClassVar[bool] = True
    """Whether a token's loss is multiplied by its ratio, so that a correction weight of the same ratio would count twice."""


class _RatioBounds(LossSettings):
    """Bounds of the ratio around 1."""

    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """PPO, GSPO, TIS, CISPO: the ratio is clipped at 1 - clipLow from below."""
    clip_high: Annotated[float, Field(ge=0.0, le=100.0)] = 0.2
    """PPO, GSPO, TIS, CISPO: the ratio is clipped at 1 + clipHigh from above."""


class _DualClip(_RatioBounds):
    """The same, and a bound of the loss at negative advantages."""

    dual_clip: Annotated[float, Field(gt=1.0, le=1000.0)] | None = None
    """PPO, GSPO: upper bound of the ratio for negative advantages; not set switches it off."""


class PPOLoss(_DualClip):
    """Settings of PPO."""


class GSPOLoss(_DualClip):
    """Settings of GSPO."""


class VanillaLoss(LossSettings):
    """Settings of Vanilla: none."""

    needs = frozenset()
    weighs_by_ratio = False


class TISLoss(_RatioBounds):
    """Settings of TIS."""


class CISPOLoss(_RatioBounds):
    """Settings of CISPO."""

    mask_clipped: bool = False
    """CISPO: tokens whose ratio PPO would clip give no gradient (the unified mask)."""


class TOPRLoss(LossSettings):
    """Settings of TOPR."""

    needs = frozenset({LossInput.OLD_LOGPROBS, LossInput.SCORES})

    positive_weight: NonNegative = 1.0
    """TOPR: weight of responses with a score above 0."""
    negative_weight: NonNegative = 1.0
    """TOPR: weight of the others."""


class Kimi15Loss(LossSettings):
    """Settings of Kimi15."""

    weighs_by_ratio = False

    tau: NonNegative = 0.1
    """Kimi15: weight of the squared log ratio."""


class CustomLoss(LossSettings):
    """A function of the user's own; what it does with a ratio is not known here, so nothing is refused because of it."""

    needs = frozenset({LossInput.OLD_LOGPROBS, LossInput.SCORES})
    weighs_by_ratio = False

    function: FunctionPath | None = None
    """Custom: the loss as module:function, looked for beside the job file and on the Python path of the trainer's workers."""
    parameters: FreeForm = Field(default={})
    """Custom: further keyword arguments of the function."""


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


class _AnyLoss(SpecModel):
    """What every loss reads."""

    variant: PolicyLossVariant = PolicyLossVariant.PPO
    """Which loss."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""


class PolicyLoss(CustomLoss, Kimi15Loss, TOPRLoss, CISPOLoss, TISLoss, GSPOLoss, PPOLoss, VanillaLoss, _AnyLoss):
    """From advantages to the loss."""

    @property
    def settings(self) -> LossSettings:
        """Those of the chosen variant; ask them, not this section, what the loss needs."""
        kind = LOSS_SETTINGS[self.variant]
        return kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields})


def readers(field: str) -> tuple[PolicyLossVariant, ...]:
    """Variants that read a field of policyLoss, by its name in the manifest; none for fields that every loss reads."""
    return tuple(v for v, kind in LOSS_SETTINGS.items() if field in {info.alias for info in kind.model_fields.values()})
