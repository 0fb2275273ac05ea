"""Which groups are worth training on."""

import pytest

from rljob_runtime.overlap.filters import GroupFilter


@pytest.mark.parametrize(
    ("bounds", "scores", "kept"),
    [
        (GroupFilter(), [0.0, 0.0], True),
        (GroupFilter(min_std=0.0), [0.1, 0.1, 0.1], False),
        (GroupFilter(min_std=0.0), [0.1, 0.1, 0.2], True),
        (GroupFilter(min_std=0.5), [0.0, 1.0], False),
        (GroupFilter(min_std=0.49), [0.0, 1.0], True),
        (GroupFilter(min_std=0.0), [1.0], False),
        (GroupFilter(min_mean=0.25), [0.0, 0.5], False),
        (GroupFilter(min_mean=0.25), [0.0, 0.6], True),
        (GroupFilter(max_mean=0.75), [0.5, 1.0], False),
        (GroupFilter(max_mean=0.75), [0.4, 1.0], True),
        (GroupFilter(min_mean=0.0, max_mean=1.0, min_std=0.0), [1.0, 1.0], False),
        (GroupFilter(min_mean=0.0, max_mean=1.0, min_std=0.0), [0.0, 1.0], True),
    ],
)
def test_every_bound_is_strict(bounds: GroupFilter, scores: list[float], kept: bool) -> None:
    assert bounds.keeps(scores) is kept


def test_it_says_what_it_keeps() -> None:
    assert str(GroupFilter(min_mean=0.1, max_mean=0.95, min_std=0.0)) == "mean > 0.1 and mean < 0.95 and std > 0"
    assert str(GroupFilter()) == "any"
