"""When a batch can be taken of what is there."""

from collections import Counter

from rljob_runtime.overlap.buffer import TrajectoryBuffer
from rljob_runtime.overlap.staleness import GroupVersions
from tests.support.rollouts import make_gate


def test_groups_without_scores_suffice_unless_an_older_one_is_still_generated() -> None:
    """What scores on an engine's devices gets them when a batch lacks nothing but scores, and not for each group that ends early."""
    gate = make_gate(4, 1, 3)
    unfinished = GroupVersions()
    for group in range(4):
        unfinished.add(group, 0)
    for group in range(4, 8):
        unfinished.add(group, 1)
    buffer = TrajectoryBuffer(gate=gate, unfinished=unfinished, on_drop=lambda group: None)
    assert buffer.suffices(4, 1, Counter({1: 4})), "the four oldest are generated"
    assert not buffer.suffices(4, 1, Counter({0: 1, 1: 3})), "one of them would be too old after this step"
    assert not buffer.suffices(4, 1, Counter({0: 1})), "whatever else is there"
    assert buffer.suffices(4, 1, Counter())
