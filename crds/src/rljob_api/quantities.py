"""Kubernetes quantities as exact numbers.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/ (without a sign: no resource is negative).
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from rljob_api.v1alpha1.base import QUANTITY_PATTERN

_SCALES: dict[str, Fraction] = {"": Fraction(1)}
_SCALES |= {letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)}
_SCALES |= {letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)}
_SCALES |= {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)}


def parse(quantity: str) -> Fraction:
    """The number that a quantity stands for: 1/2 for ``500m``, 2**30 for ``1Gi``, 1500 for ``1.5e3``.

    Raises:
        ValueError: not a quantity.
    """
    match = re.fullmatch(QUANTITY_PATTERN, quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity such as 4, 500m or 80Gi")
    number, suffix = match[1], match[2] or ""
    scale = _SCALES.get(suffix)
    return Fraction(number.rstrip(".")) * (Fraction(10) ** int(suffix[1:]) if scale is None else scale)


def rounded_up(quantity: str) -> int:
    """A whole number, rounded up as KubeRay does: 1 for ``500m``.

    Raises:
        ValueError: not a quantity.
    """
    return math.ceil(parse(quantity))


def rounded_down(quantity: str) -> int:
    """A whole number, rounded down: bytes of memory.

    Raises:
        ValueError: not a quantity.
    """
    return math.floor(parse(quantity))
