"""The comparison of gradients passes what is rounded otherwise and nothing else."""

import numpy as np
import pytest

from tests.support.rounding import GRADIENTS, assert_gradients_equal

EXPECTED = {"large": np.float32([[30.0, 1e-3]]), "small": np.float32([0.5, -0.25]), "zero": np.float32([0.0])}


def changed(name: str, index: int, difference: float) -> dict[str, np.ndarray]:
    found = {key: array.copy() for key, array in EXPECTED.items()}
    found[name].flat[index] += difference
    return found


@pytest.mark.parametrize(("name", "scale"), [("large", 30.0), ("small", 0.5), ("zero", 0.3)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_is_allowed_grows_with_the_numbers_of_a_gradient(name: str, scale: float, sign: float) -> None:
    index = EXPECTED[name].size - 1
    assert_gradients_equal(changed(name, index, sign * 0.9 * GRADIENTS * scale), EXPECTED)
    with pytest.raises(AssertionError, match=name):
        assert_gradients_equal(changed(name, index, sign * 1.1 * GRADIENTS * scale), EXPECTED)


def test_other_names_not_a_number_and_zeros_alone_are_not_equal() -> None:
    with pytest.raises(AssertionError):
        assert_gradients_equal({"large": EXPECTED["large"]}, EXPECTED)
    with pytest.raises(AssertionError, match="small"):
        assert_gradients_equal(changed("small", 0, np.nan), EXPECTED)
    with pytest.raises(AssertionError, match="zero"):
        assert_gradients_equal({"zero": EXPECTED["zero"]}, {"zero": EXPECTED["zero"]})
