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
LOGPROBS = {"rtol": 1e-6, "atol": 5e-6}
"""Of log-probs in nats: a sum over a vocabulary of logits that each are a sum; a float32 of 8 has a spacing of 1e-6."""

Arrays = Mapping[str, Any]
"""By name: arrays, or tensors on the CPU."""


def gradient_differences(found: Arrays, expected: Arrays) -> dict[str, float]:
    """By name, the largest difference as a part of the largest number expected; see :data:`SMALL`."""
    assert found.keys() == expected.keys() != set()
    scales = {name: float(np.abs(array).max()) for name, array in arrays(expected).items()}
    floor = SMALL * max(scales.values())
    assert floor > 0.0, "all gradients are zero"
    same = arrays(expected)
    return {name: float(np.abs(array - same[name]).max()) / max(scales[name], floor) for name, array in arrays(found).items()}


def assert_gradients_equal(found: Arrays, expected: Arrays, tolerance: float = GRADIENTS) -> None:
    """Equal except for rounding; ``tolerance`` is a part of each gradient's largest number."""
    differences = gradient_differences(found, expected)
    far = {name: difference for name, difference in differences.items() if not difference <= tolerance}
    assert not far, f"gradients differ by more than {tolerance} of their largest number: {far}"


def arrays(tensors: Arrays) -> dict[str, np.ndarray]:
    """The same in float64, so that the comparison does not round."""
    return {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}
