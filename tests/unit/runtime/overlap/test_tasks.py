"""The order of tasks of an agentic job."""

from collections import Counter

import pytest

from rljob_runtime.errors import DataError
from rljob_runtime.overlap.tasks import TRAINING, VALIDATION, TaskOrder

SHARES = {"lake": 3.0, "rooms": 1.0, "off": 0.0}


def order(purpose: str = TRAINING, seed: int = 1) -> TaskOrder:
    return TaskOrder(SHARES, seed=seed, purpose=purpose)


def seeds(tasks: list) -> list[int]:
    return [int(task.metadata["seed"]) for task in tasks]


def test_environments_come_in_proportion_to_their_shares_from_the_beginning() -> None:
    tasks = order().next(40)
    assert Counter(task.source for task in tasks) == {"lake": 30, "rooms": 10}
    assert Counter(task.source for task in tasks[:4]) == {"lake": 3, "rooms": 1}
    assert [task.index for task in tasks] == list(range(40))


def test_a_resumed_order_goes_on_exactly() -> None:
    whole, first = order(), order()
    expected = whole.next(25)
    first.next(11)
    resumed = order()
    resumed.restore(first.state())
    assert resumed.next(14) == expected[11:]


def test_seeds_differ_by_task_job_and_purpose_and_validation_never_meets_training() -> None:
    training, validation = seeds(order().next(5000)), seeds(order(VALIDATION).next(5000))
    assert len(set(training)) > 4990
    assert set(training).isdisjoint(validation)
    assert validation == seeds(order(VALIDATION).next(5000))
    assert training != seeds(order(seed=2).next(5000))
    assert all(0 <= seed < 2**31 for seed in training + validation)


def test_the_position_of_other_environments_is_refused() -> None:
    with pytest.raises(DataError, match="not one of lake, rooms"):
        order().restore(TaskOrder({"lake": 1.0}, seed=1, purpose=TRAINING).state())


def test_nothing_to_play_is_refused() -> None:
    with pytest.raises(DataError, match="share of validation"):
        TaskOrder({"off": 0.0}, seed=1, purpose=VALIDATION)
