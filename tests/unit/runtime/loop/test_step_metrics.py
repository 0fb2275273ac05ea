"""Metrics of the groups of a step."""

import numpy as np
import pytest

from rljob_runtime.loop.step_metrics import score_deviations


@pytest.mark.parametrize("samples", [3, 6, 8, 12])
def test_a_group_of_equal_scores_does_not_deviate(samples: int) -> None:
    """Though the rounded mean of equal scores can differ from them."""
    groups = [[score] * samples for score in (0.05, 0.1, 0.2, 0.7)]
    assert score_deviations(groups).tolist() == [0.0] * 4
    assert score_deviations([*groups, [0.0, 1.0]]).tolist() == [0.0] * 4 + [0.5]
    assert score_deviations([[0.0, 1.0], [0.2, 0.4]]) == pytest.approx(np.array([0.5, 0.1]))
