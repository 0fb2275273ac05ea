"""Whether trainer and engine hold the same weights, from the differences of their log-probs of the same tokens. Pure.

Two implementations of one model never agree exactly. In float32 they differ by 1e-6 nats a token; in bfloat16 healthy pairs differ by an
RMS of 0.031 to 0.041 nats (Qwen2.5-0.5B, ServiceNow/Fast-LLM pull request 525), with tails so heavy that the largest of some hundred
tokens says little. So the mean and the 95th percentile are tested: a tensor that did not arrive moves both, a part of the vocabulary that
did not arrive moves the tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import WeightSyncError

TAIL = 0.95
"""Percentile of the differences that is tested besides their mean."""
FEW_TOKENS = 128
"""With fewer tokens mean and percentile of healthy noise scatter more, and limits widen by the square root of what is missing."""
CLIP = 6.0
"""Times the mean's limit: more does not count in the mean, so that a single token of a heavy tail does not decide it."""
MEAN_DIFFERENCE = {"float32": 2e-5, "bfloat16": 0.08, "float16": 0.08}
"""In nats, by the coarsest type that trainer or engine computes in; twice and more what healthy pairs reach in thousands of syncs."""
TAIL_DIFFERENCE = {"float32": 5e-5, "bfloat16": 0.25, "float16": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """From when on a probe is suspect, and from when on it fails the run."""

    mean: float
    """In nats."""
    tail: float
    """In nats, of the 95th percentile."""
    fail_factor: float = 2.0
    """Times a limit that fails at once."""
    fail_after: int = 3
    """Suspect probes of one engine in a row that fail."""


def default_limits(dtypes: Iterable[str]) -> tuple[float, float]:
    """Limits of mean and tail where trainer and engines compute in these types: those of the coarsest."""
    given = list(dtypes)
    return max(MEAN_DIFFERENCE[dtype] for dtype in given), max(TAIL_DIFFERENCE[dtype] for dtype in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What one probe found, over all engines."""

    mean: float
    """Mean absolute difference of a token's log-prob, in nats, of the engine where it is largest; single ones are clipped."""
    tail: float
    """95th percentile of the differences, of the engine where it is largest."""
    largest: float
    warnings: tuple[str, ...] = ()
    """About engines that are suspect."""


class ProbeHistory:
    """Tests the engines' answers, and remembers which were suspect how often in a row."""

    def __init__(self, limits: ProbeLimits) -> None:
        """Nothing is suspect yet."""
        self._limits = limits
        self._in_row: dict[str, int] = {}

    def test(self, version: int, wanted: npt.NDArray[np.float32], found: dict[str, npt.NDArray[np.float32]]) -> ProbeReport:
        """Compare all engines with the trainer.

        Args:
            version: of the weights, for messages.
            wanted: log-probs (N,) of the trainer.
            found: log-probs (N,) by name of the engine.

        Raises:
            WeightSyncError: an engine is beyond ``fail_factor`` times a limit, or suspect for the ``fail_after``-th time in a row, or has
                something that is not a number.
        """
        reports = [self._test_one(version, name, np.abs(answer - wanted)) for name, answer in found.items()]
        return ProbeReport(
            mean=max((r.mean for r in reports), default=0.0),
            tail=max((r.tail for r in reports), default=0.0),
            largest=max((r.largest for r in reports), default=0.0),
            warnings=tuple(warning for r in reports for warning in r.warnings),
        )

    def _test_one(self, version: int, name: str, differences: npt.NDArray[np.float32]) -> ProbeReport:
        limits, widened = self._limits, math.sqrt(max(1.0, FEW_TOKENS / max(len(differences), 1)))
        mean_limit, tail_limit = limits.mean * widened, limits.tail * widened
        clip = CLIP * mean_limit
        mean = float(np.mean(np.minimum(differences, clip))) if len(differences) else 0.0
        tail = float(np.quantile(differences, TAIL)) if len(differences) else 0.0
        excess = max(mean / mean_limit, tail / tail_limit) if np.isfinite(differences).all() else math.inf
        suspect = excess > 1.0
        self._in_row[name] = count = self._in_row.get(name, 0) + 1 if suspect else 0
        text = (
            f"after publishing v{version} {name} and the trainer disagree by {mean:.3g} nats in the mean of {len(differences)} tokens' "
            f"log-probs, each counted as {clip:.3g} at most (spec.weightSync.probe.meanDifference {mean_limit:.3g}), and by {tail:.3g} at "
            f"the 95th percentile (tailDifference {tail_limit:.3g})"
        )
        if excess > limits.fail_factor:
            more = f"more than {limits.fail_factor:g} times what is allowed"
            raise WeightSyncError(f"{text}, {more}: the engine does not hold the trainer's weights")
        if count >= limits.fail_after:
            raise WeightSyncError(f"{text}, for the {count}. probe in a row: the engine does not hold the trainer's weights")
        warnings = (f"{text}: suspect {count} of {limits.fail_after} times in a row",) if suspect else ()
        largest = float(np.max(differences)) if len(differences) else 0.0
        return ProbeReport(mean=mean, tail=tail, largest=largest, warnings=warnings)
