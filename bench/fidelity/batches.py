"""Random batches by fixed seeds: 3 prompts with 4 responses each, of 1 to 10 tokens."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from bench.fidelity.exchange import Array, Batch

GROUPS, SAMPLES, TOKENS = 3, 4, 10
VOCABULARY = 7
EXTREME_SHARE = {"extreme": 0.2, "beyond": 0.6}
"""Of the tokens, those with an extreme ratio."""

KINDS = {
    "plain": "ragged lengths, log-ratios of some tenths",
    "on-policy": "the same, all policies equal",
    "extreme": "a fifth of the tokens with log-ratios of 3 to 7, up or down",
    "short": "half of the responses one token long, one group with equal scores, scores 0 and 1",
    "holes": "a third of the tokens observed, not sampled",
    "masked": "one response without any trained token",
    "beyond": "most log-ratios 22 to 30, those to the reference too, half of the responses one token long; only where sides differ",
    "lonely": "one response to each prompt; only where sides differ",
    "rounded": "groups of 6, one with all scores 0.9, whose mean is rounded; only where sides differ",
}
SHARED = ("plain", "on-policy", "extreme", "short", "holes", "masked")
"""What variants that both sides have must agree on."""


def make(kind: str, seed: int) -> Batch:
    """The batch of this kind and seed."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    rows = GROUPS * SAMPLES
    lengths = _lengths(kind, rng, rows)
    present = (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)
    proximal = -rng.gamma(1.5, 1.0, present.shape)
    behavior = proximal + rng.normal(0.0, 0.1, present.shape)
    logprobs = proximal + rng.normal(0.0, 0.25, present.shape)
    reference = proximal + np.clip(rng.normal(0.0, 0.5, present.shape), -1.5, 1.5)
    if kind in {"extreme", "beyond"}:
        far = (3.0, 7.0) if kind == "extreme" else (22.0, 30.0)
        share = EXTREME_SHARE[kind]
        logprobs = proximal + _extreme(rng, logprobs - proximal, far, share)
        behavior = proximal + _extreme(rng, behavior - proximal, far, share)
        reference = (
            np.minimum(reference, logprobs + 2.0) if kind == "extreme" else proximal + _extreme(rng, reference - proximal, far, share)
        )
    elif kind == "on-policy":
        behavior = logprobs = proximal
    scores = rng.integers(0, 2, rows).astype(np.float64) if kind == "short" else rng.normal(0.0, 1.0, rows)
    samples = _samples(kind)
    if kind in {"short", "rounded"}:
        scores[:samples] = 1.0 if kind == "short" else 0.9
    old_values = rng.normal(0.0, 0.5, present.shape)
    batch = {
        "mask": _mask(kind, rng, present, lengths),
        "scores": scores,
        "proximal": proximal,
        "behavior": behavior,
        "logprobs": logprobs,
        "reference": reference,
        "entropy": rng.uniform(0.0, 2.0, present.shape),
        "old_values": old_values,
        "values": old_values + rng.normal(0.0, 0.4, present.shape),
        "returns": rng.normal(0.0, 1.0, present.shape),
        "token_advantages": rng.normal(0.0, 1.0, present.shape),
        "sequence_advantages": np.repeat(rng.normal(0.0, 1.0, (rows, 1)), TOKENS, axis=1),
    }
    padded: dict[str, Array] = {name: (array * present if array.ndim == 2 else array).astype(np.float32) for name, array in batch.items()}
    padded["logits"] = rng.normal(0.0, 2.0, (*present.shape, VOCABULARY)).astype(np.float32)
    padded["tokens"] = rng.integers(0, VOCABULARY, present.shape)
    return {**padded, "lengths": lengths, "groups": np.arange(rows) // samples}


def _samples(kind: str) -> int:
    """Responses to one prompt."""
    return {"lonely": 1, "rounded": 6}.get(kind, SAMPLES)


def _lengths(kind: str, rng: Generator, rows: int) -> Array:
    lengths = rng.integers(1, TOKENS + 1, rows)
    lengths[:2] = 1, TOKENS
    if kind in {"short", "beyond"}:
        lengths[::2] = 1
    return lengths


def _mask(kind: str, rng: Generator, present: Array, lengths: Array) -> Array:
    mask = present.copy()
    if kind == "holes":
        mask *= rng.random(present.shape) > 0.33
        mask[np.arange(lengths.size), lengths - 1] = 1.0  # a score belongs to a sampled token
    elif kind == "masked":
        mask[2] = 0.0
    return mask


def _extreme(rng: Generator, log_ratio: Array, far: tuple[float, float], share: float) -> Array:
    """Log-ratios, some of them replaced by ones between the bounds, of either sign."""
    chosen = rng.random(log_ratio.shape) < share
    return np.where(chosen, rng.uniform(*far, log_ratio.shape) * rng.choice([-1.0, 1.0], log_ratio.shape), log_ratio)
