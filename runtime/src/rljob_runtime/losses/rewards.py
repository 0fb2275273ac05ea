"""What is added to or taken from scores, and weights that follow from responses; numpy, one number per sample or token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rljob_api.vocabulary import KLEstimator
from rljob_runtime.losses.normalize import DoubleArray, moments_by

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut at +-20 before exp, as in the loss."""


def overlong_penalty(lengths: npt.ArrayLike, *, max_tokens: int, buffer_tokens: int, penalty: float) -> DoubleArray:
    """What long responses lose: 0 up to the buffer, then growing linearly to ``penalty`` at the limit.

    DAPO's soft overlong punishment, arXiv 2503.14476, with its 1 at the limit made a parameter.

    Args:
        lengths: shape (S,), response tokens.
        max_tokens: the limit.
        buffer_tokens: tokens before the limit at which the penalty begins, at least 1.
        penalty: at the limit.

    Returns:
        Shape (S,), at least 0.
    """
    into_buffer = np.asarray(lengths, dtype=np.float64) - (max_tokens - buffer_tokens)
    return np.asarray(penalty * np.clip(into_buffer / buffer_tokens, 0.0, 1.0))


def kl_estimates(logprobs: npt.ArrayLike, reference_logprobs: npt.ArrayLike, estimator: KLEstimator) -> DoubleArray:
    """KL from the policy that sampled the tokens to the reference, at each token.

    With ``d = log policy - log reference``: K1 ``d``, K2 ``d^2 / 2``, K3 ``exp(-d) - 1 + d``, Abs ``|d|`` (J. Schulman, "Approximating KL
    divergence", 2020; Abs from ROLL).

    Args:
        logprobs: shape (N,), of the policy.
        reference_logprobs: shape (N,).
        estimator: which of the four.

    Returns:
        Shape (N,), nats.
    """
    difference = np.asarray(logprobs, dtype=np.float64) - np.asarray(reference_logprobs, dtype=np.float64)
    difference = np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case KLEstimator.K1:
            return difference
        case KLEstimator.K2:
            return np.asarray(0.5 * difference**2)
        case KLEstimator.K3:
            return np.asarray(np.expm1(-difference) + difference)
        case KLEstimator.ABS:
            return np.abs(difference)


def distances_to_teacher(logprobs: npt.ArrayLike, teacher_logprobs: npt.ArrayLike) -> DoubleArray:
    """What a step of on-policy distillation takes from each sampled token's advantage, before its coefficient.

    ``log p_policy - log p_teacher``, the one-sample estimate of the reverse KL per token: K. Lu and Thinking Machines Lab, "On-Policy
    Distillation", 2025 (with discount 0: a token is judged by its own log-ratio alone), and ROLL's ``compute_token_reward`` with
    ``use_opd``. The mean over tokens estimates the KL per token without bias; it may be negative.

    Args:
        logprobs: shape (N,), of the policy that sampled the tokens.
        teacher_logprobs: shape (N,).

    Returns:
        Shape (N,), nats.
    """
    return kl_estimates(logprobs, teacher_logprobs, KLEstimator.K1)


def adapted_coefficient(coefficient: float, *, kl: float, target: float, samples: int, horizon: int) -> float:
    """The coefficient after a step, larger if the KL was above the target: the proportional controller of arXiv 1909.08593.

    ``c * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)``. A step with more samples than the horizon counts as one of as many:
    otherwise the coefficient could change its sign.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(samples / horizon, 1.0))


def difficulty_weights(passed: npt.NDArray[np.bool_], group_ids: npt.ArrayLike) -> DoubleArray:
    """``0.5 + 1.5 * (1 - pass rate of the group)`` for each sample, shape (S,): ROLL's difficulty weight, with the group's own failures."""
    rate, _ = moments_by(passed.astype(np.float64), group_ids)
    return np.asarray(0.5 + 1.5 * (1.0 - rate))


def length_weights(lengths: npt.ArrayLike) -> DoubleArray:
    """``1.5 - (n - min) / (max - min)`` for each sample, shape (S,): ROLL's length weight. Equal lengths give 1."""
    sizes = np.asarray(lengths, dtype=np.float64)
    span = np.ptp(sizes) if sizes.size else 0.0
    return np.asarray(1.5 - (sizes - sizes.min()) / span) if span > 0 else np.ones_like(sizes)
