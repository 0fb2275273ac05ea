"""Comparisons of float32 numbers that are equal except for the order in which they were summed.

The order depends on the layout of ranks, on how rows are packed, and on the processor: the length of its vectors decides how kernels divide
a row. A fixed bound that holds on one processor may fail on the next; these bounds grow with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

GRADIENTS = 2e-5
"""Largest difference of a gradient, as a part of its largest number; up to 4e-6 were measured on a processor with AVX2."""
SMALL = 0.01
"""A gradient that is smaller than this part of the largest of the model is compared with that part instead: gradients of key biases, which
softmax ignores, are nothing but rounding."""
LOGPROBS = {"rtol": 1e-6, "atol": 3e-6}
"""Of log-probs in nats: a sum over a vocabulary of logits that each are a sum; a float32 of 8 has a spacing of 1e-6."""

Arrays = Mapping[str, Any]
"""By name: arrays, or tensors on the CPU."""


def assert_gradients_equal(found: Arrays, expected: Arrays) -> None:
    """Equal except for rounding."""
    assert found.keys() == expected.keys() != set()
    # in float64, so that the comparison does not round
    pairs = {name: (np.asarray(found[name], dtype=np.float64), np.asarray(expected[name], dtype=np.float64)) for name in expected}
    scales = {name: float(np.abs(wanted).max()) for name, (_, wanted) in pairs.items()}
    floor = SMALL * max(scales.values())
    assert floor > 0.0, "all gradients are zero"
    differences = {name: float(np.abs(got - wanted).max()) / max(scales[name], floor) for name, (got, wanted) in pairs.items()}
    far = {name: difference for name, difference in differences.items() if not difference <= GRADIENTS}
    assert not far, f"gradients differ by more than {GRADIENTS} of their largest number: {far}"
