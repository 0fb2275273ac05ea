"""A measured value beside its limit and its bound, and what follows from it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """Of a line."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement."""

    check: str
    """Which check made it."""
    what: str
    value: float = math.nan
    unit: str = ""
    limit: float | None = None
    """In the same unit; what the value stands beside."""
    limit_name: str = ""
    compared: float | None = None
    """What is held against the bounds; None: nothing is."""
    at_least: float | None = None
    at_most: float | None = None
    skipped: str = ""
    """Why nothing was measured."""
    failed: str = ""
    """Why it could not be measured."""
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the value is inside its bounds; what is no number is not."""
        if self.skipped:
            return Verdict.SKIP
        if self.failed or not math.isfinite(self.value):
            return Verdict.FAIL
        if self.compared is None:
            return Verdict.PASS
        low, high = self.at_least, self.at_most
        inside = (low is None or self.compared >= low) and (high is None or self.compared <= high)
        return Verdict.PASS if inside else Verdict.FAIL

    @property
    def bound_text(self) -> str:
        """The bounds in words."""
        if self.at_least is None and self.at_most is None:
            return "none"
        share = self.limit is not None
        low, high = (None if b is None else f"{b:.0%}" if share else f"{b:.4g}" for b in (self.at_least, self.at_most))
        if low is not None and high is not None:
            return f"{low} to {high}"
        return f"at least {low}" if low is not None else f"at most {high}"

    def as_document(self) -> dict[str, Any]:
        """For JSON; numbers that are not finite are null."""
        fields: Mapping[str, Any] = asdict(self)
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        return plain | {"verdict": str(self.verdict)}


def share(check: str, what: str, value: float, unit: str, *, limit: float, limit_name: str, at_least: float | None, note: str = "") -> Line:
    """A value that should reach a share of its limit; ``at_least`` None sets no bound."""
    compared = value / limit if limit > 0 else math.nan
    return Line(
        check=check,
        what=what,
        value=value,
        unit=unit,
        limit=limit,
        limit_name=limit_name,
        compared=compared,
        at_least=at_least,
        note=note,
    )


def within(
    check: str, what: str, value: float, unit: str, *, expected: float, expected_name: str, tolerance: float, note: str = ""
) -> Line:
    """A value that should be near another one."""
    compared = value / expected if expected > 0 else math.nan
    return Line(
        check=check,
        what=what,
        value=value,
        unit=unit,
        limit=expected,
        limit_name=expected_name,
        compared=compared,
        at_least=1 - tolerance,
        at_most=1 + tolerance,
    )


def at_most(check: str, what: str, value: float, unit: str, bound: float | None, *, note: str = "") -> Line:
    """A value that should not be larger than a bound; None sets none."""
    return Line(check=check, what=what, value=value, unit=unit, compared=value, at_most=bound, note=note)


def equal(check: str, what: str, differing: float, *, note: str = "") -> Line:
    """A largest difference that has to be 0."""
    return at_most(check, what, differing, "difference", 0.0, note=note)


def exit_code(lines: list[Line]) -> int:
    """0 when nothing failed and something was measured."""
    verdicts = {line.verdict for line in lines}
    return 0 if Verdict.FAIL not in verdicts and Verdict.PASS in verdicts else 1
