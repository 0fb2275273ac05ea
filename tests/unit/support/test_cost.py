"""Measuring a cost leaves the process of the tests as fast as it was."""

import gc
import time

import pytest

from tests.support.cost import within


def test_what_was_frozen_stays_frozen() -> None:
    """Unfrozen, all that this process imported would be searched by every full collection of the tests that follow."""
    gc.freeze()
    before = gc.get_freeze_count()
    with within(1.0):
        pass
    assert gc.get_freeze_count() >= 0.9 * before > 0


def test_what_takes_longer_is_an_error() -> None:
    def takes_some_time() -> None:
        with within(0.0):
            while time.process_time() < until_s:
                pass

    until_s = time.process_time() + 0.01
    with pytest.raises(AssertionError, match=r"allowed are 0\.00"):
        takes_some_time()
