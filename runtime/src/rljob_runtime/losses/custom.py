"""Losses and advantage estimators of the user's own; named in the spec, checked before anything starts.

A loss (``algorithm.policyLoss: {variant: Custom, function: "my_losses:loss", parameters: {beta: 0.1}}``) is called with the N trained
tokens of a micro-batch and returns the loss of each, differentiable in ``tokens.logprobs``::

    def loss(tokens: LossTokens, *, beta: float) -> torch.Tensor:          # shape (N,), float
        log_ratio = tokens.logprobs - tokens.old_logprobs                  # each shape (N,)
        return -tokens.advantages * tokens.logprobs + beta * log_ratio.square()

How token losses become one number, sample weights, the off-policy correction, KL and entropy are added around it as for every variant.
It may return :class:`~rljob_runtime.losses.tokens.PolicyTerms` instead, so that its own ratio and clips are reported.

An estimator (``algorithm.advantage: {estimator: Custom, function: "my_advantages:estimate"}``) is called once a step in the driver with
the S responses of the step and their N sampled tokens, numpy only::

    def estimate(step: StepRewards, **parameters) -> np.ndarray:           # shape (S,) or (N,), finite
        return step.rewards - step.rewards.mean()                          # shape (S,)

Whitening and clipping of ``algorithm.advantage`` follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import PluginError
from rljob_runtime.losses.normalize import DoubleArray
from rljob_runtime.plugins import Function, check_signature, load_function

if TYPE_CHECKING:
    from rljob_api.v1alpha1.policy_loss import CustomLoss
    from rljob_runtime.losses.tokens import LossTokens, PolicyTerms

LOSS_FIELD = "spec.algorithm.policyLoss.function"
ESTIMATOR_FIELD = "spec.algorithm.advantage.function"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewards:
    """What an estimator is given of a step: S responses with N sampled tokens, one response after another."""

    rewards: DoubleArray
    """Shape (S,): shaped score of each response, less its KL penalty where ``algorithm.kl.placement`` is Reward."""
    token_rewards: DoubleArray
    """Shape (N,): the same spread over tokens, the score on each response's last one."""
    lengths: npt.NDArray[np.integer]
    """Shape (S,): sampled tokens of each response; sums to N."""
    group_ids: npt.NDArray[np.integer]
    """Shape (S,): equal means same prompt."""


def load_loss(reference: str, parameters: Mapping[str, Any], folder: str | None) -> Function:
    """The function of a Custom loss, ready to be called.

    Raises:
        PluginError: it cannot be imported, or not be called with the tokens and ``parameters``.
    """
    return _load(LOSS_FIELD, reference, parameters, folder, "tokens")


def load_estimator(reference: str, parameters: Mapping[str, Any], folder: str | None) -> Function:
    """The function of a Custom estimator, ready to be called.

    Raises:
        PluginError: it cannot be imported, or not be called with the step and ``parameters``.
    """
    return _load(ESTIMATOR_FIELD, reference, parameters, folder, "step")


def custom_loss(tokens: LossTokens, settings: CustomLoss) -> PolicyTerms:
    """What the user's function returns for these tokens; :func:`load_loss` has brought its folder onto the Python path.

    Raises:
        ValueError: it returned something else than one number per token.
    """
    import torch

    from rljob_runtime.losses.policy import weighted_policy_loss
    from rljob_runtime.losses.tokens import PolicyTerms

    assert settings.function is not None
    result = load_function(settings.function, None)(tokens, **settings.parameters)
    loss = result.loss if isinstance(result, PolicyTerms) else result
    if not isinstance(loss, torch.Tensor) or loss.shape != tokens.logprobs.shape or not loss.is_floating_point():
        found = f"{loss.dtype}{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        wanted = tuple(tokens.logprobs.shape)
        raise ValueError(
            f"{LOSS_FIELD} {settings.function} returned {found}; it must return the loss of each token, float of shape {wanted}"
        )
    if isinstance(result, PolicyTerms):
        return result
    return weighted_policy_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, None)._replace(loss=loss)


def custom_advantages(function: Function, reference: str, step: StepRewards, parameters: Mapping[str, Any]) -> DoubleArray:
    """Advantages of shape (N,) from the user's function.

    Raises:
        ValueError: it returned something else than one finite number per response or per token.
    """
    result = np.asarray(function(step, **parameters), dtype=np.float64)
    per_response, per_token = step.rewards.shape, step.token_rewards.shape
    if result.shape not in (per_response, per_token):
        raise ValueError(f"{ESTIMATOR_FIELD} {reference} returned shape {result.shape}; it must be {per_response} or {per_token}")
    if not np.isfinite(result).all():
        raise ValueError(f"{ESTIMATOR_FIELD} {reference} returned {result[~np.isfinite(result)][0]}; all advantages must be finite")
    return result if result.shape == per_token else np.repeat(result, step.lengths)


def _load(field: str, reference: str, parameters: Mapping[str, Any], folder: str | None, argument: str) -> Function:
    try:
        function = load_function(reference, folder)
        takes = f"one positional argument, {argument}, and the keywords: {', '.join(parameters) or 'none'}"
        check_signature(function, reference, (argument,), parameters, takes)
    except PluginError as error:
        raise PluginError(f"{field}: {error}") from error
    return function
