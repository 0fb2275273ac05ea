"""Per-token estimators of KL(policy || reference) on tokens sampled from the policy (J. Schulman, "Approximating KL divergence", 2020).

With ``d = logp_reference - logp_policy``:

====  =================  ===========================================================================
K1    -d                 unbiased, can be negative; as a loss its expected gradient is zero on-policy
K2    d^2 / 2            biased, non-negative; its gradient is the gradient of the KL
K3    exp(d) - d - 1     unbiased, non-negative (GRPO, arXiv 2402.03300, eq. 4)
ABS   |d|                biased, non-negative; every token pulls equally hard towards the reference
====  =================  ===========================================================================
"""

from __future__ import annotations

import torch

from rljob_api.vocabulary import KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is 5e8, far inside float32, and beyond any ratio worth following."""


def kl_terms(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate the divergence at each token; differentiable in ``logprobs``.

    Args:
        logprobs: shape (N,), of the policy.
        reference_logprobs: shape (N,), of the frozen reference.
        estimator: the formula, see the module.

    Returns:
        Shape (N,), nats.
    """
    difference = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case KLEstimator.K1:
            return -difference
        case KLEstimator.K2:
            return 0.5 * difference.square()
        case KLEstimator.K3:
            return torch.expm1(difference) - difference
        case KLEstimator.ABS:
            return difference.abs()
