"""Everything this package raises on purpose, one picklable tree.

::

    ApiError                      (Exception)
    ├── SpecInvalidError          (ValueError)   the manifest is wrong; carries every problem found -> exit 2
    ├── PlacementError            (ValueError)   a placement is impossible; becomes a FieldError
    ├── ModelShapeError           (ValueError)   a model's config.json cannot be read for its size
    └── SchemaError               (TypeError)    a model cannot be written as a structural schema: a mistake in this package

None of them goes away by trying again.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass

MAX_SHOWN_VALUE = 80
"""Characters of an offending value that a message repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One problem of a manifest: where, what is there, why it is wrong, what to do."""

    path: str
    """Path with the manifest's own keys, for example ``spec.components[1].placement.ranks``; empty for the whole text."""
    value: str | None = None
    """The offending value as short JSON (see :func:`show`); None when there is none, for example for a missing field."""
    problem: str
    """What is wrong, with both values where two disagree."""
    remedy: str
    """What to write instead."""
    line: int | None = None
    """Line in the manifest, counted from 1; None when it did not come from text."""

    def __str__(self) -> str:
        """``path: value: problem; remedy`` without the parts that are absent."""
        head = ": ".join(part for part in (self.path, self.value) if part)
        return f"{head}: {self.problem}; {self.remedy}" if head else f"{self.problem}; {self.remedy}"


def show(value: object) -> str:
    """A value as one line of JSON, cut to :data:`MAX_SHOWN_VALUE` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[: MAX_SHOWN_VALUE - 3]}..."


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``3 processes``, ``1,024 devices``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def field_error(path: str, value: object, problem: str, remedy: str) -> FieldError:
    """A problem about a value that is still plain data; None when there is no value to show, or it must not be shown."""
    return FieldError(path=path, value=None if value is None else show(value), problem=problem, remedy=remedy)


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """A remedy for a misspelled word, or None when nothing is near."""
    folded = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f"did you mean {folded[near[0]]}?" if near else None


class ApiError(Exception):
    """Raised when anything in this package is wrong: the root, for callers that treat all its errors alike."""


class SpecInvalidError(ApiError, ValueError):
    """Raised when a manifest is wrong; caught by the CLI (exit 2), the driver and the operator (condition Accepted=False)."""

    def __init__(self, errors: Iterable[FieldError], unchecked: str | None = None) -> None:
        """Keep all problems, in the order they should be read; at least one.

        Args:
            errors: the problems.
            unchecked: a sentence about checks that were not made because of them; None where all were.

        Raises:
            ValueError: ``errors`` is empty.
        """
        self.errors = tuple(errors)
        self.unchecked = unchecked
        if not self.errors:
            raise ValueError("SpecInvalidError needs at least one FieldError")
        super().__init__(self.errors, unchecked)

    def __str__(self) -> str:
        """One line per problem, and one about what was not checked."""
        return "\n".join([*map(str, self.errors), *([self.unchecked] if self.unchecked else [])])


class PlacementError(ApiError, ValueError):
    """Raised when a placement is wrong; caught by the planner, which adds path and value."""

    def __init__(self, check: str, problem: str, remedy: str) -> None:
        """Keep the parts of the message apart.

        Args:
            check: id of the violated rule, as in docs/placement.md, for example ``P6``.
            problem: what is wrong.
            remedy: what to write instead.
        """
        super().__init__(check, problem, remedy)
        self.check = check
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        """``problem; remedy``."""
        return f"{self.problem}; {self.remedy}"


class ModelShapeError(ApiError, ValueError):
    """Raised when a config.json does not say how large a model is; caught by the CLI, which then estimates from what the spec says."""


class SchemaError(ApiError, TypeError):
    """Raised when a model uses something a structural schema cannot say, or leaves a list, map or text unbounded."""
