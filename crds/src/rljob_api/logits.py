"""What models do to logits after the head, which trainer and engines have to compute alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MULTIPLIERS = {"cohere": "logit_scale", "cohere2": "logit_scale", "falcon_h1": "lm_head_multiplier", "hyperclovax": "logits_scaling"}
"""``model_type`` -> config key of the number that logits are multiplied by."""
DIVISORS = {"granite": "logits_scaling", "minicpm3": "logits_scaling"}
"""``model_type`` -> config key of the number that logits are divided by."""
CAPPED = ("gemma2", "gemma3_text", "vaultgemma")
"""``model_type`` of models whose logits become ``c * tanh(logits / c)`` with ``c = final_logit_softcapping`` (arXiv 2408.00118)."""
CAP = "final_logit_softcapping"
CHANGES = (CAP, "logits_scaling", "logit_scale", "lm_head_multiplier", "logits_soft_cap")
"""Config keys that change logits, in whatever type of model."""
ATTENTION_CAP = "attn_logit_softcapping"
"""Config key of a cap on what attention's softmax gets, which torch's ``sdpa`` cannot compute and transformers leaves out there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitForm:
    """``softcap * tanh(scale * logits / softcap)``, or ``scale * logits``."""

    scale: float = 1.0
    """Above 0."""
    softcap: float | None = None
    """Above 0; None: no cap."""


def logit_form(model_type: str, value_of: Callable[[str], object]) -> LogitForm | str:
    """What a model does to its logits; or the config key that says something about them which is not known of this type.

    Args:
        model_type: of the text model.
        value_of: the value of a config key; None without it.
    """
    known = {MULTIPLIERS.get(model_type), DIVISORS.get(model_type), CAP if model_type in CAPPED else None}
    form = LogitForm()
    for key in CHANGES:
        value = value_of(key)
        if value is None or (value == 1 and key != CAP):
            continue
        if key not in known or not isinstance(value, int | float) or value <= 0:
            return key
        if key == CAP:
            form = LogitForm(softcap=float(value))
        else:
            form = LogitForm(scale=1.0 / value if model_type in DIVISORS else float(value))
    return form
