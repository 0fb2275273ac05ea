"""BOUND: no group is started further ahead of training than declared, for any order of events."""

import math
from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.overlap.staleness import GroupVersions, StalenessGate, enough

EVENTS = st.lists(st.sampled_from(["admit", "admit_one", "drop", "train"]), max_size=200)


@given(batch=st.integers(1, 8), lag=st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5]), steps=st.integers(1, 12), events=EVENTS)
def test_no_group_starts_more_than_lag_versions_before_it_is_trained(batch: int, lag: float, steps: int, events: list[str]) -> None:
    gate = StalenessGate(groups_per_step=batch, async_generation_ratio=lag, max_staleness=ceil(lag), total_groups=steps * batch)
    started_at: list[int] = []
    trained = 0
    for event in events:
        if event.startswith("admit"):
            count = gate.capacity if event == "admit" else min(gate.capacity, 1)
            gate.admit(count)
            started_at += [gate.version] * count
        elif event == "drop" and len(started_at) > trained:
            started_at.pop()
            gate.drop()
        elif event == "train" and len(started_at) - trained >= batch:
            for version in started_at[trained : trained + batch]:  # oldest first
                assert gate.version - version <= math.ceil(lag)
            trained += batch
            gate.advance(gate.version + 1)
        assert len(started_at) <= steps * batch
        assert len(started_at) <= (lag + gate.version + 1) * batch


@given(batch=st.integers(1, 64), steps=st.integers(1, 100))
def test_lag_zero_admits_exactly_one_batch_per_version(batch: int, steps: int) -> None:
    gate = StalenessGate(groups_per_step=batch, async_generation_ratio=0, max_staleness=0, total_groups=steps * batch)
    for version in range(1, steps + 1):
        assert gate.capacity == batch
        gate.admit(batch)
        assert gate.capacity == 0
        gate.advance(version)
    assert gate.capacity == 0


def test_a_resumed_gate_stands_where_the_first_one_stood() -> None:
    gate = StalenessGate(groups_per_step=4, async_generation_ratio=0, max_staleness=0, total_groups=40, version=7)
    assert gate.capacity == 4


def test_admitting_too_much_and_going_back_are_refused() -> None:
    gate = StalenessGate(groups_per_step=4, async_generation_ratio=0, max_staleness=0, total_groups=40, version=2)
    with pytest.raises(ValueError, match="5 groups admitted, only 4 allowed at version 2"):
        gate.admit(5)
    with pytest.raises(ValueError, match="2 -> 2"):
        gate.advance(2)


@given(
    batch=st.integers(1, 6),
    lag=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
    spare=st.integers(0, 5),
    version=st.integers(0, 8),
    steps=st.integers(1, 10),
)
def test_spare_groups_come_on_top_but_never_beyond_the_end_of_the_run(batch: int, lag: float, spare: int, version: int, steps: int) -> None:
    version = min(version, steps)
    gate = StalenessGate(
        groups_per_step=batch, async_generation_ratio=lag, max_staleness=ceil(lag), total_groups=steps * batch, version=version, spare=spare
    )
    plain = StalenessGate(
        groups_per_step=batch, async_generation_ratio=lag, max_staleness=ceil(lag), total_groups=steps * batch, version=version
    )
    assert gate.capacity == min(plain.capacity + spare, (steps - version) * batch)


def test_groups_of_an_earlier_attempt_count_and_nothing_begins_that_only_given_batches_could_train() -> None:
    gate = StalenessGate(groups_per_step=2, async_generation_ratio=1, total_groups=20, max_staleness=0, version=3)
    gate.restore(5, next_batch=5)  # the batches of versions 3 and 4, and one group more
    found = []
    for version in (3, 4, 5):
        if version > 3:
            gate.advance(version)
        found.append(gate.capacity)
        gate.taken()
        found.append(gate.capacity)
    assert found == [0, 0, 0, 0, 3, 0], "at version 5, 10 of 14 places are taken by earlier steps, 1 by the group that waits"


def test_nothing_begins_that_would_be_too_old_before_it_can_be_trained() -> None:
    gate = StalenessGate(groups_per_step=2, async_generation_ratio=0, total_groups=20, max_staleness=0, spare=1)
    gate.admit(3)
    gate.taken()
    gate.drop()
    assert gate.capacity == 0
    gate.advance(1)
    assert gate.capacity == 3
    gate = StalenessGate(groups_per_step=2, async_generation_ratio=0, total_groups=20, max_staleness=1, spare=1)
    gate.admit(3)
    gate.taken()
    gate.drop()
    assert gate.capacity == 1


@given(
    ready=st.lists(st.integers(0, 4), max_size=10),
    unfinished=st.lists(st.integers(0, 4), max_size=10),
    max_staleness=st.integers(0, 4),
    count=st.integers(1, 4),
    spare=st.integers(0, 3),
)
def test_a_wait_is_made_only_where_it_saves_a_group(
    ready: list[int], unfinished: list[int], max_staleness: int, count: int, spare: int
) -> None:
    version = 4
    ready = [s for s in ready if s >= version - max_staleness]
    alive = [s for s in unfinished if s >= version - max_staleness]

    def missed(done: list[int], left_open: list[int], left: int) -> int:
        """Groups too many for the steps up to ``left`` versions ahead if the oldest ``count`` of ``done`` are trained now."""
        rest = sorted(done)[count:] + left_open
        return sum(s + max_staleness - version <= left for s in rest) - left * count

    saves = [missed(ready, alive, left) > max(spare, missed(ready + alive, [], left)) for left in range(max_staleness + 1)]
    found = enough(Counter(ready), Counter(unfinished), version=version, max_staleness=max_staleness, count=count, spare=spare)
    assert found is not any(saves)


@given(changes=st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3)), max_size=30))
def test_versions_of_groups_are_counted(changes: list[tuple[int, int | None]]) -> None:
    """None forgets a group; the version first noted stays."""
    versions, expected = GroupVersions(), dict[int, int]()
    for group_id, version in changes:
        if version is None:
            versions.discard(group_id)
            expected.pop(group_id, None)
        else:
            versions.add(group_id, version)
            expected.setdefault(group_id, version)
    assert versions.counts == Counter(expected.values())
    assert {group_id: versions.get(group_id) for group_id in range(6)} == {group_id: expected.get(group_id) for group_id in range(6)}
