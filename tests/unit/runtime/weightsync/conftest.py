"""What tests of weight sync leave."""

from collections.abc import Iterator

import pytest

from rljob_runtime.weightsync.group import MEMBERSHIPS


@pytest.fixture(autouse=True)
def groups_are_left() -> Iterator[None]:
    """Each group of gloo has a thread that wakes up a hundred times a second, until the process ends or leaves it."""
    yield
    MEMBERSHIPS.leave()
