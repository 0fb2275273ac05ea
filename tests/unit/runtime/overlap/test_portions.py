"""What arrives in one pass of the event loop is handled in several, in order, and all of it."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.overlap.portions import Portions
from tests.support.virtual_time import run_virtual

SIZE = 8


async def passes_of(counts: Sequence[int], *, cancelled: frozenset[int] = frozenset()) -> list[list[int]]:
    """Which of the tasks, that all begin at once, were let in by each pass of the loop, in order."""
    portions = Portions(SIZE)
    passes: list[list[int]] = [[]]
    served = 0

    async def handle(index: int) -> None:
        nonlocal served
        await portions.turn(counts[index])
        passes[-1].append(index)
        served += 1

    tasks = [asyncio.ensure_future(handle(index)) for index in range(len(counts))]
    await asyncio.sleep(0)  # all have asked
    for index in cancelled:
        tasks[index].cancel()
    while not all(task.done() for task in tasks):
        passes.append([])
        await asyncio.sleep(0)
    return passes


@given(counts=st.lists(st.integers(1, SIZE), max_size=40))
def test_everything_is_handled_in_the_order_of_asking_and_no_pass_has_more_than_two_portions(counts: list[int]) -> None:
    passes = run_virtual(passes_of(counts))
    assert [index for found in passes for index in found] == list(range(len(counts)))
    assert all(sum(counts[index] for index in found) < 2 * SIZE for found in passes)


@given(counts=st.lists(st.integers(1, SIZE), max_size=40), data=st.data())
def test_who_is_cancelled_while_it_waits_holds_up_nobody(counts: list[int], data: st.DataObject) -> None:
    first = passes_of(counts)
    at_once = set(run_virtual(first)[0])
    waiting = [index for index in range(len(counts)) if index not in at_once]
    cancelled = frozenset(data.draw(st.sets(st.sampled_from(waiting)))) if waiting else frozenset()
    passes = run_virtual(passes_of(counts, cancelled=cancelled))
    assert [index for found in passes for index in found] == [index for index in range(len(counts)) if index not in cancelled]


def test_one_that_is_larger_than_a_portion_is_let_in_alone() -> None:
    assert [found for found in run_virtual(passes_of([5 * SIZE, 1])) if found] == [[0], [1]]
