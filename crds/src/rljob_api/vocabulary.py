"""Words that the spec and the runtime share: enums without pydantic, so that a judging process starts in a twentieth of a second.

The spec's models use them for fields, the runtime's own small configurations for the same settings.
"""

from __future__ import annotations

from enum import StrEnum


class RewardType(StrEnum):
    """How a response is judged."""

    TASK = "Task"
    """The reasoning-gym task's own score_answer against its entry; for prompts of reasoning-gym sources."""
    EXACT_MATCH = "ExactMatch"
    """1 when the text equals the reference answer, else 0; surrounding white space does not count."""
    MATH_VERIFY = "MathVerify"
    """1 when math-verify finds the mathematical value equal to the reference answer's, else 0."""
    FUNCTION = "Function"
    """A user's function."""


class Extraction(StrEnum):
    """Which part of the response is judged; a response without it scores 0."""

    WHOLE = "Whole"
    """Everything, surrounding white space removed."""
    LAST_LINE = "LastLine"
    """The last line that is not blank."""
    BOXED = "Boxed"
    """What the last \\boxed{...} holds."""
    TAG = "Tag"
    """What the last <answer>...</answer> holds."""
    LAST_NUMBER = "LastNumber"
    """The last number; thousands commas are removed."""


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "TokenMean"
    """Mean over all response tokens of the batch."""
    SEQ_MEAN_TOKEN_MEAN = "SeqMeanTokenMean"
    """Mean over sequences of their token means."""
    SEQ_MEAN_TOKEN_SUM = "SeqMeanTokenSum"
    """Mean over sequences of their token sums."""


class KLEstimator(StrEnum):
    """Estimator of KL(policy || reference) on drawn tokens (Schulman, "Approximating KL divergence")."""

    K1 = "K1"
    """Log ratio: unbiased, high variance."""
    K2 = "K2"
    """Half the squared log ratio: biased, low variance."""
    K3 = "K3"
    """Ratio minus 1 minus log ratio: unbiased, low variance."""


class Schedule(StrEnum):
    """Learning rate over the steps, after the warm-up."""

    CONSTANT = "Constant"
    """Stays at the peak."""
    LINEAR = "Linear"
    """Falls to 0 at the last step."""
    COSINE = "Cosine"
    """Falls to 0 at the last step along a half cosine."""
